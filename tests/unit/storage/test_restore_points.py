"""Restore points over a real folder: un-named at once, deleted after a grace; what others left is looked at twice."""

import asyncio
from pathlib import Path

import pytest

from storage import keys, restore_points
from storage.catalog import Catalog
from storage.errors import FencedError
from storage.local_store import LocalStore
from storage.records import Record, Totals
from storage.restore_points import RestorePoints
from storage.retention import Rule
from storage.store_health import StoreHealth
from tests.helpers.records import claim, record, ref


class Clock:
    """Stands in for `time` in `storage.restore_points`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Life:
    """One epoch's restore points, on a clock that the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **rule: int) -> None:
        self.store, self.clock = LocalStore(folder), Clock()
        monkeypatch.setattr(restore_points, "time", self.clock)
        self.catalog = Catalog(self.store)
        self.epoch = self.catalog.claim(claim()).epoch
        self.rule = Rule(**{"recent": 1, **rule})
        health = StoreHealth(1.0, lambda *_: None)
        self.points = RestorePoints(self.catalog, self.rule, self.epoch, self.catalog.restorable(), health)
        self.seq = 0

    def commit(self, step: int, attempt: int = 1, **more) -> Record:
        """Commit a restore point of one layer, whose objects are stored before."""
        version = ref("a", step, epoch=self.epoch, attempt=attempt)
        self.store.put(str(version.manifest_key), b"")
        made = record({"a": version}, epoch=self.epoch, seq=self.seq, totals=Totals(attempts=attempt), **more)
        self.seq += 1
        asyncio.run(self.points.commit(made))
        return made

    def sweep(self, after_s: float) -> set[str]:
        """What is stored below layers/, as step.attempt, after a sweep `after_s` later."""
        self.clock.now += after_s
        asyncio.run(self.points.sweep_ripe())
        return self.stored()

    def stored(self) -> set[str]:
        found = [keys.version_of(info.key) for info in self.store.list(keys.LAYERS)]
        return {f"{version.step}.{version.attempt}" for version in found if version is not None}


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(tmp_path, monkeypatch)


def begin_shard(store: LocalStore, step: int, attempt: int):
    writer = store.open_writer(keys.shard("a", step, 1, attempt, 0, 1))
    writer.__enter__()
    return writer


def test_a_version_is_deleted_a_grace_after_it_was_unnamed(life: Life) -> None:
    life.commit(1)
    life.commit(2)
    assert life.sweep(1) == {"1.1", "2.1"}
    assert [info.key for info in life.store.list(keys.RECORDS)] == [keys.record(1, 1)]
    assert life.sweep(8) == {"1.1", "2.1"}
    assert life.sweep(2) == {"2.1"}


def test_what_an_earlier_attempt_left_is_deleted_when_it_was_seen_twice(life: Life) -> None:
    life.commit(1)
    life.store.put(keys.manifest("a", 5, 1, 1), b"durable, never named")
    upload = begin_shard(life.store, 6, 1)
    assert life.sweep(1) == life.sweep(20) == {"1.1", "5.1"}, "its attempt may still name it"
    life.commit(2, attempt=2)
    alive = begin_shard(life.store, 7, 2)
    assert life.sweep(1) == {"1.1", "2.2", "5.1"}
    assert [begun.key for begun in life.store.unfinished()] == [keys.shard("a", s, 1, s - 5, 0, 1) for s in (6, 7)]
    late = begin_shard(life.store, 6, 1)  # not there at the first look
    life.sweep(9)
    assert len(life.store.unfinished()) == 3
    assert life.sweep(2) == {"2.2"}
    assert [keys.version_of(begun.key)[1:] for begun in life.store.unfinished()] == [(6, 1, 1), (7, 1, 2)]
    del upload, alive, late


def test_a_finished_run_leaves_only_what_it_names(life: Life) -> None:
    for leftover in (keys.manifest("a", 9, 1, 1), keys.probe("killed")):
        life.store.put(leftover, b"")
    upload = begin_shard(life.store, 9, 1)
    life.commit(8, finished=True)
    asyncio.run(life.points.sweep_everything())
    assert life.stored() == {"8.1"}
    assert life.store.unfinished() == []
    assert {info.key for info in life.store.list("")} == {
        keys.epoch_claim(1),
        keys.record(1, 0),
        keys.manifest("a", 8, 1, 1),
    }
    del upload


def test_a_damaged_record_holds_the_sweep_until_enough_newer_points_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Life(tmp_path, monkeypatch, recent=2)
    first.commit(1)
    damaged = first.commit(2)
    key = keys.record(damaged.epoch, damaged.seq)
    first.store.put(key, b"{")
    second = Life(tmp_path, monkeypatch, recent=2)
    assert second.points.newest.step == 1
    second.commit(3, attempt=2)
    assert second.sweep(0) == second.sweep(100) == {"1.1", "2.1", "3.2"}
    assert key in [info.key for info in second.store.list(keys.RECORDS)]
    second.commit(4, attempt=2)
    second.commit(5, attempt=3)
    second.sweep(0)
    assert key not in [info.key for info in second.store.list(keys.RECORDS)]
    assert second.sweep(100) == {"4.2", "5.3"}


def test_milestones_outlive_the_recent_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path, monkeypatch, milestone_every_steps=10)
    for step in (9, 10, 11, 20, 21):
        life.commit(step)
    life.sweep(0)
    assert life.sweep(100) == {"10.1", "20.1", "21.1"}
    assert life.points.newest_coherent_step == 21


@pytest.mark.parametrize("sweep", ["sweep_ripe", "sweep_everything"])
def test_a_fenced_epoch_deletes_nothing(life: Life, sweep: str) -> None:
    life.commit(1)
    life.commit(2)
    life.catalog.claim(claim(driver="other", nonce="other"))
    life.clock.now += 100
    before = life.store.list("")
    with pytest.raises(FencedError, match="this one stops"):
        asyncio.run(getattr(life.points, sweep)())
    assert life.store.list("") == before
