"""A run over several Ray nodes: one worker and one ShardWriter each; one worker is killed from outside."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from app.status import read_status
from app.verify import verify_run
from storage.catalog import Catalog
from storage.object_store import open_object_store
from storage.options import StorageOptions
from storage.writer_actor import NAMESPACE
from tests.helpers.cluster import tiny_project, wait_for

STEPS = 80

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, as cluster.yaml has it, and two nodes with room for one worker each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def training_workers(node: object) -> list[psutil.Process]:
    """Processes of Ray Train's workers that the node's raylet has started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)  # type: ignore[attr-defined]
    return [process for process in raylet.children(recursive=True) if "RayTrainWorker" in " ".join(process.cmdline())]


def writer_nodes() -> set[str]:
    """Ids of the nodes that have a living ShardWriter."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"].rpartition(":")[2] for actor in named if actor["namespace"] == NAMESPACE}


@pytest.mark.timeout(400)
def test_worker_killed_on_one_of_the_nodes(cluster: Cluster, tmp_path: Path) -> None:
    project = tiny_project(tmp_path / "project", steps=STEPS, workers=2)
    store = open_object_store(StorageOptions(url=str(tmp_path / "store")), "tiny")
    log = tmp_path / "driver.log"
    with log.open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, "-m", "app", "run", "job/job.yaml", "--set", f"storage.url={tmp_path / 'store'}"],
            cwd=project,
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def restorable() -> bool:
        assert driver.poll() is None, log.read_text()
        record = Catalog(store).newest_record()
        return record is not None and record.step >= 2

    try:
        wait_for("a restore point", restorable)
        workers = [training_workers(node) for node in cluster.worker_nodes]
        assert [len(found) for found in workers] == [1, 1]
        assert writer_nodes() == {node.node_id for node in cluster.worker_nodes}
        workers[0][0].kill()
        driver.wait(timeout=200)
    finally:
        driver.kill()

    assert driver.returncode == 0, log.read_text()
    status = read_status(store)
    assert status.finished
    (recovery,) = status.recoveries
    assert "worker process died" in recovery.cause
    assert 2 <= recovery.restore_point < STEPS
    assert recovery.max_age <= status.staleness_bound_steps
    assert verify_run(store).problems == []
    assert writer_nodes() == set()
