"""What earlier attempts, epochs and dead processes left in a run's store, and its deletion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage import keys, retention
from storage.object_store import ObjectInfo, ObjectStore, Unfinished
from storage.records import Record


@dataclass(frozen=True)
class Known:
    """What the catalog says: readable records (newest first), keys of unreadable ones, what is kept, whose sweep."""

    records: Sequence[Record]
    unreadable: Sequence[str]
    rule: retention.Rule
    epoch: int


@dataclass(frozen=True)
class Leftovers:
    """Objects that nobody names, and uploads or temporary files that nobody waits for."""

    objects: frozenset[ObjectInfo] = frozenset()
    unfinished: frozenset[Unfinished] = frozenset()

    def __and__(self, other: "Leftovers") -> "Leftovers":
        return Leftovers(self.objects & other.objects, self.unfinished & other.unfinished)

    def __bool__(self) -> bool:
        return bool(self.objects or self.unfinished)


def find_leftovers(store: ObjectStore, known: Callable[[], Known]) -> Leftovers:
    """List the store, then ask what is `known`: so what was named meanwhile is not taken for left over.

    Raises:
        StoreError: the store failed.
    """
    unfinished, listed = store.unfinished(), store.list("")
    now = known()
    named = (now.records, now.unreadable, now.rule, now.epoch)
    doomed = set(retention.unnamed([info.key for info in listed], *named))
    given_up = retention.abandoned([begun.key for begun in unfinished], now.records[0], now.epoch)
    return Leftovers(
        frozenset(info for info in listed if info.key in doomed),
        frozenset(begun for begun in unfinished if begun.key in given_up),
    )


def delete_leftovers(store: ObjectStore, leftovers: Leftovers) -> None:
    """Give up the uploads, then delete the objects, the records among them first.

    Raises:
        StoreError: something stays.
    """
    store.abort(sorted(leftovers.unfinished))
    store.delete(sorted((info.key for info in leftovers.objects), key=lambda key: (key.startswith(keys.LAYERS), key)))
