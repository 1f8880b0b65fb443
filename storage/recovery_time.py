"""How long a recovery took, phase by phase, without comparing the clocks of two machines.

The CheckpointActor hears the worker group's last report before a failure, then from Ray Train's controller that the
group has failed, then the first report after it. What lies inside the new group's life, rank 0 measures on its own
clock and tells with that report. The rest between the failure's news and the start of rank 0's process is the restart.
"""

from storage.messages import Comeback
from storage.records import Phases

_DIGITS = 3


class RecoveryTime:
    """Follows one recovery after the other; `now` is always the actor's monotonic clock, in seconds."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._failure: tuple[float, float] | None = None
        self._recovering: tuple[float, float] | None = None

    def heard(self, now: float) -> None:
        """The worker group has reported."""
        self._heard_at = now

    def failed(self, now: float) -> None:
        """The news of a failure has come. Groups that fail before their attempt begins belong to the first failure."""
        if self._failure is None:
            self._failure = self._heard_at, now

    def attempt_began(self, now: float) -> None:
        """A worker group recovers. Without a failure that was told its job was submitted again: nothing to detect."""
        self._recovering = self._failure or (self._heard_at, self._heard_at)
        self._failure = None
        self._heard_at = now

    def first_report(self, now: float, comeback: Comeback | None) -> tuple[float, Phases | None] | None:
        """Seconds of the recovery that ends with this report, in all and by phase; None when none does."""
        if self._recovering is None:
            return None
        (heard_at, failed_at), self._recovering = self._recovering, None
        if comeback is None:
            return round(now - heard_at, _DIGITS), None
        laps = {name: round(seconds, _DIGITS) for name, seconds in comeback.laps.items()}
        rest = now - comeback.ago_s - failed_at - sum(seconds for name, seconds in laps.items() if name != "imports")
        # A worker process that Ray had at hand is older than the failure.
        laps["imports"] = round(max(0.0, min(laps["imports"], rest)), _DIGITS)
        restart = round(max(0.0, rest - laps["imports"]), _DIGITS)
        phases = Phases(detect=round(failed_at - heard_at, _DIGITS), restart=restart, **laps)
        return round(phases.total, _DIGITS), phases
