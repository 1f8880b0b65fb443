"""The pacer counts encoded bytes: an estimate first, then what the last version of each layer took."""

import math

import numpy as np

from storage.ledger import Ledger
from storage.messages import AttemptFacts, Report
from storage.options import CheckpointOptions
from storage.pacer import Pacer
from storage.records import BaseVersion
from storage.worker_group import WorkerGroup
from tests.helpers.records import LAYER_BYTES, facts

NAMES = ("a", "b", "c", "d")


def chosen(share: float, encoded: dict[str, int], budget: str = "1/4") -> tuple[str, ...]:
    """Layers that the first decision of a run of four equal layers takes."""
    options = CheckpointOptions(write_budget=budget, criterion="drift")
    pacer = Pacer(options, 10**9, share)
    for layer, size in encoded.items():
        pacer.encoded(layer, size)
    layers = facts(*NAMES)
    base = BaseVersion(source="m", digest="d")
    group = AttemptFacts(node_of_rank=("n",), facts=layers, shard_bytes=dict.fromkeys(NAMES, (LAYER_BYTES,)), base=base)
    report = Report(attempt=1, step=1, sums=np.array([((1 - 0.1 * i) ** 2, 1, math.nan) for i in range(len(NAMES))]))
    return pacer.decide(report, Ledger(layers, 50, None), WorkerGroup.of(group))[1]


def test_a_budget_of_a_quarter_of_the_state_takes_one_raw_layer() -> None:
    assert chosen(1.0, {}) == ("a",)


def test_it_takes_as_many_as_fit_when_encoded() -> None:
    assert chosen(0.25, {}) == NAMES
    assert chosen(0.5, {}) == ("a", "b")


def test_what_a_version_took_replaces_the_estimate() -> None:
    assert chosen(1.0, {"a": 10, "b": 80}) == ("a", "b")
    assert chosen(0.1, {"a": 100}) != NAMES
