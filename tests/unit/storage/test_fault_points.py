import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage import keys
from storage.errors import StoreError
from storage.fault_points import FaultMark, FaultOptions, FaultPoints, fired_faults
from storage.local_store import LocalStore
from storage.retention import Rule, unnamed

ROOT = Path(__file__).parents[3]


def fault(**fields: object) -> FaultOptions:
    return FaultOptions.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "here", "strikes"),
    [
        ({"rank": 1, "step": 5}, {"point": "backward", "step": 5, "rank": 1}, True),
        ({"rank": 1, "step": 5}, {"point": "backward", "step": 7, "rank": 1}, True),
        ({"rank": 1, "step": 5}, {"point": "backward", "step": 4, "rank": 1}, False),
        ({"rank": 1, "step": 5}, {"point": "backward", "step": 5, "rank": 0}, False),
        ({"rank": 1, "step": 5}, {"point": "forward", "step": 5, "rank": 1}, False),
        ({"step": 5}, {"point": "backward", "step": 5, "rank": 3}, True),
        ({"step": 5, "attempt": 2}, {"point": "backward", "step": 5, "attempt": 1}, False),
        ({"step": 5, "attempt": 2}, {"point": "backward", "step": 5, "attempt": 2}, True),
    ],
)
def test_a_fault_strikes_where_it_is_addressed(
    tmp_path: Path, fields: dict[str, object], here: dict[str, object], strikes: bool
) -> None:
    points = FaultPoints([fault(**fields)], "worker", LocalStore(tmp_path))
    assert (points.due(**here) is not None) == strikes
    assert bool(points) != strikes
    assert len(fired_faults(LocalStore(tmp_path))) == strikes


def test_a_fault_fires_once_in_all_processes_and_lives(tmp_path: Path) -> None:
    store, addressed = LocalStore(tmp_path), [fault(who="writer", step=3), fault(who="writer", step=3, rank=1)]
    lives = [FaultPoints(addressed, "writer", store) for _ in range(3)]
    fired = [points.due("during_upload", step=4, rank=1) for points in lives]
    assert fired == [*addressed, None]
    assert [(i.step, i.kind, i.what) for i in fired_faults(store)] == [
        (4, "fault injected", "writer-1-3-during_upload-any-kill"),
        (4, "fault injected", "writer-any-3-during_upload-any-kill"),
    ]


def test_the_evidence_is_there_before_the_process_dies_and_no_sweep_takes_it(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from storage.fault_points import FaultOptions, FaultPoints\n"
        "from storage.local_store import LocalStore\n"
        f"points = FaultPoints([FaultOptions(who='actor', step=1)], 'actor', LocalStore(Path({str(tmp_path)!r})))\n"
        "points.strike('before_commit', step=1)\n"
        "print('alive')\n"
    )
    lives = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    assert [(life.returncode, life.stdout) for life in lives] == [(-signal.SIGKILL, b""), (0, b"alive\n")]
    store = LocalStore(tmp_path)
    assert len(fired_faults(store)) == 1
    assert unnamed([info.key for info in store.list("")], [], [], Rule(recent=1), epoch=9) == []


class _LosesReplies(LocalStore):
    """Carries out a creation, and refuses its own client's retry of it."""

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        super().create(key, data)


class _Down(LocalStore):
    def create(self, key: str, data: bytes) -> None:
        raise StoreError("down")


def test_a_lost_reply_does_not_disarm_a_fault_and_without_evidence_none_fires(tmp_path: Path) -> None:
    addressed = [fault(who="actor", step=1)]
    down = FaultPoints(addressed, "actor", _Down(tmp_path))
    assert down.due("before_commit", step=1) is None
    assert down, "still armed"
    assert FaultPoints(addressed, "actor", _LosesReplies(tmp_path)).due("before_commit", step=1) == addressed[0]
    key = keys.fault(addressed[0].address)
    assert FaultMark.from_bytes(key, LocalStore(tmp_path).read(key)).step == 1
