"""A driver and all processes that it has started, by what they do."""

from collections import defaultdict
from collections.abc import Iterator

import psutil

KINDS = ("RayTrainWorker", "ShardWriter", "CheckpointActor", "raylet", "gcs_server")
OTHERS = "others"
"""The driver, Ray Train's controller, Ray's agents and dashboard, idle workers."""


def members(driver: int) -> Iterator[tuple[str, psutil.Process]]:
    """(kind, process) of each process that lives now."""
    try:
        root = psutil.Process(driver)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            title = f"{process.name()} {' '.join(process.cmdline()[:1])}"
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        yield next((kind for kind in KINDS if kind in title), OTHERS), process


def cpu_seconds(driver: int) -> dict[str, float]:
    """CPU time so far, by kind."""
    total: dict[str, float] = defaultdict(float)
    for kind, process in members(driver):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total[kind] += times.user + times.system
    return dict(total)


def own_memory_bytes(process: psutil.Process) -> int:
    """Resident memory that is its own: without Ray's object store."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)
