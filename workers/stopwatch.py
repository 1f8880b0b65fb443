"""What a worker's recovery spends its time on, on that process's own clock."""

import time

from storage.liveness import seconds_lived
from storage.messages import Comeback


class Stopwatch:
    """Started as training's first line is reached: what the process has lived until then are its imports."""

    def __init__(self) -> None:
        self._laps = {"imports": seconds_lived()}
        self._at = time.perf_counter()
        self._stepped = self._told = False

    def lap(self, phase: str) -> None:
        """What was done since the last lap was `phase`, a name of `storage.records.Phases`."""
        now = time.perf_counter()
        self._laps[phase] = now - self._at
        self._at = now

    def stepped(self) -> None:
        """A step was made; the first one is the last lap."""
        if not self._stepped:
            self.lap("first_step")
            self._stepped = True

    def comeback(self) -> Comeback | None:
        """All laps, told once, after the first step."""
        if not self._stepped or self._told:
            return None
        self._told = True
        return Comeback(laps=dict(self._laps), ago_s=time.perf_counter() - self._at)
