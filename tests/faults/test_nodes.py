"""Nodes of a real cluster, taken away without grace and with a notice."""

import sys
from pathlib import Path

import psutil
import pytest

from app.status import read_status
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
    "failures.max_failures": "null",
    "export": "null",
}


def newest(store: ObjectStore) -> Record | None:
    return Catalog(store).newest_record()


def oldest_layer(store: ObjectStore) -> int:
    """Largest age in the newest restore point."""
    record = newest(store)
    return max(record.ages().values()) if record else 0


def trains(node: psutil.Process) -> bool:
    return processes_of(node, "RayTrainWorker") != []


def test_nodes_go_with_and_without_notice(tmp_path: Path) -> None:
    """Four nodes for two workers: one is lost without a word, one after a notice."""
    store = open_object_store(StorageOptions(url=str(tmp_path / "store")), "quickstart")
    project = checkout(tmp_path / "project")
    with ray_cluster(nodes=4) as head:
        left = list(head.nodes)
        command = [
            sys.executable,
            "-m",
            "app",
            "run",
            "jobs/quickstart.yaml",
            "--set",
            f"storage.url={tmp_path / 'store'}",
        ]
        command += [part for field, value in SETTINGS.items() for part in ("--set", f"{field}={value}")]
        done = head.ray(
            "job", "submit", "--working-dir", ".", "--no-wait", "--submission-id", "j", "--", *command, cwd=project
        )
        assert done.returncode == 0, done.stdout

        def lose(victim: psutil.Process, attempt: int) -> Record:
            """Take a node away and wait until training goes on and commits; returns what is committed then."""
            remove_node(victim)
            left.remove(victim)

            def goes_on() -> bool:
                record = newest(store)
                return (
                    record is not None
                    and record.totals.attempts == attempt
                    and record.totals.attempts_without_commit == 0
                )

            wait_for(f"attempt {attempt} commits", goes_on, PATIENCE_S)
            record = newest(store)
            assert record is not None
            assert record.recoveries[-1].steps_lost <= MAX_LAG
            assert record.recoveries[-1].max_age <= BOUND
            return record

        wait_for("layers age under the budget", lambda: oldest_layer(store) > BOUND / 4, PATIENCE_S)
        lose(next(node for node in left if trains(node)), attempt=2)

        wait_for("layers age under the budget", lambda: oldest_layer(store) > BOUND / 4, PATIENCE_S)
        victim = next(node for node in left if trains(node))
        reason = (
            "--reason",
            "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message",
            "spot",
            "--deadline-remaining-seconds",
            "600",
        )
        drained = head.ray("drain-node", "--node-id", node_id(victim), *reason, address=head.gcs)
        assert drained.returncode == 0, drained.stdout
        wait_for("every layer is persisted at once", lambda: oldest_layer(store) <= 4, PATIENCE_S)
        record = newest(store)
        assert record is not None
        assert record.totals.attempts == 2, "the notice ended the attempt"
        [notice] = [incident for incident in record.incidents if incident.kind == "preemption notice"]
        assert node_id(victim) in notice.what
        told = lose(victim, attempt=3).recoveries[-1]
        assert told.max_age <= BOUND / 4, "the notice was not used"

        assert [len(processes_of(node, "ray::ShardWriter")) for node in left] == [1, 1]
        head.ray("job", "stop", "j")
    assert [recovery.attempt for recovery in read_status(store).recoveries] == [2, 3]
    assert verify_run(store).problems == []
