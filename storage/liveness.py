"""Whether the epoch that holds a run is still alive, without trusting any clock but our own."""

import os
import socket
import time
from pathlib import Path

from storage import keys
from storage.errors import ObjectNotFoundError
from storage.object_store import ObjectStore
from storage.records import EpochClaim, EpochLife, ProcessId

BEAT_S = 2.0
PATIENCE_S = 3 * BEAT_S  # a missed beat is not a death


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _started(pid: int) -> str:
    """Start time of a process, opaque; empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]


def seconds_lived() -> float:
    """How long ago this process was started, by its machine's own clock; 0 where the machine does not tell."""
    ticks = _started(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def this_process() -> ProcessId:
    """Identity of the calling process."""
    pid = os.getpid()
    return ProcessId(host=socket.gethostname(), boot_id=_boot_id(), pid=pid, started=_started(pid))


def surely_dead(process: ProcessId) -> bool:
    """Whether the process was one of this machine and is gone. False also means: cannot tell."""
    same_machine = process.boot_id != "" and (process.host, process.boot_id) == (socket.gethostname(), _boot_id())
    return same_machine and _started(process.pid) != process.started


def read_life(store: ObjectStore, epoch: int) -> EpochLife | None:
    """Last sign of life of `epoch`, or None."""
    key = keys.epoch_life(epoch)
    try:
        return EpochLife.from_bytes(key, store.read(key))
    except ObjectNotFoundError:
        return None


def is_alive(store: ObjectStore, claim: EpochClaim) -> bool:
    """Watch the epoch for up to `PATIENCE_S` and say whether it lives."""
    before = read_life(store, claim.epoch)
    if (before is not None and before.ended) or surely_dead(claim.where):
        return False
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 4)
        now = read_life(store, claim.epoch)
        if now != before:
            return now is None or not now.ended
    return False
