"""The catalog over every store: one winner an epoch, fencing, newest = highest (epoch, seq), nothing trusted unread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import keys
from storage.catalog import Catalog
from storage.errors import CorruptObjectError, FencedError, ObjectExistsError, ObjectNotFoundError, StoreError
from storage.object_store import ObjectStore
from storage.retention import Rule, unnamed
from tests.contract.conftest import Place
from tests.helpers.records import claim, manifest, record, ref

RACERS = 16


@pytest.fixture
def catalog(store: ObjectStore) -> Catalog:
    return Catalog(store)


def test_of_sixteen_racing_drivers_one_can_commit(place: Place) -> None:
    """A racer that lists after a winner claims the next epoch, as a takeover does: for a moment both believe."""
    catalogs = [Catalog(place.open()) for _ in range(RACERS)]
    start = threading.Barrier(RACERS)

    def race(number: int) -> int | None:
        start.wait()
        try:
            epoch = catalogs[number].claim(claim(driver=f"driver {number}", nonce=f"nonce {number}")).epoch
        except FencedError as error:
            assert "by another driver" in str(error)  # noqa: PT017 - the losers are counted below
            return None
        catalogs[number].fence_older(epoch)
        return epoch

    def commits(owner: tuple[Catalog, int]) -> bool:
        catalog, epoch = owner
        try:
            catalog.commit(record({"a": ref("a", epoch)}, epoch=epoch))
        except FencedError:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as pool:
        claimed = list(pool.map(race, range(RACERS)))
        owners = [(catalog, epoch) for catalog, epoch in zip(catalogs, claimed, strict=True) if epoch is not None]
        winners = [epoch for (_, epoch), won in zip(owners, pool.map(commits, owners), strict=True) if won]
    epochs = sorted(epoch for _, epoch in owners)
    assert epochs == list(range(1, len(epochs) + 1)), "an epoch has two owners"
    assert [keys.epoch_of(info.key) for info in catalogs[0].store.list(keys.EPOCHS)] == epochs
    assert winners == epochs[-1:]
    assert [point.epoch for point in catalogs[0].restorable().records] == winners


def test_one_epoch_has_one_winner(place: Place) -> None:
    """The race for the very same epoch, whatever the listings said."""
    catalogs = [Catalog(place.open()) for _ in range(RACERS)]
    start = threading.Barrier(RACERS)

    def race(number: int) -> bool:
        start.wait()
        try:
            catalogs[number].store.create(keys.epoch_claim(1), claim(nonce=f"nonce {number}").to_bytes())
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as pool:
        assert sum(pool.map(race, range(RACERS))) == 1


class LostReply:
    """A store whose first creation succeeds with its reply lost; the client's retry then meets its own object."""

    def __init__(self, store: ObjectStore, intruder: bytes | None = None) -> None:
        self._store, self._intruder = store, intruder

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> None:
        self._store.create(key, self._intruder or data)
        raise ObjectExistsError(f"cannot create {key}: it already exists")


def test_a_claim_whose_reply_was_lost_is_ours(store: ObjectStore) -> None:
    mine = Catalog(LostReply(store)).claim(claim())
    assert mine.epoch == 1
    assert Catalog(store).newest_claim() == mine


def test_a_claim_that_another_won_meanwhile_is_not_ours(store: ObjectStore) -> None:
    winner = claim(driver="other", nonce="other").model_copy(update={"epoch": 1})
    with pytest.raises(
        FencedError, match=r"epoch 1 of this run was claimed at 2026\S+ by another driver \(pid 1 on h\)"
    ):
        Catalog(LostReply(store, winner.to_bytes())).claim(claim())


def test_a_record_whose_reply_was_lost_is_committed(store: ObjectStore) -> None:
    Catalog(store).claim(claim())
    point = record({"a": ref("a", 1)})
    Catalog(LostReply(store)).commit(point)
    assert Catalog(store).newest_record() == point


def test_a_record_is_never_replaced_by_another(catalog: Catalog) -> None:
    catalog.claim(claim())
    catalog.commit(record({"a": ref("a", 1)}))
    with pytest.raises(ObjectExistsError):
        catalog.commit(record({"a": ref("a", 2)}))
    assert catalog.newest_record() == record({"a": ref("a", 1)})


def test_a_restarted_actor_claims_the_next_epoch_of_its_driver(catalog: Catalog) -> None:
    assert [catalog.claim(claim(nonce=str(life))).epoch for life in range(3)] == [1, 2, 3]


def test_a_driver_that_was_taken_over_cannot_come_back(catalog: Catalog) -> None:
    catalog.claim(claim(driver="first", nonce="1"))
    assert catalog.claim(claim(driver="second", nonce="2")).epoch == 2
    with pytest.raises(FencedError, match="epoch 2"):
        catalog.claim(claim(driver="first", nonce="3"))
    assert len(catalog.store.list(keys.EPOCHS)) == 2


def test_a_stale_epoch_commits_nothing(catalog: Catalog) -> None:
    old = catalog.claim(claim(driver="first", nonce="1")).epoch
    catalog.commit(record({"a": ref("a", 1)}, epoch=old))
    catalog.claim(claim(driver="second", nonce="2"))
    with pytest.raises(FencedError, match=r"this one stops"):
        catalog.commit(record({"a": ref("a", 2)}, epoch=old, seq=1))
    with pytest.raises(FencedError):
        catalog.check_fence(old)
    assert [info.key for info in catalog.store.list(keys.RECORDS)] == [keys.record(old, 0)]


class StoppedBeforeCreate:
    """The store of an actor that is stopped between its fence check and the creation, while `meanwhile` happens."""

    def __init__(self, store: ObjectStore, meanwhile: Callable[[], None]) -> None:
        self._store, self._meanwhile = store, meanwhile

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> None:
        self._meanwhile()
        self._store.create(key, data)


@pytest.mark.parametrize("committed", [0, 1, 3])
def test_a_stale_epoch_that_wakes_up_past_its_fence_check_commits_nothing(place: Place, committed: int) -> None:
    first, second = Catalog(place.open()), Catalog(place.open())
    first.claim(claim(driver="first", nonce="1"))
    for seq in range(committed):
        first.commit(record({"a": ref("a", seq + 1)}, seq=seq))

    def take_over() -> None:
        second.claim(claim(driver="second", nonce="2"))
        second.fence_older(2)

    late = record({"a": ref("a", 9)}, seq=committed)
    with pytest.raises(FencedError, match="epoch 2 of this run was claimed"):
        Catalog(StoppedBeforeCreate(place.open(), take_over)).commit(late)
    assert [point.seq for point in second.restorable().records] == list(reversed(range(committed)))
    assert second.restorable().problems == []
    second.commit(record({"a": ref("a", 9)}, epoch=2))
    assert second.newest_record().epoch == 2


def test_a_fence_counts_what_was_committed_before_it_and_stays(catalog: Catalog) -> None:
    """Epochs 1 and 2 began and never committed, 3 did, 4 died as it fenced; 5 fences what is left."""
    for epoch in range(1, 6):
        catalog.claim(claim(nonce=str(epoch)))
        if epoch == 3:
            catalog.fence_older(3)
            catalog.commit(record({"a": ref("a", 1)}, epoch=3))
    catalog.fence_older(5)
    catalog.fence_older(5)  # again, as after a lost reply
    fences = [keys.record(1, 0), keys.record(2, 0), keys.record(3, 1), keys.record(4, 0)]
    listed = [info.key for info in catalog.store.list(keys.RECORDS)]
    assert listed == sorted([*fences, keys.record(3, 0)])
    catalog.commit(record({"a": ref("a", 2)}, epoch=5))
    found = catalog.restorable()
    assert [(point.epoch, point.seq) for point in found.records] == [(5, 0), (3, 0)]
    listed = [info.key for info in catalog.store.list("")]
    assert unnamed(listed, found.records[:1], [], Rule(recent=1), epoch=5) == [keys.record(3, 0)]


def test_newest_is_the_highest_epoch_then_seq(catalog: Catalog) -> None:
    for epoch in (1, 2, 3):
        catalog.claim(claim(nonce=str(epoch)))
        for seq in (0, 9, 10):
            if epoch < 3 or seq == 0:
                catalog.store.create(
                    keys.record(epoch, seq), record({"a": ref("a", 1)}, epoch=epoch, seq=seq).to_bytes()
                )
    found = catalog.restorable()
    assert [(point.epoch, point.seq) for point in found.records] == [
        (3, 0),
        (2, 10),
        (2, 9),
        (2, 0),
        (1, 10),
        (1, 9),
        (1, 0),
    ]
    assert found.problems == []
    assert catalog.newest_record() == found.records[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"epoch": 1}',
        b"\x80\x04K\x01.",
        record({"a": ref("a", 1)}).to_bytes()[:-9],
        b'{"format_version": 2}',
    ],
)
def test_a_corrupt_newest_record_is_skipped_and_reported(catalog: Catalog, data: bytes) -> None:
    catalog.claim(claim())
    good = record({"a": ref("a", 1)}, seq=0)
    catalog.commit(good)
    catalog.store.put(keys.record(1, 1), data)
    found = catalog.restorable()
    assert found.records == [good]
    assert len(found.problems) == 1
    assert found.problems[0].startswith(f"{keys.record(1, 1)}: ")
    assert "\n" not in found.problems[0]
    assert catalog.newest_record() == good


def test_a_manifest_is_read_back_only_as_it_was_written(catalog: Catalog) -> None:
    written = manifest("a", 3)
    named = catalog.write_manifest(written)
    assert (named.step, named.epoch, named.attempt, named.bytes) == (3, 1, 1, 100)
    assert catalog.read_manifest(named) == written
    catalog.store.put(named.manifest_key, manifest("a", 3, world_size=1).to_bytes())  # whole, but another one
    with pytest.raises(CorruptObjectError, match=f"{named.manifest_key}: expected digest {named.manifest_digest}, got"):
        catalog.read_manifest(named)
    catalog.store.delete([named.manifest_key])
    with pytest.raises(ObjectNotFoundError):
        catalog.read_manifest(named)


def test_a_manifest_can_be_written_again(catalog: Catalog) -> None:
    """The retry of a write whose reply was lost, or an actor restarted between manifest and record."""
    assert catalog.write_manifest(manifest("a", 3)) == catalog.write_manifest(manifest("a", 3))


def test_an_empty_store_holds_nothing(catalog: Catalog) -> None:
    assert catalog.newest_claim() is None
    assert catalog.newest_record() is None
    assert catalog.restorable().records == []
    catalog.check_fence(1)


def test_a_corrupt_claim_is_an_error_that_names_it(catalog: Catalog) -> None:
    """Guessing that it is not there could put two epochs on one run."""
    catalog.store.put(keys.epoch_claim(1), b"{}")
    with pytest.raises(CorruptObjectError, match=keys.epoch_claim(1)):
        catalog.claim(claim())
    assert not issubclass(CorruptObjectError, StoreError)


def test_a_copy_under_another_name_is_refused(catalog: Catalog) -> None:
    catalog.claim(claim())
    catalog.store.create(keys.epoch_claim(2), catalog.store.read(keys.epoch_claim(1)))
    with pytest.raises(CorruptObjectError, match=r"00000002.json: expected the object of this name"):
        catalog.newest_claim()
    catalog.store.create(keys.record(1, 7), record({"a": ref("a", 1)}, seq=6).to_bytes())
    found = catalog.restorable()
    assert not found.records
    assert "expected the object of this name" in found.problems[0]


def test_a_document_that_is_too_large_is_not_read(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = catalog.write_manifest(manifest("a", 3))
    monkeypatch.setattr("storage.catalog.LARGEST_DOCUMENT_BYTES", 100)
    with pytest.raises(CorruptObjectError, match="expected at most 100 bytes"):
        catalog.read_manifest(stored)
