"""The run's story: counters, progress, recoveries and incidents. In memory here, in every record in the catalog."""

import statistics
import time
from collections import deque
from collections.abc import Sequence

from storage.messages import Report
from storage.records import Incident, Progress, Record, Recovery, Totals
from storage.recovery_time import RecoveryTime

KEPT_INCIDENTS = 200
NOT_REPEATED = 20
TIMING_WINDOW = 2000
RATE_WINDOW_S = 10.0


class Journal:
    """Collects what the summary tells. Starts from what the newest record says."""

    def __init__(self, record: Record | None) -> None:
        self.totals = record.totals if record else Totals()
        self.progress = record.progress if record else Progress()
        self.recoveries = list(record.recoveries) if record else []
        self.incidents = list(record.incidents) if record else []
        self._last_report_at = time.monotonic()
        self._attempt_tokens = None if record else 0
        self._recovery_time = RecoveryTime(self._last_report_at)
        self._tick_seconds: deque[float] = deque(maxlen=TIMING_WINDOW)
        self._step_seconds: deque[float] = deque(maxlen=TIMING_WINDOW)
        self._tokens: deque[tuple[float, int]] = deque()
        self._bytes: deque[tuple[float, int]] = deque()

    def report(self, report: Report) -> None:
        """A tick has happened."""
        now = time.monotonic()
        took = self._recovery_time.first_report(now, report.comeback)
        if took is not None:
            seconds, phases = took
            self.recoveries[-1] = self.recoveries[-1].model_copy(update={"seconds": seconds, "phases": phases})
        self._recovery_time.heard(now)
        if report.hold:
            self.totals = _plus(self.totals, held_seconds=now - self._last_report_at)
        self._last_report_at = now
        self.totals = _plus(self.totals, ticks=max(0, report.ticks - self.progress.attempt_ticks))
        if self._attempt_tokens is not None:  # else nobody knows which of them are new
            _window(self._tokens, now, report.tokens - self._attempt_tokens)
        self._attempt_tokens = report.tokens
        if report.tick_seconds is not None:
            self._tick_seconds.append(report.tick_seconds)
        if report.step_seconds is not None:
            self._step_seconds.append(report.step_seconds)
        evals = self.progress.eval_losses
        if report.eval_losses:
            redone = report.eval_losses[0][0]
            evals = (*(pair for pair in evals if pair[0] < redone), *report.eval_losses)
        loss = report.loss if report.loss is not None else self.progress.loss
        update = {"step": report.step, "attempt_ticks": report.ticks, "loss": loss, "eval_losses": evals}
        self.progress = self.progress.model_copy(update=update)

    def reached(self, step: int) -> None:
        """Training has done `step`."""
        self.progress = self.progress.model_copy(update={"step": step})

    def attempt_began(self, step: int, recovery: Recovery | None) -> None:
        """A worker group has asked for its restore plan, and goes on after `step`."""
        self.totals = _plus(self.totals, attempts=1, attempts_without_commit=1)
        self.progress = self.progress.model_copy(update={"step": step, "attempt_ticks": 0})
        self._attempt_tokens = 0
        if recovery is not None:
            self.recoveries.append(recovery)
            self._recovery_time.attempt_began(time.monotonic())

    def failed(self) -> None:
        """The worker group has failed, as Ray Train's controller says."""
        self._recovery_time.failed(time.monotonic())

    def fell_back(self, step: int, ages: Sequence[int]) -> None:
        """The present attempt goes on after `step`, earlier than it was to: versions could not be read."""
        if self.recoveries:
            last = self.recoveries[-1]
            update = {
                "restore_point": step,
                "steps_lost": last.steps_lost + last.restore_point - step,
                "max_age": max(ages),
                "mean_age": sum(ages) / len(ages),
            }
            self.recoveries[-1] = last.model_copy(update=update)
        self.progress = self.progress.model_copy(update={"step": step})

    def progressed(self) -> None:
        """A restore point that training produced was committed."""
        self.totals = self.totals.model_copy(update={"attempts_without_commit": 0})

    def wrote(self, size: int) -> None:
        """A shard became durable."""
        self.totals = _plus(self.totals, bytes_written=size)
        _window(self._bytes, time.monotonic(), size)

    def incident(self, kind: str, what: str) -> None:
        """Note something handled; what stands among the last `NOT_REPEATED` is not noted again."""
        incident = Incident(step=self.progress.step, kind=kind, what=what)
        if incident not in self.incidents[-NOT_REPEATED:]:
            self.incidents = [*self.incidents[1 - KEPT_INCIDENTS :], incident]

    def snapshot(self) -> Progress:
        """Progress as a record stores it, with the timings."""
        ticks, steps = sorted(self._tick_seconds), self._step_seconds
        if not ticks:
            return self.progress
        timings = {
            "tick_seconds_median": statistics.median(ticks),
            "tick_seconds_p99": ticks[min(len(ticks) - 1, int(0.99 * len(ticks)))],
            "step_seconds_median": statistics.median(steps) if steps else None,
        }
        return self.progress.model_copy(update=timings)

    def tokens_per_s(self) -> float:
        """Tokens trained on per second, over the last seconds."""
        return _rate(self._tokens)

    def bytes_per_s(self) -> float:
        """Bytes made durable per second, over the last seconds."""
        return _rate(self._bytes)


def _plus(totals: Totals, **more: float) -> Totals:
    return totals.model_copy(update={name: getattr(totals, name) + amount for name, amount in more.items()})


def _window(events: deque[tuple[float, int]], now: float, amount: int) -> None:
    events.append((now, amount))
    while events and events[0][0] < now - RATE_WINDOW_S:
        events.popleft()


def _rate(events: deque[tuple[float, int]]) -> float:
    if not events:
        return 0.0
    now = time.monotonic()
    recent = sum(amount for at, amount in events if at >= now - RATE_WINDOW_S)
    return recent / max(1.0, min(RATE_WINDOW_S, now - events[0][0]))
