"""Which layers to persist at a tick: a pure function, facts in, decision out (no clock, no I/O).

A token bucket paces the writes. Layers whose deadline is near go first; what the deadlines leave over goes to the
layers with the highest score. The look-ahead is a feasibility test: a layer is written ahead of its deadline only if
every other deadline can still be met from what the bucket will pass until then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from storage.deadlines import Deadlines

Criterion = Literal["drift", "impact", "oldest"]
ASSUMED_LATENCY_TICKS = 2  # decision to durable, before any upload has been timed


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A trained layer as the decision sees it."""

    name: str
    bytes: int
    """What its next version will take in the store, as far as is known."""
    step: int
    """Step of its newest version, durable or in flight."""
    drift: float
    impact: float | None
    in_flight: bool = False
    due: bool = False
    """A version of it failed: write it at once."""
    node_bytes: tuple[int, ...] = ()
    """Bytes that each node would hand over, not yet encoded, in the order of `Facts.nodes`."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """Bytes accepted but not yet durable on one node, and how many there may be."""

    in_flight_bytes: int
    limit_bytes: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything a decision depends on."""

    step: int
    """Step at which the decision will be carried out."""
    interval_steps: int
    layers: tuple[Candidate, ...]
    nodes: tuple[Node, ...] = ()
    mode: Literal["adaptive", "full"] = "adaptive"
    flush: bool = False
    """Training is over (or must stop): persist everything that is not yet of this step."""
    milestone_step: int | None = None
    """Step from which on a restore point with all layers of one step is due and not committed; None: none is due."""
    staleness_bound_steps: int
    max_lag: int
    latency_steps: int
    """Steps from a snapshot to its commit."""
    newest_step: int
    """Newest step of any version, durable or in flight: what the restore point will be once all has landed."""
    tokens: float
    """Bytes left in the bucket by the last decision; negative is debt."""
    refill_bytes: float
    criterion: Criterion = "impact"
    threshold: float | None = None


@dataclass(frozen=True)
class Decision:
    """Layers to persist at the tick, the most urgent and most valuable first, and what is left in the bucket."""

    layers: tuple[str, ...]
    tokens: float


def decide(facts: Facts) -> Decision:
    """Choose the layers to persist at `facts.step`."""
    if facts.flush:
        return Decision(_flush(facts), facts.tokens)
    if facts.mode == "full":
        return Decision(_full(facts), facts.tokens)
    if facts.milestone_step is not None:
        return Decision(_milestone(facts, facts.milestone_step), facts.tokens)
    return _Pass(facts).run()


def smallest_write_budget(staleness_bound_steps: int, interval_steps: int) -> float:
    """Smallest share of the full state per tick that refreshes every layer within the bound."""
    return 1 / max(1, staleness_bound_steps // interval_steps - ASSUMED_LATENCY_TICKS - 1)


def _full(facts: Facts) -> tuple[str, ...]:
    """Every layer at once, when nothing is in flight; those that failed, when the others are of this step already."""
    idle = not any(layer.in_flight for layer in facts.layers)
    missing = [layer for layer in facts.layers if layer.step < facts.step]
    return tuple(layer.name for layer in missing) if idle and _Room(facts.nodes).takes_all(missing) else ()


def _milestone(facts: Facts, milestone_step: int) -> tuple[str, ...]:
    """Every layer at once, when nothing is in flight, and nothing else until they are committed."""
    steps = {layer.step for layer in facts.layers}
    is_durable = len(steps) == 1 and min(steps) >= milestone_step
    return () if is_durable else _full(facts)


def _flush(facts: Facts) -> tuple[str, ...]:
    """Layers that are not of this step yet, as many as may be in flight."""
    room = _Room(facts.nodes)
    missing = [layer for layer in facts.layers if layer.step < facts.step and not layer.in_flight]
    return tuple(layer.name for layer in missing if room.take(layer))


class _Room:
    """Room for bytes in flight. A node with nothing in flight takes any layer: a huge one must go some time."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._in_flight = np.array([node.in_flight_bytes for node in nodes], dtype=np.int64)
        self._limits = np.array([node.limit_bytes for node in nodes], dtype=np.int64)

    def take(self, layer: Candidate) -> bool:
        """Reserve room for `layer` on every node, or on none."""
        after = self._in_flight + np.array(layer.node_bytes, dtype=np.int64)
        if ((after > self._limits) & (self._in_flight > 0)).any():
            return False
        self._in_flight = after
        return True

    def takes_all(self, layers: Iterable[Candidate]) -> bool:
        """Reserve room for all layers, or as many as come before the first that does not fit."""
        return all(self.take(layer) for layer in layers)


class _Pass:
    """One decision in the making."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.bytes = [float(layer.bytes) for layer in facts.layers]
        self.write_by = [self._write_by(layer.step) for layer in facts.layers]
        self.burst = max([facts.refill_bytes, *self.bytes]) + facts.refill_bytes
        self.tokens = min(self.burst, facts.tokens + facts.refill_bytes)
        left = [self._ticks_left(step) for step in self.write_by]
        refreshed = self._ticks_left(self._write_by(facts.step))
        self.deadlines = Deadlines(left, self.bytes, refreshed, facts.refill_bytes)
        self.room = _Room(facts.nodes)
        self.chosen: list[int] = []
        # While training stands still, a layer may have been written at this very step.
        layers = enumerate(facts.layers)
        self.free = {index for index, layer in layers if not layer.in_flight and layer.step < facts.step}

    def run(self) -> Decision:
        self._take_overdue()
        self._take_pressing()
        self._take_best()
        if not self.chosen:
            self._take_for_lag()
        names = tuple(self.facts.layers[index].name for index in self.chosen)
        return Decision(names, self.tokens)

    def _write_by(self, step: int) -> int:
        """Last step at which a layer whose newest version is of `step` must be persisted again."""
        return step + self.facts.staleness_bound_steps - self.facts.latency_steps

    def _ticks_left(self, write_by: int) -> int:
        return (write_by - self.facts.step) // self.facts.interval_steps

    def _by_deadline(self) -> list[int]:
        return sorted(self.free, key=lambda index: (self.write_by[index], index))

    def _take(self, index: int) -> bool:
        if not self.room.take(self.facts.layers[index]):
            return False
        self.chosen.append(index)
        self.free.remove(index)
        self.tokens -= self.bytes[index]
        self.deadlines.refresh(index)
        return True

    def _take_overdue(self) -> None:
        """Layers at their deadline are written even into debt: an unmet deadline would hold up every restore point."""
        next_tick = self.facts.step + self.facts.interval_steps
        for index in self._by_deadline():
            if self.facts.layers[index].due or self.write_by[index] < next_tick:
                self._take(index)

    def _take_pressing(self) -> None:
        """By deadline, as long as waiting one more tick would put a deadline out of the bucket's reach."""
        for index in self._by_deadline():
            tokens_next = min(self.burst, self.tokens + self.facts.refill_bytes)
            waiting = self.deadlines.slack(tokens_next, ticks_later=1)
            if waiting >= 0 or self.bytes[index] > self.tokens:
                return
            self._take(index)

    def _take_best(self) -> None:
        """By score, while tokens last and every deadline stays within reach.

        When the best layer costs more than the bucket holds, the tokens are kept for it, but for one small layer a
        tick: each tick that persists something moves the restore point on.
        """
        saving = False
        slack = self.deadlines.slack(self.tokens)
        fitting = self._by_score()
        for index in fitting:
            cost = self.bytes[index]
            if saving and (self.chosen or cost > self.facts.refill_bytes):
                continue
            if cost <= self.tokens or not saving:
                after = self.deadlines.slack_after(index, self.tokens)
                if after < min(0.0, slack):
                    continue
                if cost > self.tokens:
                    saving = True
                elif self._take(index):
                    slack = after
        if fitting and not self.chosen and not saving:  # all put off for the deadlines' sake, and the bucket runs over
            first = min(fitting, key=lambda i: self.write_by[i])
            if self.bytes[first] <= self.tokens:
                self._take(first)

    def _take_for_lag(self) -> None:
        """Persist the cheapest layer, into debt if need be, when the restore point would fall too far behind."""
        facts = self.facts
        if facts.step - facts.newest_step + facts.interval_steps + facts.latency_steps <= facts.max_lag:
            return
        for index in sorted(self.free, key=lambda i: (self.bytes[i], facts.layers[i].step, i)):
            if self._take(index):
                return

    def _by_score(self) -> list[int]:
        threshold = self.facts.threshold or 0.0
        fitting = [index for index in sorted(self.free) if self.facts.layers[index].drift >= threshold]
        return sorted(fitting, key=lambda index: (self._is_base(index), self._score(index)), reverse=True)

    def _is_base(self, index: int) -> bool:
        """Whether the layer has never been persisted.

        Such layers come first. Restored, one begins again with an empty optimizer state, and Adam's first steps from
        there move every element by about the learning rate.
        """
        return self.facts.layers[index].step == 0

    def _score(self, index: int) -> float:
        layer = self.facts.layers[index]
        if self.facts.criterion == "oldest":
            return self.facts.step - layer.step
        value = layer.impact if self.facts.criterion == "impact" and layer.impact is not None else layer.drift
        return value / max(1, layer.bytes)
