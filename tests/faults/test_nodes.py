"""Nodes of a real cluster, taken away without grace and with a notice."""

import sys
from pathlib import Path

import psutil
import pytest

from app.verify import verify_run
from storage.catalog import Catalog
from storage.object_store import ObjectStore, open_object_store
from storage.options import StorageOptions
from storage.records import Record
from tests.helpers.cluster import (
    checkout,
    node_id,
    processes_of,
    ray_cluster,
    remove_node,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOUND, MAX_LAG, PATIENCE_S = 40, 10, 300.0
SETTINGS = {
    "training.steps": 100_000,
    "checkpoint.write_budget": "1/37",
    "checkpoint.staleness_bound_steps": BOUND,
    "checkpoint.max_lag": MAX_LAG,
    "fault_injection": "[]",
    "failures.max_failures": -1,
    "export": "null",
}


NOTICE = [
    "--reason",
    "DRAIN_NODE_REASON_PREEMPTION",
    "--reason-message",
    "spot",
    "--deadline-remaining-seconds",
    "3600",
]


def newest(store: ObjectStore) -> Record:
    record = Catalog(store).newest_record()
    assert record is not None
    return record


def oldest_layer(store: ObjectStore) -> int:
    """Largest age in the newest restore point."""
    record = Catalog(store).newest_record()
    return max(record.ages().values()) if record else 0


def trains(node: psutil.Process) -> bool:
    return processes_of(node, "RayTrainWorker") != []


def test_a_node_goes_without_a_word_and_another_has_a_notice(tmp_path: Path) -> None:
    """Three nodes for two workers. Two clocks are wrong by an hour, so one of them trains; nobody may notice."""
    store = open_object_store(StorageOptions(url=str(tmp_path / "store")), "quickstart")
    project = checkout(tmp_path / "project")
    settings = SETTINGS | {"storage.url": tmp_path / "store"}
    command = [sys.executable, "-m", "app", "run", "jobs/quickstart.yaml"]
    command += [part for field, value in settings.items() for part in ("--set", f"{field}={value}")]
    submission = ["--working-dir", ".", "--no-wait", "--submission-id", "j", "--", *command]
    with ray_cluster(nodes=3, clocks=(3600, -3600)) as head:
        done = head.ray("job", "submit", *submission, cwd=project)
        assert done.returncode == 0, done.stdout
        wait_for("layers age under the budget", lambda: oldest_layer(store) > BOUND / 4, PATIENCE_S)
        trainers = [process for node in head.nodes for process in processes_of(node, "RayTrainWorker")]
        assert any(head.wrong_clock_seen(process) for process in trainers)
        lost = next(node for node in head.nodes if trains(node))
        remove_node(lost)
        wait_for("the next attempt", lambda: newest(store).totals.attempts == 2, PATIENCE_S)
        wait_for("its first commit", lambda: newest(store).totals.attempts_without_commit == 0, PATIENCE_S)
        [recovery] = newest(store).recoveries
        assert recovery.steps_lost <= MAX_LAG
        assert recovery.max_age <= BOUND
        left = [node for node in head.nodes if node is not lost]
        assert [len(processes_of(node, "ray::ShardWriter")) for node in left] == [1, 1]

        wait_for("layers age under the budget", lambda: oldest_layer(store) > BOUND / 4, PATIENCE_S)
        noticed = node_id(left[0])
        drained = head.ray("drain-node", "--node-id", noticed, *NOTICE, address=head.gcs)
        assert drained.returncode == 0, drained.stdout
        wait_for("every layer is persisted, beyond the budget", lambda: oldest_layer(store) <= 4, PATIENCE_S)
        step = newest(store).step
        wait_for("training goes on", lambda: newest(store).step > step + MAX_LAG, PATIENCE_S)
        head.ray("job", "stop", "j")
    record = newest(store)
    assert record.totals.attempts == 2, "the notice ended the attempt"
    [notice] = [incident.what for incident in record.incidents if incident.kind == "preemption notice"]
    assert noticed in notice
    assert verify_run(store).problems == []
