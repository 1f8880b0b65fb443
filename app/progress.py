"""Live progress: one line that is rewritten in place on a terminal, now and then a plain line elsewhere."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

_PLAIN_EVERY_S = 10.0
_PLAIN_EVERY_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class LiveProgress:
    """How training stands. None: not known yet. `max_age` in steps, `bytes_per_s` written to the store."""

    step: int
    total_steps: int
    loss: float | None = None
    tokens_per_s: float | None = None
    restore_point: int | None = None
    max_age: int | None = None
    bytes_per_s: float | None = None
    state: str = "training"


def progress_line(progress: LiveProgress) -> str:
    """One line, at most 80 characters in ordinary cases; what is not known yet is left out."""
    facts = [
        f"step {progress.step}/{progress.total_steps}",
        None if progress.loss is None else f"loss {progress.loss:.3f}",
        None if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f} tok/s",
        None if progress.restore_point is None else f"restore point {progress.restore_point}",
        None if progress.max_age is None else f"age <= {progress.max_age}",
        None if progress.bytes_per_s is None else f"{decimal(round(progress.bytes_per_s))}/s",
        None if progress.state == "training" else progress.state,
    ]
    return " | ".join(fact for fact in facts if fact is not None)


class ProgressDisplay:
    """Shows progress on `console`; a context manager.

    On a terminal each update replaces the line, and what others print on stderr appears above it. Elsewhere a line is
    printed when the state changes, at the last step, and otherwise after 10 seconds or 10 % of the steps.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live = (
            Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
            if console.is_terminal
            else None
        )
        self._last: tuple[LiveProgress, float] | None = None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, progress: LiveProgress) -> None:
        """Show `progress`, or not yet."""
        if self._live:
            self._live.update(Text(progress_line(progress), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif self._is_due(progress):
            self._last = progress, self._clock()
            self._console.print(progress_line(progress), markup=False, highlight=False, soft_wrap=True)

    def _is_due(self, progress: LiveProgress) -> bool:
        if self._last is None:
            return True
        shown, at = self._last
        return progress != shown and (
            progress.state != shown.state
            or progress.step == progress.total_steps
            or self._clock() - at >= _PLAIN_EVERY_S
            or abs(progress.step - shown.step) >= _PLAIN_EVERY_SHARE * progress.total_steps
        )
