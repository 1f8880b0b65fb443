"""The cluster that the campaign's jobs run on: a head for drivers and CheckpointActors, and nodes that come and go."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from ray.cluster_utils import Cluster

NODES = 3
_OBJECT_STORE_BYTES = 100 * 2**20
_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # one Python process for each CPU that may never be needed
    "RAY_worker_niceness": "0",  # at Ray's 15 a busy machine starves workers until Ray gives their start up
}


class World:
    """A Ray cluster of a head without CPUs and `NODES` nodes with one CPU each."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.address = str(cluster.address)
        for _ in range(NODES):
            self._add()

    def _add(self) -> None:
        _patiently_add(self._cluster, num_cpus=1, object_store_memory=_OBJECT_STORE_BYTES)

    def lose_a_node(self) -> bool:
        """Take a node that trains away without grace, and put a new one in its place; False when none trains."""
        for node in self._cluster.worker_nodes:
            processes = _descendants(node)
            if any("RayTrainWorker" in _title(process) for process in processes):
                self._cluster.remove_node(node, allow_graceful=False)
                for process in processes:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
                self._add()
                return True
        return False


def _descendants(node: Any) -> list[psutil.Process]:
    found = []
    for infos in node.all_processes.values():
        for info in infos:
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(info.process.pid).children(recursive=True)
    return found


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def world() -> Iterator[World]:
    """A world for the block."""
    os.environ |= _SETTINGS
    cluster = Cluster()
    try:
        head = {"num_cpus": 0, "object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        _patiently_add(cluster, **head)
        yield World(cluster)
    finally:
        cluster.shutdown()


def _patiently_add(cluster: Cluster, **arguments: Any) -> None:
    """Add a node; again when Ray has given its start up after the 30 s that it waits on any machine."""
    for last in (False, False, True):
        try:
            cluster.add_node(**arguments)
        except Exception as error:
            if last or "startup" not in str(error):
                raise
        else:
            return
