"""The ledger names bounded, complete restore points only, and forgets what a dead attempt left."""

import random

import pytest

from storage.assembly import Assembly
from storage.ledger import Ledger
from storage.records import BASE, Manifest, VersionId
from tests.helpers.records import LAYER_BYTES, facts, record, ref, shard, told_of

LAYERS = ("a", "b", "c")


def ledger_of(bound: int, layers=LAYERS, **steps: int) -> Ledger:
    """A ledger whose committed restore point holds `layers` at `steps` (0 where not given)."""
    at = {name: ref(name, steps.get(name, 0)) for name in layers}
    return Ledger(facts(*layers), bound, record(at, bound=bound))


def issue(ledger: Ledger, decision: int, layer: str, step: int | None = None, earliest: int = 0) -> None:
    ledger.issue(decision, layer, (LAYER_BYTES,), earliest if step is None else step)
    if step is not None:
        ledger.carried_out(decision, step)


def stored(ledger: Ledger, version: VersionId, *ranks: int, world_size: int = 2) -> Assembly | None:
    """The shards of `ranks` are durable."""
    return ledger.shards_durable(version, world_size, *told_of(version, ranks, world_size))


def steps_of(point) -> dict[str, int]:
    return {name: version.step for name, version in point.layers.items()}


def commit_next(ledger: Ledger):
    point = ledger.next_restore_point()
    if point is not None:
        ledger.commit(point)
    return point


@pytest.mark.parametrize(
    ("bound", "committed", "durable", "expected"),
    [
        pytest.param(10, {}, {"a": [3]}, (3, {"a": 3, "b": 0, "c": 0}), id="T advances to the newest step in it"),
        pytest.param(10, {"a": 5}, {"b": [4]}, (5, {"a": 5, "b": 4, "c": 0}), id="lower ages at the same T"),
        pytest.param(3, {}, {"a": [4]}, None, id="nothing when a layer would be older than the bound"),
        pytest.param(3, {}, {"a": [3, 4]}, (3, {"a": 3, "b": 0, "c": 0}), id="the newest step that is still bounded"),
        pytest.param(3, {}, {"a": [2, 5], "b": [4], "c": [3]}, (5, {"a": 5, "b": 4, "c": 3}), id="all bounded again"),
        pytest.param(3, {}, {"b": [9], "c": [9]}, None, id="one layer left behind holds all back"),
        pytest.param(0, {}, {"a": [1], "b": [1]}, None, id="bound 0 waits for every layer"),
        pytest.param(
            0, {}, {"a": [1, 2], "b": [1, 2], "c": [1]}, (1, {"a": 1, "b": 1, "c": 1}), id="bound 0, one step"
        ),
        pytest.param(10, {"a": 7}, {"a": [5]}, None, id="an older version than the committed one is no news"),
        pytest.param(10, {}, {}, None, id="nothing durable"),
    ],
)
def test_next_restore_point(bound, committed, durable, expected) -> None:
    ledger = ledger_of(bound, **committed)
    for layer, steps in durable.items():
        for step in steps:
            ledger.version_durable(layer, ref(layer, step))
    point = ledger.next_restore_point()
    assert (point and (point.step, steps_of(point))) == expected


def test_a_restore_point_that_no_layer_is_at_exactly_is_never_made() -> None:
    # T is the newest step *in* the map: with bound 1 and a at 4, nothing is at 3 but b.
    ledger = ledger_of(2, a=2, b=2, c=2)
    ledger.version_durable("b", ref("b", 3))
    point = ledger.next_restore_point()
    assert point is not None
    assert point.step == max(steps_of(point).values()) == 3


def test_the_previous_version_is_kept_for_fallback() -> None:
    ledger = ledger_of(10)
    for step in (1, 3):
        ledger.version_durable("a", ref("a", step))
        commit_next(ledger)
    assert ledger.committed.previous["a"] == ref("a", 1)
    assert "b" not in ledger.committed.previous
    for step in (5, 6):  # two versions between two commits: the newer of the two comes to stand before
        ledger.version_durable("a", ref("a", step))
    commit_next(ledger)
    assert (ledger.committed.layers["a"].step, ledger.committed.previous["a"].step) == (6, 5)


def test_the_base_version_is_what_stands_before_the_first() -> None:
    ledger = ledger_of(10)
    ledger.version_durable("a", ref("a", 1))
    commit_next(ledger)
    assert ledger.committed.previous == {"a": BASE}


def test_versions_of_a_dead_attempt_are_never_named() -> None:
    ledger = ledger_of(10, a=1)
    issue(ledger, 1, "b", step=4)
    version = VersionId(layer="b", step=4, epoch=1, attempt=1)
    assert stored(ledger, version, 0) is None
    ledger.version_durable("c", ref("c", 4))  # durable, but not committed when the attempt ends
    ledger.fail("a")
    ledger.begin_attempt()
    assert ledger.next_restore_point() is None
    assert not ledger.in_flight
    assert not ledger.due
    # What lay half complete is gone as well: the other half does not complete it.
    assert stored(ledger, version, 1) is None


def test_an_incomplete_version_is_never_named() -> None:
    ledger = ledger_of(10)
    issue(ledger, 1, "a", step=2)
    version = VersionId(layer="a", step=2, epoch=1, attempt=1)
    assert stored(ledger, version, 2, world_size=3) is None
    assert stored(ledger, version, 0, world_size=3) is None
    assert ledger.missing_ranks(version, 3) == {1}
    assert ledger.next_restore_point() is None


def test_shards_of_all_ranks_make_a_version_once() -> None:
    ledger = ledger_of(10)
    issue(ledger, 1, "a", step=2)
    version = VersionId(layer="a", step=2, epoch=1, attempt=1)
    assert stored(ledger, version, 1) is None
    assert stored(ledger, version, 1) is None  # told twice, by a writer that was not yet told to forget
    assembly = stored(ledger, version, 0)
    expected = Manifest(version=version, world_size=2, shards=tuple(shard(version, rank, 2) for rank in (0, 1)))
    assert assembly.to_bytes() == expected.to_bytes()
    assert assembly.bytes == expected.bytes
    assert stored(ledger, version, 0) is None, "it makes a second manifest"
    ledger.version_durable("a", ref("a", 2))
    commit_next(ledger)
    assert stored(ledger, version, 0, 1) is None, "it makes a manifest of a version that is committed"


def test_shards_of_many_ranks_come_in_parts() -> None:
    ledger = ledger_of(10)
    version = VersionId(layer="a", step=2, epoch=1, attempt=1)
    assert stored(ledger, version, *range(0, 1024, 2), world_size=1024) is None
    assert stored(ledger, version, *range(1, 1023, 2), world_size=1024) is None
    manifest = stored(ledger, version, 1023, world_size=1024).to_bytes()
    assert [part.rank for part in Manifest.from_bytes("key", manifest).shards] == list(range(1024))


def test_shards_of_two_versions_do_not_mix() -> None:
    ledger = ledger_of(10)
    versions = [VersionId(layer="a", step=step, epoch=1, attempt=1) for step in (2, 3)]
    assert stored(ledger, versions[0], 0) is None
    assert stored(ledger, versions[1], 1) is None
    other = VersionId(layer="a", step=2, epoch=1, attempt=2)
    assert stored(ledger, other, 1) is None


def test_a_failed_version_makes_its_layer_due() -> None:
    ledger = ledger_of(10)
    issue(ledger, 1, "a", step=2)
    assert ledger.newest_step_of("a", at=9) == 2
    ledger.fail("a")
    assert (ledger.due, ledger.in_flight) == ({"a"}, {})
    assert ledger.newest_step_of("a", at=9) == 0
    issue(ledger, 2, "a")
    assert ledger.due == set()
    assert ledger.newest_step_of("a", at=9) == 9  # its snapshot is still to come


def test_failing_what_is_not_in_flight_changes_nothing() -> None:
    ledger = ledger_of(10)
    ledger.fail("a")
    assert ledger.due == set()


def test_a_late_version_does_not_end_the_flight_of_a_newer_one() -> None:
    ledger = ledger_of(10)
    issue(ledger, 1, "a", step=2)
    ledger.fail("a")
    issue(ledger, 2, "a", step=5)
    ledger.version_durable("a", ref("a", 2))  # taken for lost, and landed after all
    assert ledger.in_flight["a"].step == 5
    assert steps_of(commit_next(ledger)) == {"a": 2, "b": 0, "c": 0}
    ledger.version_durable("a", ref("a", 5))
    assert ledger.in_flight == {}


@pytest.mark.parametrize("told", [True, False], ids=["its step is known", "its snapshot is still to come"])
def test_the_late_failure_of_an_old_version_leaves_the_newer_flight_alone(told: bool) -> None:
    ledger = ledger_of(10)
    issue(ledger, 1, "a", step=2)
    ledger.fail("a")  # given up, and issued again
    issue(ledger, 2, "a", step=5 if told else None, earliest=3)
    ledger.fail("a", 2)
    assert "a" in ledger.in_flight
    assert ledger.due == set()
    ledger.fail("a", 5)
    assert (ledger.in_flight, ledger.due) == ({}, {"a"})


def test_frozen_layers_do_not_age() -> None:
    ledger = Ledger(facts("a", "cold", frozen=("cold",)), 3, None)
    ledger.version_durable("a", ref("a", 50))
    assert commit_next(ledger).step == 50


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_every_invariant(seed: int) -> None:
    """Whatever lands in whatever order: T never goes back, ages stay bounded, layers never get older."""
    rng = random.Random(seed)
    bound = rng.choice([0, 1, 4, 20])
    ledger = ledger_of(bound)
    landing: list[tuple[str, int]] = []
    commits = 0
    for step in range(1, 120):
        landing += [(name, step) for name in LAYERS if bound == 0 or rng.random() < 0.4]
        rng.shuffle(landing)
        keep = rng.randrange(4)
        landed, landing = landing[keep:], landing[:keep]
        for name, at in landed:
            ledger.version_durable(name, ref(name, at))
        before, point = ledger.committed, commit_next(ledger)
        if point is None:
            continue
        commits += 1
        assert point.step >= before.step
        assert point.step == max(version.step for version in point.layers.values())
        assert all(point.step - version.step <= bound for version in point.layers.values())
        assert all(point.layers[name].step >= before.layers[name].step for name in LAYERS)
        assert all(point.previous[name].step < point.layers[name].step for name in point.previous)
        assert point != before
    assert commits > 10


def test_a_second_try_at_the_same_step_completes_the_version() -> None:
    """While training stands still a failed shard is stored again; the shards that landed the first time stay good."""
    ledger = ledger_of(10)
    issue(ledger, 1, "a", step=2)
    version = VersionId(layer="a", step=2, epoch=1, attempt=1)
    assert stored(ledger, version, 0) is None
    ledger.fail("a")
    issue(ledger, 2, "a", step=2)
    assert stored(ledger, version, 1) is not None
