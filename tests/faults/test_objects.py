"""Stored objects damaged between two submissions: the run falls back, says so and finishes, or names what is broken."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from app.job_spec import JobSpec
from storage import keys
from storage.catalog import Catalog
from storage.object_store import ObjectStore, open_object_store
from storage.records import Record
from tests.helpers.runs import Runs, run, run_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # start-ups of Ray take most of it

STEPS = 12
ALONE = {"workers": 1}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: tuple[Callable[[Path], None], ...] = (truncate, flip_a_bit, Path.unlink)


def spec_of(runs: Runs, mode: str, **sections: object) -> JobSpec:
    return runs.spec(f"interrupted-{mode}", training={"steps": STEPS}, checkpoint={"mode": mode}, **sections)


class Left:
    """Copies of what a run left that failed in the middle."""

    def __init__(self, runs: Runs, mode: str) -> None:
        self._runs, self._mode = runs, mode
        fault = {"rank": 1, "step": 9, "point": "forward", "action": "raise"}
        first = run(spec_of(runs, mode, fault_injection=[fault], failures={"max_failures": 0}))
        assert first.verdict is not None
        self.record: Record = runs.newest(f"interrupted-{mode}")
        assert 1 < self.record.step < STEPS

    def copy(self, to: Path, **sections: object) -> tuple[JobSpec, ObjectStore]:
        """The run, moved to another storage folder, as a spec to submit again."""
        shutil.copytree(self._runs.folder / "runs" / f"interrupted-{self._mode}", to / f"interrupted-{self._mode}")
        spec = spec_of(self._runs, self._mode, storage={"url": str(to)}, **sections)
        return spec, open_object_store(spec.storage, spec.name)


@pytest.fixture(scope="module")
def adaptive(runs: Runs) -> Left:
    return Left(runs, "adaptive")


@pytest.fixture(scope="module")
def full(runs: Runs) -> Left:
    return Left(runs, "full")


def test_damaged_shards_fall_back_to_the_versions_before(adaptive: Left, tmp_path: Path) -> None:
    spec, store = adaptive.copy(tmp_path)
    stored = [(name, ref) for name, ref in adaptive.record.layers.items() if ref.manifest_key is not None]
    struck = {}
    for (layer, ref), damage in zip(sorted(stored, key=lambda item: -item[1].step), DAMAGES, strict=False):
        struck[layer] = Path(store.url) / Catalog(store).read_manifest(ref).shards[1].key
        damage(struck[layer])
    assert len(struck) == len(DAMAGES)
    status = run_whole(spec).status
    told = "\n".join(incident.what for incident in status.incidents if incident.kind == "unreadable version")
    for layer, path in struck.items():
        assert f"{layer} at step" in told
        assert str(path.relative_to(store.url)) in told
    assert status.step == STEPS
    assert (status.attempts, len(status.recoveries)) == (2, 1)


def test_in_mode_full_a_damaged_shard_falls_back_to_the_restore_point_before(full: Left, tmp_path: Path) -> None:
    spec, store = full.copy(tmp_path, scaling=ALONE)
    ref = full.record.layers["block-01"]
    truncate(Path(store.url) / Catalog(store).read_manifest(ref).shards[0].key)
    status = run_whole(spec).status
    assert [i.what for i in status.incidents if i.kind == "unreadable version" and "block-01" in i.what]
    assert status.step == STEPS


def test_when_nothing_can_be_read_the_object_is_named(full: Left, tmp_path: Path) -> None:
    spec, store = full.copy(tmp_path, scaling=ALONE)
    for path in Path(store.url).glob("layers/**/*.arrow"):
        path.unlink()
    # The newest record and the versions before it only: the earliest ones fall back to the base, which needs no object.
    for info in store.list(keys.RECORDS)[:-1]:
        store.delete([info.key])
    assert all(ref.step > 0 for ref in full.record.previous.values())
    outcome = run(spec)
    assert outcome.verdict is not None
    assert outcome.verdict.kind == "RestoreError"
    assert "layers/" in outcome.verdict.message
    assert "\n" not in outcome.verdict.message
