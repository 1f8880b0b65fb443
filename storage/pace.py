"""Pace: spreads what a ShardWriter stores over the time until more comes, so that writing is even and not in bursts."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

TOLERANCE = 0.5
"""Share of a step's windows that may be left when the next step's shards come: no two ticks are equally long."""


@dataclass(frozen=True)
class Window:
    """The time over which one shard is to be stored."""

    start: float
    seconds: float
    hurried: threading.Event
    clock: Callable[[], float]

    def wait(self, share: float) -> None:
        """Return when so much of the window is over, at once if it is hurried."""
        self.hurried.wait(self.left_s(share))

    def left_s(self, share: float) -> float:
        """Seconds until so much of the window is over; 0 if it is hurried."""
        return 0.0 if self.hurried.is_set() else max(0.0, self.start + share * self.seconds - self.clock())


class Pace:
    """Gives shards their windows, one after the other. Not thread-safe, but for what its windows' threads call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = -1
        self._given_s = self._end = 0.0
        self._hurried = threading.Event()

    def window(self, step: int, seconds: float | None) -> Window:
        """Window of a shard of `step` that has come now; None: it must not wait, nor must those before it.

        The first shard of a step finds what came before over, or about so; else the windows are too long, and end now.
        """
        now, given_s = self._clock(), seconds or 0.0
        if seconds is None or (step != self._step and self._end - now > self._given_s * TOLERANCE):
            self.hurry()
        if step != self._step:
            self._step, self._given_s = step, 0.0
        start = max(self._end, now)
        self._given_s += given_s
        self._end = start + given_s
        return Window(start, given_s, self._hurried, self._clock)

    def hurry(self) -> None:
        """Let all windows given so far end now."""
        self._hurried.set()
        self._hurried = threading.Event()
        self._end = self._clock()
