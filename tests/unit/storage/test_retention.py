"""Retention deletes what nobody names and nothing that a retained restore point needs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from storage import keys
from storage.ledger import Ledger
from storage.records import Record
from storage.retention import needed_prefixes, retained, unnamed
from tests.helpers.records import facts, record, ref

LAYERS = ("a", "b", "c")


def objects_of(layer: str, step: int, *, attempt: int = 1) -> set[str]:
    return {
        keys.manifest(layer, step, 1, attempt),
        *(keys.shard(layer, step, 1, attempt, rank, 2) for rank in range(2)),
    }


def test_restarts_do_not_push_out_older_restore_points() -> None:
    """Each epoch and attempt begins with a record of the same restore point; the ones before must stay."""
    points = [record({"a": ref("a", step)}, seq=step) for step in (1, 2, 3)]
    again = [record({"a": ref("a", 3)}, epoch=epoch, seq=0) for epoch in (2, 3, 4)]
    newest_first = [*reversed(again), *reversed(points)]
    assert [(kept.epoch, kept.step) for kept in retained(newest_first, 3)] == [(4, 3), (1, 2), (1, 1)]


def test_the_newest_record_of_a_restore_point_is_the_one_kept() -> None:
    first = record({"a": ref("a", 3)}, seq=1)
    last = record({"a": ref("a", 3)}, seq=2, finished=True)
    assert retained([last, first], 3) == [last]


def test_the_version_before_is_needed_too() -> None:
    point = record({"a": ref("a", 3)}, previous={"a": ref("a", 1)})
    assert needed_prefixes([point]) == {keys.version("a", 3, 1, 1), keys.version("a", 1, 1, 1)}


def test_unnamed_objects_are_found_and_the_catalog_is_left_alone() -> None:
    kept, old = record({"a": ref("a", 3)}, seq=3), record({"a": ref("a", 2)}, seq=2)
    orphans = objects_of("a", 3, attempt=2) | objects_of("a", 2) | {keys.shard("gone", 1, 1, 1, 0, 2)}
    catalog = {keys.epoch_claim(1), keys.epoch_life(1), keys.record(1, 3)}
    listed = sorted(objects_of("a", 3) | orphans | catalog | {keys.record(1, 2)})
    assert set(unnamed(listed, [kept, old], keep=1)) == orphans | {keys.record(1, 2)}


def test_names_that_begin_alike_are_not_confused() -> None:
    point = record({"block.1": ref("block.1", 3)})
    listed = sorted(objects_of("block.1", 3) | objects_of("block.10", 3))
    assert set(unnamed(listed, [point], keep=1)) == objects_of("block.10", 3)


@st.composite
def histories(draw) -> tuple[list[Record], set[str]]:
    """Records that a run commits (newest first), with restarts in between, and every key it ever stored."""
    ledger = Ledger(facts(*LAYERS), draw(st.sampled_from([4, 20])), None)
    records: list[Record] = []
    stored: set[str] = set()

    def commit() -> None:
        point = ledger.committed
        made = record(point.layers, seq=len(records), previous=point.previous)
        stored.add(keys.record(1, len(records)))
        records.insert(0, made)

    commit()
    for step in range(1, draw(st.integers(1, 25))):
        for layer in draw(st.sets(st.sampled_from(LAYERS))):
            stored |= objects_of(layer, step)
            ledger.version_durable(layer, ref(layer, step))
        if draw(st.booleans()) and (point := ledger.next_restore_point()):
            ledger.commit(point)
            commit()
        if draw(st.integers(0, 9)) == 0:
            ledger.begin_attempt()
            commit()
    return records, stored


@settings(deadline=None)  # the CPUs may be shared
@given(histories(), st.integers(1, 4))
def test_nothing_needed_is_deleted_and_nothing_else_is_left(history, keep) -> None:
    records, stored = history
    deleted = set(unnamed(sorted(stored), records, keep))
    kept = retained(records, keep)
    for point in kept:
        assert keys.record(point.epoch, point.seq) not in deleted
        for named in point.named():
            prefix = str(named.manifest_key).removesuffix("manifest.json")
            assert {key for key in stored if key.startswith(prefix)}.isdisjoint(deleted)
    left = stored - deleted
    assert all(
        any(key.startswith(prefix) for prefix in needed_prefixes(kept)) for key in left if key.startswith("layers/")
    )
    assert len([key for key in left if key.startswith(keys.RECORDS)]) == len(kept)


@settings(deadline=None)  # the CPUs may be shared
@given(histories())
def test_two_distinct_versions_of_every_layer_are_kept_even_with_one_restore_point(history) -> None:
    """A layer that was written twice or more, or once after its base version, keeps what stood before."""
    records, stored = history
    deleted = set(unnamed(sorted(stored), records, keep=1))
    newest = records[0]
    for layer in LAYERS:
        named_ever = {found.layers[layer] for found in records}
        if len(named_ever) > 1:
            standing = {newest.layers[layer], newest.previous[layer]}
            assert len(standing) == 2
            assert {version.manifest_key for version in standing}.isdisjoint(deleted)


def test_deleting_is_stable() -> None:
    """What retention leaves, it leaves again."""
    records = [record({"a": ref("a", step)}, seq=step, previous={"a": ref("a", step - 1)}) for step in range(9, 0, -1)]
    listed = sorted(set().union(*(objects_of("a", step) for step in range(10))))
    left = sorted(set(listed) - set(unnamed(listed, records, 3)))
    assert unnamed(left, retained(records, 3), 3) == []
    assert left == sorted(set().union(*(objects_of("a", step) for step in (6, 7, 8, 9))))
