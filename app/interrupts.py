"""Ctrl-C and SIGTERM (`ray job stop` sends it) as one exception, whatever handlers libraries install."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Make both signals raise `KeyboardInterrupt(signal)` in the block; for the main thread only.

    Entered again behind a call that installs handlers of its own: seen, `ray.init` turns SIGTERM into `SystemExit(15)`,
    and Ray Train's `fit` turns Ctrl-C into an exit code of 1 without a word.
    """
    before = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number))
