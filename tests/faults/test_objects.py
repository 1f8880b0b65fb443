"""Stored objects damaged between two submissions: the run falls back, says so and finishes, or names what is broken."""

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.catalog import Catalog
from storage.records import Record, VersionRef
from tests.helpers.runs import Runs, run, run_whole

pytestmark = pytest.mark.slow


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def interrupted(runs: Runs, name: str, **checkpoint: object) -> Record:
    """Submit a run that ends with a failure in the middle; returns the restore point it left."""
    fault = {"rank": 1, "step": 9, "point": "forward", "action": "raise"}
    first = run(
        runs.spec(
            name, training={"steps": 12}, checkpoint=checkpoint, fault_injection=[fault], failures={"max_failures": 0}
        )
    )
    assert first.verdict is not None
    left = runs.newest(name)
    assert left.step > 1
    assert not left.finished
    return left


def newest_version(record: Record) -> tuple[str, VersionRef]:
    return max(record.layers.items(), key=lambda item: (item[1].step, item[0]))


def shard_path(runs: Runs, name: str, ref: VersionRef) -> Path:
    store = runs.store(name)
    return Path(store.url) / Catalog(store).read_manifest(ref).shards[1].key


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_a_damaged_shard_falls_back_to_the_version_before(runs: Runs, damage: Callable[[Path], None]) -> None:
    name = f"damaged-{damage.__name__}"
    left = interrupted(runs, name)
    layer, ref = newest_version(left)
    path = shard_path(runs, name, ref)
    damage(path)
    status = run_whole(runs.spec(name, training={"steps": 12})).status
    told = [i.what for i in status.incidents if i.kind == "unreadable version"]
    assert [what for what in told if layer in what and path.name in what], status.incidents
    restored = next(r for r in Catalog(runs.store(name)).restorable().records if r.layers)
    assert restored.step == 12
    assert status.recoveries[-1].attempt == 2


def test_in_mode_full_it_falls_back_to_the_restore_point_before(runs: Runs) -> None:
    left = interrupted(runs, "damaged-full", mode="full")
    _, ref = newest_version(left)
    truncate(shard_path(runs, "damaged-full", ref))
    status = run_whole(runs.spec("damaged-full", training={"steps": 12}, checkpoint={"mode": "full"})).status
    assert "unreadable version" in {i.kind for i in status.incidents}
    assert status.step == 12


def test_when_nothing_can_be_read_the_object_is_named(runs: Runs) -> None:
    interrupted(runs, "all-gone")
    root = Path(runs.store("all-gone").url)
    for path in root.glob("layers/**/*.arrow"):
        path.unlink()
    # Base versions stay readable, so the run could go on from step 0 if a record still named them; none does.
    outcome = run(runs.spec("all-gone", training={"steps": 12}))
    assert outcome.verdict is not None
    assert outcome.verdict.kind == "RestoreError"
    assert "layers/" in outcome.verdict.message
    assert "\n" not in outcome.verdict.message
