"""The pacer counts encoded bytes: an estimate first, then what the last version of each layer took."""

import math

import numpy as np
import pytest

from storage.ledger import Ledger
from storage.messages import AttemptFacts, Report
from storage.options import CheckpointOptions
from storage.pacer import Pacer
from storage.records import BaseVersion
from storage.worker_group import WorkerGroup
from tests.helpers.records import LAYER_BYTES, facts, ref

NAMES = ("a", "b", "c", "d")
LAYERS = facts(*NAMES)
GROUP = WorkerGroup.of(
    AttemptFacts(
        node_of_rank=("n",),
        facts=LAYERS,
        shard_bytes=dict.fromkeys(NAMES, (LAYER_BYTES,)),
        base=BaseVersion(source="m", digest="d"),
    )
)
SUMS = np.array([((1 - 0.1 * i) ** 2, 1, math.nan) for i in range(len(NAMES))])


def chosen(share: float, encoded: dict[str, int], budget: str = "1/4") -> tuple[str, ...]:
    """Layers that the first decision of a run of four equal layers takes."""
    options = CheckpointOptions(write_budget=budget, criterion="drift")
    pacer = Pacer(options, 10**9, share)
    for layer, size in encoded.items():
        pacer.encoded(layer, size)
    return pacer.decide(Report(attempt=1, step=1, sums=SUMS), Ledger(LAYERS, 50, None), GROUP)[1]


def test_a_budget_of_a_quarter_of_the_state_takes_one_raw_layer() -> None:
    assert chosen(1.0, {}) == ("a",)


def test_it_takes_as_many_as_fit_when_encoded() -> None:
    assert chosen(0.25, {}) == NAMES
    assert chosen(0.5, {}) == ("a", "b")


def test_what_a_version_took_replaces_the_estimate() -> None:
    assert chosen(1.0, {"a": 10, "b": 80}) == ("a", "b")
    assert chosen(0.1, {"a": 100}) != NAMES


@pytest.mark.parametrize("step", [4, 5])
def test_a_version_that_is_durable_before_its_ranks_say_so_is_in_flight_no_more(step: int) -> None:
    """Ranks that hold from the report on take its order's snapshots at once, others a step later."""
    ledger = Ledger(LAYERS, 50, None)
    pacer = Pacer(CheckpointOptions(mode="full"), 10**9, 1.0)
    number, layers = pacer.decide(Report(attempt=1, step=4, sums=SUMS), ledger, GROUP)
    assert layers == NAMES
    ledger.version_durable("a", ref("a", step))
    ledger.fail("b", step)
    ledger.carried_out(number, step)
    assert (set(ledger.in_flight), ledger.due) == ({"c", "d"}, {"b"})


def spread_s(step: int, seconds: tuple[float, ...], restore_point: int, **changes: object) -> float | None:
    """Of a run whose steps took so many `seconds`, at `step`; `changes` are of its options and of the report."""
    standing = {name: changes.pop(name) for name in ("hold", "flush") if name in changes}
    hurry = bool(changes.pop("hurry", False))
    options = CheckpointOptions(**changes)
    pacer = Pacer(options, 10**9, 1.0)
    for took in seconds:
        report = Report(attempt=1, step=step, sums=SUMS, step_seconds=took, **standing)
        pacer.decide(report, Ledger(LAYERS, 50, None), GROUP)
    pacer.hurry = hurry
    return pacer.spread_s(report, restore_point)


def test_writing_is_spread_over_a_tick() -> None:
    assert spread_s(20, (3.0, 2.0, 9.0), 18) == pytest.approx(2.7)
    assert spread_s(20, (3.0, 2.0, 9.0), 20, interval_steps=2) == pytest.approx(5.4)


@pytest.mark.parametrize(
    ("restore_point", "changes"),
    [
        (18, {"hold": True}),
        (18, {"flush": True}),
        (18, {"hurry": True}),
        (18, {"mode": "full"}),
        (14, {}),  # a tick more could reach `max_lag`
        (18, {"max_lag": 6}),
        (18, {"staleness_bound_steps": 13}),
        (18, {"max_lag": 20, "interval_steps": 5}),
    ],
)
def test_nothing_is_spread_while_somebody_waits_or_a_bound_is_near(
    restore_point: int, changes: dict[str, object]
) -> None:
    assert spread_s(20, (3.0,), restore_point, **changes) is None
