"""Pacer: what the decision remembers from tick to tick (the bucket, upload latency), and the facts it is given."""

import math
import statistics
from collections import deque

from storage.decision import Candidate, Facts, Node, decide
from storage.ledger import Ledger
from storage.messages import LayerSums, Report
from storage.options import CheckpointOptions, parse_write_budget
from storage.worker_group import WorkerGroup

LATENCIES = 20
STEPS_TIMED = 9
SPREAD = 0.9
"""Share of a tick over which to spread its writing: ticks vary, and the next one's must not pile up behind it."""


class Pacer:
    """Decides at each report; issues what it decides to the ledger."""

    def __init__(self, options: CheckpointOptions, in_flight_limit_bytes: int, encoded_share: float) -> None:
        """`encoded_share`: encoded bytes for each byte of the state, until a version of a layer has been encoded."""
        self._options, self._encoded_share = options, encoded_share
        self._encoded: dict[str, int] = {}
        self._limit = in_flight_limit_bytes
        self._tokens = 0.0
        self._latencies = deque([options.interval_steps], maxlen=LATENCIES)
        self._step_seconds = deque[float](maxlen=STEPS_TIMED)
        self._decisions = 0
        self.hurry = False
        """A node will be taken away: the budget and the threshold do not count, only the limit of bytes in flight."""

    def committed(self, latency_steps: int) -> None:
        """A restore point was committed `latency_steps` after its newest snapshot."""
        self._latencies.append(max(self._options.interval_steps, latency_steps))

    def encoded(self, layer: str, size_bytes: int) -> None:
        """A version of `layer` took this much in the store: the best guess for the next one."""
        self._encoded[layer] = size_bytes

    def decide(self, report: Report, ledger: Ledger, group: WorkerGroup) -> tuple[int, tuple[str, ...]]:
        """Number of the decision and the layers chosen; they are in flight from now on."""
        if report.step_seconds is not None:
            self._step_seconds.append(report.step_seconds)
        facts = self._facts(report, ledger, group)
        decision = decide(facts)
        self._tokens = decision.tokens
        self._decisions += 1
        for layer in decision.layers:  # ranks that hold take the snapshot at this very step
            ledger.issue(self._decisions, layer, group.node_bytes[layer], report.step)
        return self._decisions, decision.layers

    def spread_s(self, report: Report, restore_point: int) -> float | None:
        """Time over which to spread the writing of what has just been decided: a little less than a tick.

        It must not cost more than a tick of lag: nothing is spread while somebody waits for it, or where `max_lag` or
        the staleness bound leave no room for another tick between snapshot and commit.
        """
        options, interval = self._options, self._options.interval_steps
        waits = report.hold or report.flush or self.hurry or options.mode == "full"
        # Snapshots a tick from now, stored within the next two, committed and told to the ranks within two more.
        late = report.step + 5 * interval - restore_point
        if waits or not self._step_seconds or late > min(options.max_lag, options.staleness_bound_steps // 2):
            return None
        return SPREAD * interval * statistics.median(self._step_seconds)

    def _facts(self, report: Report, ledger: Ledger, group: WorkerGroup) -> Facts:
        options, standing = self._options, report.hold or report.flush
        step = report.step if standing else report.step + options.interval_steps
        sums = [LayerSums(*row) for row in report.sums.tolist()]
        has_impacts = not any(math.isnan(of_layer.impact) for of_layer in sums)
        layers = tuple(
            Candidate(
                name=fact.name,
                bytes=self._encoded.get(fact.name, math.ceil(fact.bytes * self._encoded_share)),
                step=ledger.newest_step_of(fact.name, at=step),
                drift=of_layer.drift,
                impact=of_layer.impact if has_impacts else None,
                in_flight=fact.name in ledger.in_flight,
                due=fact.name in ledger.due,
                node_bytes=group.node_bytes[fact.name],
            )
            for fact, of_layer in zip(ledger.trained, sums, strict=True)
        )
        flying = [flight.node_bytes for flight in ledger.in_flight.values()]
        held = [sum(sizes[i] for sizes in flying) for i in range(len(group.nodes))]
        return Facts(
            step=step,
            interval_steps=options.interval_steps,
            layers=layers,
            nodes=tuple(Node(in_flight_bytes=size, limit_bytes=self._limit) for size in held),
            mode=options.mode,
            flush=report.flush,
            milestone_step=self._milestone_step(step, ledger.coherent_step),
            staleness_bound_steps=options.staleness_bound_steps,
            max_lag=options.max_lag,
            # A hold inflates latencies; beyond this share of the bound they would only cause a burst of early writes.
            latency_steps=min(max(self._latencies), options.staleness_bound_steps // 4),
            newest_step=max(layer.step for layer in layers),
            tokens=self._tokens,
            refill_bytes=0.0 if standing else self._refill(sum(fact.bytes for fact in ledger.trained), report),
            criterion=options.criterion,
            threshold=None if self.hurry else options.threshold,
        )

    def _milestone_step(self, step: int, coherent_step: int) -> int | None:
        every = None if self.hurry else self._options.milestone_every_steps  # nothing waits when a node is to go
        due = step // every * every if every else 0
        return due if coherent_step < due else None

    def _refill(self, full_bytes: int, report: Report) -> float:
        if self.hurry:
            return float(full_bytes)
        unit, amount = parse_write_budget(self._options.write_budget)
        if unit == "share":
            return full_bytes * amount
        return amount * (report.step_seconds or 0.0) * self._options.interval_steps
