"""A run without Ray and torch: weights that move as under AdamW, the run's own decision, uploads that take time."""

import math
from collections.abc import Callable
from random import Random

import numpy as np
import numpy.typing as npt

from storage.history import Durable, LayerTable, Tick
from storage.ledger import Ledger
from storage.messages import AttemptFacts, Report
from storage.options import CheckpointOptions
from storage.pacer import Pacer
from storage.records import BaseVersion, LayerFacts, VersionRef
from storage.worker_group import WorkerGroup

Truth = Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""Step, and step of each layer's reference -> sums ([layers, 3])."""

STEP_S = 1.0


def moving_weights(layers: int, steps: int, elements: int = 400, seed: int = 0) -> Truth:
    """Layers whose gradients are noise around a slow drift; the first moves twice as fast."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(layers, elements))
    speed = np.linspace(1.0, 1.3, layers)[:, None]
    speed[0] = 2.0
    slope = rng.normal(size=(layers, elements))
    first = second = np.zeros((layers, elements))
    states, momenta = [weights], [first]
    for step in range(1, steps + 1):
        gradient = 0.15 * slope + rng.normal(size=(layers, elements))
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        corrected = first / (1 - 0.9**step)
        rate = 1e-3 * min(1.0, step / 10) * speed
        weights = weights - rate * corrected / np.sqrt(second / (1 - 0.999**step) + 1e-8)
        states.append(weights)
        momenta.append(corrected)

    def truth(step: int, references: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        before = np.array([states[reference][row] for row, reference in enumerate(references)])
        moved = states[step] - before
        return np.stack([(moved**2).sum(1), (before**2).sum(1), -(momenta[step] * moved).sum(1)], axis=1)

    return truth


class SimulatedRun:
    """What a run with `options` records over `steps`, ticks and all; `killed_at`: its workers are restarted once."""

    def __init__(
        self,
        truth: Truth,
        facts: tuple[LayerFacts, ...],
        options: CheckpointOptions,
        steps: int,
        *,
        killed_at: int | None = None,
        seed: int = 0,
    ) -> None:
        self._truth, self._options, self._rng = truth, options, Random(seed)
        self._names = [fact.name for fact in facts]
        self._bytes = {fact.name: fact.bytes for fact in facts}
        self._rows = {name: row for row, name in enumerate(self._names)}
        sizes = {name: (size,) for name, size in self._bytes.items()}
        told = AttemptFacts(
            node_of_rank=("n",), facts=facts, shard_bytes=sizes, base=BaseVersion(source="m", digest="d")
        )
        self._group = WorkerGroup.of(told)
        self._pacer = Pacer(options, 2**62, 1.0)
        self._ledger = Ledger(facts, options.staleness_bound_steps, None)
        self._references = np.zeros(len(facts), np.int64)
        self._flights: list[tuple[float, str, int]] = []
        self._durable: list[Durable] = []
        self._ordered: tuple[int, tuple[str, ...]] = (0, ())
        self._now, self._attempt = 0.0, 1
        self.ticks: list[Tick] = []
        step = 0
        while step < steps:
            step += 1
            self._tick(step)
            if step == killed_at:
                killed_at = None
                step = self._restart()
        for _ in range(20):
            self._tick(steps, flush=True)

    @property
    def bytes_written(self) -> int:
        return sum(version.bytes for tick in self.ticks for version in tick.durable)

    def _restart(self) -> int:
        self._land(math.inf)
        self._ledger.begin_attempt()
        self._attempt += 1
        self._ordered = (0, ())
        self._now += 30
        self._references[:] = self._ledger.committed.step
        return self._ledger.committed.step

    def _land(self, now: float) -> None:
        landing = sorted(flight for flight in self._flights if flight[0] <= now)
        self._flights = [flight for flight in self._flights if flight[0] > now]
        for at, layer, step in landing:
            size = self._bytes[layer] + 7
            self._ledger.version_durable(layer, VersionRef(step=step, bytes=size))
            self._pacer.encoded(layer, size)
            self._durable.append(Durable(layer, step, size, min(at, self._now)))
            point = self._ledger.next_restore_point()
            if point is not None:
                self._ledger.commit(point)
                self._pacer.committed(self.ticks[-1].step - max(ref.step for ref in point.layers.values()))

    def _tick(self, step: int, *, flush: bool = False) -> None:
        self._now += STEP_S
        self._land(self._now)
        sums = self._truth(step, self._references)
        number, layers = self._ordered
        self._ledger.carried_out(number, step)
        for layer in layers:
            self._references[self._rows[layer]] = step
            took = STEP_S * self._rng.uniform(0.3, 2.2) * (1 + 2 * (self._bytes[layer] > 1000))
            self._flights.append((self._now + took, layer, step))
        report = Report(attempt=self._attempt, step=step, sums=sums, flush=flush, step_seconds=STEP_S)
        self._ordered = self._pacer.decide(report, self._ledger, self._group)
        durable, self._durable = tuple(self._durable), []
        self.ticks.append(
            Tick(
                epoch=1,
                attempt=self._attempt,
                step=step,
                seconds=self._now,
                restore_point=self._ledger.committed.step,
                flush=flush,
                step_seconds=STEP_S,
                sums=LayerTable(self._rows, sums),
                chosen=self._ordered[1],
                durable=durable,
            )
        )
