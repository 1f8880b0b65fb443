"""Retention deletes what nobody names and nothing that a retained restore point needs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from storage import keys
from storage.ledger import Ledger
from storage.records import Progress, Record, Totals
from storage.retention import Kept, Rule, abandoned, held_by_damage, needed_prefixes, retained, unnamed
from tests.helpers.records import facts, record, ref

LAYERS = ("a", "b", "c")
LATER = Totals(attempts=9)
"""As of an attempt after all that made the objects of these tests: nothing of them may still be named."""


def kept_by(records: list[Record], **rule: int) -> list[tuple[int, tuple[str, ...]]]:
    return [(point.record.step, point.kinds) for point in retained(records, Rule(**{"recent": 1, **rule}))]


def swept(listed, records: list[Record], *, recent: int = 1, unreadable=(), epoch: int = 9) -> set[str]:
    return set(unnamed(listed, records, list(unreadable), Rule(recent=recent), epoch))


def objects_of(layer: str, step: int, attempt: int = 1) -> set[str]:
    return {
        keys.manifest(layer, step, 1, attempt),
        *(keys.shard(layer, step, 1, attempt, rank, 2) for rank in range(2)),
    }


def test_restarts_do_not_push_out_older_restore_points() -> None:
    """Each epoch and attempt begins with a record of the same restore point; the ones before must stay."""
    points = [record({"a": ref("a", step)}, seq=step) for step in (1, 2, 3)]
    again = [record({"a": ref("a", 3)}, epoch=epoch, seq=0) for epoch in (2, 3, 4)]
    newest_first = [*reversed(again), *reversed(points)]
    kept = [point.record for point in retained(newest_first, Rule(recent=3))]
    assert [(record.epoch, record.step) for record in kept] == [(4, 3), (1, 2), (1, 1)]


def test_the_newest_record_of_a_restore_point_is_the_one_kept() -> None:
    first = record({"a": ref("a", 3)}, seq=1)
    last = record({"a": ref("a", 3)}, seq=2, finished=True)
    assert retained([last, first], Rule(recent=3)) == [Kept(last, ("recent",))]


def test_the_version_before_is_needed_too() -> None:
    point = record({"a": ref("a", 3)}, previous={"a": ref("a", 1)})
    present, before = keys.version("a", 3, 1, 1), keys.version("a", 1, 1, 1)
    assert needed_prefixes([Kept(point, ("recent",))]) == {present, before}
    assert needed_prefixes([Kept(point, ("milestone", "best"))]) == {present}


def coherent(step: int, **more) -> Record:
    return record({"a": ref("a", step), "b": ref("b", step)}, seq=step, **more)


def mixed(step: int, **more) -> Record:
    return record({"a": ref("a", step), "b": ref("b", step - 1)}, seq=step, **more)


def test_the_first_coherent_point_of_every_span_is_a_milestone() -> None:
    steps = {9: mixed, 10: mixed, 11: coherent, 12: coherent, 19: mixed, 20: coherent, 21: mixed, 31: mixed}
    records = [make(step) for step, make in steps.items()][::-1]
    assert kept_by(records) == [(31, ("recent",))]
    assert kept_by(records, milestone_every_steps=10) == [(31, ("recent",)), (20, ("milestone",)), (11, ("milestone",))]
    assert kept_by(records[3:], milestone_every_steps=10) == [(19, ("recent",)), (11, ("milestone",))]
    assert kept_by([coherent(10)], milestone_every_steps=10) == [(10, ("recent", "milestone"))]


def test_a_frozen_layer_does_not_keep_a_point_from_being_coherent() -> None:
    point = record({"a": ref("a", 10), "b": ref("b", 0)}, seq=1)
    frozen = point.model_copy(update={"facts": facts("a", "b", frozen=("b",))})
    assert kept_by([mixed(12), point], milestone_every_steps=10) == [(12, ("recent",))]
    assert kept_by([mixed(12), frozen], milestone_every_steps=10) == [(12, ("recent",)), (10, ("milestone",))]


def test_what_was_given_up_for_an_earlier_point_is_no_milestone() -> None:
    records = [mixed(15), coherent(9).model_copy(update={"seq": 13}), coherent(12), mixed(11), coherent(10)]
    # Back to step 9 after step 12: what lay between belongs to no history that goes on.
    assert kept_by(records, milestone_every_steps=5) == [(15, ("recent",)), (9, ("milestone",))]


def evaluated(records: list[Record], losses: list[tuple[int, float | None]]) -> list[Record]:
    progress = Progress(eval_losses=tuple(losses))
    return [records[0].model_copy(update={"progress": progress}), *records[1:]]


def test_the_first_point_after_each_of_the_best_evaluations_is_kept() -> None:
    records = [mixed(step) for step in (46, 41, 32, 31, 21, 12, 11)]
    losses = [(10, 3.0), (20, 2.0), (30, 2.5), (40, None), (45, 2.7)]
    assert kept_by(evaluated(records, losses), best=0) == [(46, ("recent",))]
    assert kept_by(evaluated(records, losses), best=1) == [(46, ("recent",)), (21, ("best",))]
    assert kept_by(evaluated(records, losses), best=3) == [(46, ("recent", "best")), (31, ("best",)), (21, ("best",))]


def test_the_best_point_stays_until_the_better_evaluation_has_one() -> None:
    losses = [(10, 3.0), (20, 2.0)]
    assert kept_by(evaluated([mixed(19), mixed(11)], losses), best=1) == [(19, ("recent",)), (11, ("best",))]
    assert kept_by(evaluated([mixed(21), mixed(19), mixed(11)], losses), best=1) == [(21, ("recent", "best"))]


def test_a_damaged_record_holds_the_sweep_while_it_would_be_a_recent_point() -> None:
    records = [record({"a": ref("a", step)}, seq=step, totals=LATER) for step in (4, 3, 1)]
    damaged, ancient = keys.record(1, 2), keys.record(1, 0)
    listed = [keys.record(1, 4), damaged, ancient, keys.record(1, 1), *objects_of("a", 2), *objects_of("a", 4)]
    kept = retained(records, Rule(recent=3))
    assert held_by_damage([damaged, ancient], kept, Rule(recent=3)) == [damaged]
    assert swept(listed, records, recent=3, unreadable=[damaged, ancient]) == {ancient}
    assert swept(listed, records, recent=2, unreadable=[damaged, ancient]) == {
        damaged,
        ancient,
        keys.record(1, 1),
        *objects_of("a", 2),
    }


def test_what_the_newest_attempt_may_still_name_is_left_alone() -> None:
    newest = record({"a": ref("a", 3)}, totals=Totals(attempts=2))
    older_attempt, passed, to_come = (objects_of("a", *at) for at in ((4, 1), (2, 2), (4, 2)))
    listed = older_attempt | passed | to_come | objects_of("a", 3, 1)
    assert swept(listed, [newest]) == older_attempt | passed
    assert swept(listed, [newest.model_copy(update={"finished": True})]) == older_attempt | passed | to_come


def test_what_later_epochs_left_is_left_to_them() -> None:
    newest = record({"a": ref("a", 3)}, totals=LATER)
    theirs = [keys.record(2, 0), keys.manifest("a", 1, 2, 1)]
    listed = [*theirs, keys.record(2, 1)]  # the last of an epoch stays
    assert swept(listed, [newest], epoch=1) == set()
    assert swept(listed, [newest], epoch=2) == set(theirs)


def test_unfinished_uploads_of_the_attempt_under_way_are_waited_for() -> None:
    newest = record({"a": ref("a", 3)}, totals=Totals(attempts=2))
    waited_for = {keys.shard("a", 4, 1, 2, 0, 1), keys.epoch_life(3), keys.epoch_claim(4), keys.history(3, 7)}
    left = {
        keys.shard("a", 4, 1, 1, 0, 1),
        keys.shard("a", 3, 1, 2, 0, 1),  # stored by another try
        keys.epoch_life(2),
        keys.history(2, 0),
        keys.record(2, 5),
        keys.probe("x"),
        "",
    }
    assert abandoned(waited_for | left, newest, epoch=3) == left


def test_unnamed_objects_are_found_and_the_catalog_is_left_alone() -> None:
    kept = record({"a": ref("a", 3)}, seq=3, totals=LATER)
    old = record({"a": ref("a", 2)}, seq=2)
    orphans = objects_of("a", 3, attempt=2) | objects_of("a", 2) | {keys.shard("gone", 1, 1, 1, 0, 2)}
    catalog = {keys.epoch_claim(1), keys.epoch_life(1), keys.record(1, 3), keys.history(1, 0), keys.history(2, 0)}
    listed = sorted(objects_of("a", 3) | orphans | catalog | {keys.record(1, 2)})
    assert swept([*listed, keys.probe("p")], [kept, old]) == orphans | {keys.record(1, 2), keys.probe("p")}


def test_names_that_begin_alike_are_not_confused() -> None:
    point = record({"block.1": ref("block.1", 3)}, totals=LATER)
    listed = sorted(objects_of("block.1", 3) | objects_of("block.10", 3))
    assert swept(listed, [point]) == objects_of("block.10", 3)


@st.composite
def histories(draw) -> tuple[list[Record], set[str]]:
    """Records that a run commits (newest first), with restarts in between, and every key it ever stored."""
    ledger = Ledger(facts(*LAYERS), draw(st.sampled_from([4, 20])), None)
    records: list[Record] = []
    stored: set[str] = set()

    def commit() -> None:
        point = ledger.committed
        losses = tuple((step, draw(st.floats(0, 9))) for step in range(3, point.step, 5))
        made = record(
            point.layers,
            seq=len(records),
            previous=point.previous,
            totals=LATER,
            progress=Progress(eval_losses=losses),
        )
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
@given(
    histories(),
    st.builds(
        Rule, recent=st.integers(1, 4), milestone_every_steps=st.none() | st.integers(1, 9), best=st.integers(0, 2)
    ),
)
def test_nothing_needed_is_deleted_and_nothing_else_is_left(history, rule) -> None:
    records, stored = history
    deleted = set(unnamed(sorted(stored), records, [], rule, 1))
    kept = retained(records, rule)
    for point in kept:
        assert keys.record(point.record.epoch, point.record.seq) not in deleted
        for named in point.needed:
            prefix = str(named.manifest_key).removesuffix("manifest.json")
            assert {key for key in stored if key.startswith(prefix)}.isdisjoint(deleted)
    left = stored - deleted
    assert all(
        any(key.startswith(prefix) for prefix in needed_prefixes(kept)) for key in left if key.startswith("layers/")
    )
    assert len([key for key in left if key.startswith(keys.RECORDS)]) == len(kept)
    again = [point.record for point in kept]
    assert retained(again, rule) == kept
    assert unnamed(sorted(left), again, [], rule, 1) == []


@settings(deadline=None)  # the CPUs may be shared
@given(histories())
def test_two_distinct_versions_of_every_layer_are_kept_even_with_one_restore_point(history) -> None:
    """A layer that was written twice or more, or once after its base version, keeps what stood before."""
    records, stored = history
    deleted = swept(sorted(stored), records)
    newest = records[0]
    for layer in LAYERS:
        named_ever = {found.layers[layer] for found in records}
        if len(named_ever) > 1:
            standing = {newest.layers[layer], newest.previous[layer]}
            assert len(standing) == 2
            assert {version.manifest_key for version in standing}.isdisjoint(deleted)
