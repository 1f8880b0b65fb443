"""Milestones: all layers of one step, every so many steps, with uploads that take their time and sometimes fail."""

import math
import random

import numpy as np
import pytest

from storage.ledger import Ledger, RestorePoint
from storage.messages import AttemptFacts, Report
from storage.options import CheckpointOptions
from storage.pacer import Pacer
from storage.records import BaseVersion
from storage.worker_group import WorkerGroup
from tests.helpers.records import LAYER_BYTES, facts, ref

LAYERS = tuple("abcdef")
GROUP = WorkerGroup.of(
    AttemptFacts(
        node_of_rank=("n",),
        facts=facts(*LAYERS),
        shard_bytes=dict.fromkeys(LAYERS, (LAYER_BYTES,)),
        base=BaseVersion(source="m", digest="d"),
    )
)


def report(step: int) -> Report:
    drifts = [1e-3 * (number + 1) for number in range(len(LAYERS))]
    return Report(attempt=1, step=step, sums=np.array([(drift**2, 1, math.nan) for drift in drifts]))


def simulate(every: int | None, *, steps: int, latency: int, failing: float, mode: str = "adaptive"):
    """Committed restore points of a run whose uploads take 1 to `latency` steps and fail with chance `failing`."""
    options = CheckpointOptions(
        mode=mode, write_budget="1/5", staleness_bound_steps=20, max_lag=8, milestone_every_steps=every
    )
    pacer, ledger = Pacer(options, 10**9, 1.0), Ledger(facts(*LAYERS), 0 if mode == "full" else 20, None)
    chance, landing, points = random.Random(1), [], list[RestorePoint]()
    ordered: tuple[int, tuple[str, ...]] = (0, ())
    for step in range(1, steps):
        ledger.carried_out(ordered[0], step)
        landing += [(step + chance.randint(1, latency), layer, step) for layer in ordered[1]]
        for at, layer, version in [item for item in landing if item[0] <= step]:
            landing.remove((at, layer, version))
            if chance.random() < failing:
                ledger.fail(layer)
            else:
                ledger.version_durable(layer, ref(layer, version))
        point = ledger.next_restore_point()
        if point is not None:
            ledger.commit(point)
            points.append(point)
        ordered = pacer.decide(report(step), ledger, GROUP)
    return points


def coherent_steps(points: list[RestorePoint]) -> list[int]:
    return [point.step for point in points if {ref.step for ref in point.layers.values()} == {point.step}]


@pytest.mark.parametrize("latency", [1, 4])
def test_every_span_has_a_coherent_point_soon_after_it_begins(latency: int) -> None:
    points = simulate(25, steps=200, latency=latency, failing=0.0)
    assert [step // 25 for step in coherent_steps(points)] == [1, 2, 3, 4, 5, 6, 7]
    assert all(step % 25 <= latency + 1 for step in coherent_steps(points))
    assert max(point.step - ref.step for point in points for ref in point.layers.values()) <= 20
    assert len(points) > 100, "between milestones the layers are written one by one"


def test_without_milestones_no_point_is_coherent() -> None:
    assert coherent_steps(simulate(None, steps=200, latency=2, failing=0.0)) == []


def test_a_milestone_whose_upload_fails_is_tried_again() -> None:
    steps = coherent_steps(simulate(50, steps=400, latency=2, failing=0.05))
    assert [step // 50 for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert any(step % 50 > 3 for step in steps), "none failed"


def test_in_mode_full_every_point_is_one() -> None:
    points = simulate(10, steps=60, latency=1, failing=0.0, mode="full")
    assert coherent_steps(points) == [point.step for point in points]


def test_going_back_before_a_milestone_makes_it_due_again() -> None:
    ledger = Ledger(facts("a"), 9, None)
    ledger.commit(RestorePoint(7, {"a": ref("a", 7)}, {}))
    assert ledger.coherent_step == 7
    ledger.commit(RestorePoint(5, {"a": ref("a", 4)}, {}))
    assert ledger.coherent_step == 5
