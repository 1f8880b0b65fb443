"""Replay: what a recorded run would have written under other settings, tick by tick, without training.

The decision and its pacer are the run's own; uploads take as long as recorded. Ticks come when they came: a restart
happens where it happened, and what it made the run do once more is left out as far as a newer restore point saves it.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

import numpy as np

from storage.growth import Growth
from storage.history import Tick
from storage.ledger import Ledger
from storage.messages import AttemptFacts, Report
from storage.options import CheckpointOptions
from storage.pacer import Pacer
from storage.recording import Recording, Standings, Upload
from storage.records import BaseVersion, LayerFacts, VersionRef
from storage.worker_group import WorkerGroup

_NO_LIMIT_BYTES = 2**62  # what the run's nodes allowed to be in flight is not recorded


class UploadCosts:
    """What uploads cost: as recorded for the same layer at the nearest step."""

    def __init__(self, recording: Recording, facts: Sequence[LayerFacts], encoded_share: float | None) -> None:
        """`encoded_share`: of another codec than the run's: encoded bytes for each byte of the state, at most."""
        self._facts, self._share = facts, encoded_share
        self._uploads: list[list[tuple[int, Upload]]] = [[] for _ in facts]
        for (row, step), upload in sorted(recording.uploads.items()):
            self._uploads[row].append((step, upload))
        self._of_any = sorted((step, upload) for (_, step), upload in recording.uploads.items())

    def seconds(self, row: int, step: int) -> float:
        """From the snapshot of a version until it is durable."""
        nearest = _nearest(self._uploads[row] or self._of_any, step)
        return nearest.seconds if nearest is not None else 0.0

    def bytes(self, row: int, step: int) -> int:
        """Size of a version."""
        size = self._facts[row].bytes
        if self._share is not None:
            return math.ceil(size * self._share)
        nearest = _nearest(self._uploads[row], step)
        return nearest.bytes if nearest is not None else size


def _nearest(uploads: Sequence[tuple[int, Upload]], step: int) -> Upload | None:
    """Of `uploads` (by step), the one of the step nearest to `step`."""
    place = bisect_left(uploads, step, key=itemgetter(0))
    near = uploads[max(0, place - 1) : place + 1]
    return min(near, key=lambda item: abs(item[0] - step))[1] if near else None


@dataclass(frozen=True)
class _Flight:
    row: int
    step: int
    lands_at: float


class Replay:
    """One run of the decision over a recording."""

    def __init__(
        self,
        recording: Recording,
        growth: Growth,
        facts: Sequence[LayerFacts],
        options: CheckpointOptions,
        costs: UploadCosts,
        encoded_share: float,
    ) -> None:
        """`facts` of the trained layers, in the order of `recording.layers`; `encoded_share` as the Pacer takes it."""
        self._recording, self._growth, self._options, self._costs = recording, growth, options, costs
        self._share = encoded_share
        sizes: dict[str, tuple[int, ...]] = {fact.name: (fact.bytes,) for fact in facts}
        base = BaseVersion(source="", digest="")
        told = AttemptFacts(node_of_rank=("node",), facts=tuple(facts), shard_bytes=sizes, base=base)
        self._group = WorkerGroup.of(told)
        self._ledger = Ledger(tuple(facts), 0 if options.mode == "full" else options.staleness_bound_steps, None)
        self._pacer = self._new_pacer()
        self._row_of = {layer: row for row, layer in enumerate(recording.layers)}
        self._references = np.full(len(recording.layers), recording.ticks[0].restore_point)
        self._ordered: tuple[int, tuple[str, ...]] = (0, ())
        self._flights: list[_Flight] = []
        self._bytes = 0

    def _new_pacer(self) -> Pacer:
        return Pacer(self._options, _NO_LIMIT_BYTES, self._share)

    def run(self) -> Standings:
        """Decide every tick anew."""
        recording, begun_at = self._recording, self._recording.ticks[0].restore_point
        indices, points, versions, starts = [], [], [], []
        for index, tick in enumerate(recording.ticks):
            before = recording.ticks[index - 1] if index else tick
            if tick.attempt != before.attempt:
                begun_at = self._begin_attempt(before.step)
            elif tick.epoch != before.epoch:
                self._begin_epoch()
            if tick.step <= begun_at and not tick.flush:
                continue
            self._land(recording.seconds[index], before.step)
            committed = self._ledger.committed
            indices.append(index)
            points.append(committed.step)
            versions.append([committed.layers[layer].step for layer in recording.layers])
            starts.append(begun_at)
            self._tick(index, tick)
        self._finish(recording.ticks[-1])
        return Standings(np.array(indices), np.array(points), np.array(versions), np.array(starts), self._bytes)

    def _begin_attempt(self, progress: int) -> int:
        """What was handed over lands, and the ranks fall back to the restore point; returns its step."""
        self._land(math.inf, progress)
        self._ledger.begin_attempt()
        self._references[:] = self._ledger.committed.step
        self._ordered = (0, ())
        return self._ledger.committed.step

    def _begin_epoch(self) -> None:
        """The CheckpointActor was restarted: its order on the way is lost, its bucket empty."""
        self._pacer = self._new_pacer()
        self._ledger.in_flight.clear()
        self._ordered = (0, ())

    def _land(self, now: float, progress: int) -> None:
        """Book what is durable `now`, when training has done step `progress`; commit each as it lands."""
        self._flights.sort(key=attrgetter("lands_at"))
        while self._flights and self._flights[0].lands_at <= now:
            flight = self._flights.pop(0)
            layer, size = self._recording.layers[flight.row], self._costs.bytes(flight.row, flight.step)
            self._ledger.version_durable(layer, VersionRef(step=flight.step, bytes=size))
            self._pacer.encoded(layer, size)
            self._bytes += size
            point = self._ledger.next_restore_point()
            if point is not None:
                self._ledger.commit(point)
                self._pacer.committed(progress - max(ref.step for ref in point.layers.values()))

    def _tick(self, index: int, tick: Tick) -> None:
        sums = self._growth.sums(index, self._references)
        self._carry_out(index, tick.step)
        report = Report(
            attempt=tick.attempt,
            step=tick.step,
            sums=sums,
            hold=tick.held,
            flush=tick.flush,
            step_seconds=tick.step_seconds,
        )
        self._ordered = self._pacer.decide(report, self._ledger, self._group)

    def _carry_out(self, index: int, step: int) -> None:
        """Snapshots of what was ordered at the tick before are taken."""
        number, layers = self._ordered
        self._ledger.carried_out(number, step)
        for row in (self._row_of[layer] for layer in layers):
            self._references[row] = step
            lands_at = float(self._recording.seconds[index]) + self._costs.seconds(row, step)
            self._flights.append(_Flight(row, step, lands_at))

    def _finish(self, last: Tick) -> None:
        """All that was handed over lands; a run that is over has every layer of its last step stored."""
        self._land(math.inf, last.step)
        self._ledger.in_flight.clear()
        if last.flush:
            for row, layer in enumerate(self._recording.layers):
                if self._ledger.newest_step_of(layer, at=last.step) < last.step:
                    self._bytes += self._costs.bytes(row, last.step)
