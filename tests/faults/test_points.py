"""Faults at every addressed point of the protocol, many in one run: what was promised is kept to the bit."""

import re
from typing import Any

import pytest

from app.status import RunStatus
from storage.catalog import Catalog
from tests.helpers.runs import Runs, State, check_consistent, differing, run_whole, state_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # start-ups of worker groups take most of it

STEPS, MAX_LAG = 24, 4
TRAINING = {"steps": STEPS}

WORKERS: list[dict[str, Any]] = [
    {"who": "worker", "rank": 1, "step": 3, "point": "forward"},
    {"who": "worker", "rank": 0, "step": 7, "point": "backward", "action": "raise"},
    {"who": "worker", "rank": 1, "step": 11, "point": "before_tick"},
    {"who": "worker", "rank": 0, "step": 15, "point": "snapshot"},
    {"who": "worker", "rank": 1, "step": 19, "point": "hand_over"},
    {"who": "worker", "rank": 0, "step": 15, "point": "restore", "attempt": 6},  # the second in a row
]
HANDS_AND_HEAD: list[dict[str, Any]] = [
    {"who": "actor", "step": 0, "point": "begin_attempt"},
    {"who": "writer", "step": 3, "point": "before_upload"},
    {"who": "actor", "step": 6, "point": "before_commit"},
    {"who": "writer", "step": 9, "point": "during_upload"},
    {"who": "actor", "step": 12, "point": "after_commit"},
    {"who": "writer", "step": 15, "point": "after_upload"},
    {"who": "actor", "step": 18, "point": "report"},
    {"who": "actor", "step": STEPS, "point": "finish"},
]


@pytest.fixture(scope="module")
def alone(runs: Runs) -> State:
    """What the training makes when nothing strikes."""
    run_whole(runs.spec("alone", training=TRAINING))
    return state_of(runs.store("alone"), runs.newest("alone"))


def fired(status: RunStatus) -> int:
    return len({incident.what for incident in status.incidents if incident.kind == "fault injected"})


def test_a_worker_killed_at_every_point(runs: Runs, alone: State) -> None:
    """Mode `full`: the composite is one real step of the run, so what comes out is the failure-free run, bit by bit."""
    spec = runs.spec(
        "workers", training=TRAINING, checkpoint={"mode": "full", "max_lag": MAX_LAG}, fault_injection=WORKERS
    )
    status = run_whole(spec).status
    assert status is not None
    assert fired(status) == len(WORKERS)
    assert (status.attempts, len(status.recoveries), status.epoch) == (len(WORKERS) + 1, len(WORKERS), 1)
    record = check_consistent(runs.store("workers"))
    for recovery, fault in zip(record.recoveries, WORKERS, strict=True):
        assert recovery.steps_lost <= MAX_LAG
        assert recovery.max_age == 0
        # Ray may hear of the peer that lost its connection before it hears of the death.
        told = "injected at step" if fault.get("action") == "raise" else "worker process died|by peer"
        assert re.search(told, recovery.cause), recovery.cause
    assert record.recoveries[-1].restore_point == record.recoveries[-2].restore_point
    assert record.recoveries[-1].steps_lost == 0, "what was lost once is lost again"
    assert differing(state_of(runs.store("workers"), record), alone) == []


def test_a_writer_and_the_actor_killed_at_every_point(runs: Runs, alone: State) -> None:
    """Training goes on meanwhile, in one attempt, so it makes what it makes when nothing strikes, bit by bit."""
    name = "hands-and-head"
    status = run_whole(runs.spec(name, training=TRAINING, fault_injection=HANDS_AND_HEAD)).status
    assert status is not None
    assert fired(status) == len(HANDS_AND_HEAD)
    store = runs.store(name)
    record = check_consistent(store)
    actors = [fault for fault in HANDS_AND_HEAD if fault["who"] == "actor"]
    assert record.epoch == 1 + len(actors)
    # The first actor died when it had committed the attempt and had not told the ranks: its successor began another.
    assert [(recovery.attempt, recovery.restore_point, recovery.steps_lost) for recovery in record.recoveries] == [
        (2, 0, 0)
    ]
    assert {incident.kind for incident in record.incidents} & {"lost upload", "hand-over failed"}
    assert Catalog(store).restorable().problems == []
    assert differing(state_of(store, record), alone) == []
