"""What may be deleted: pure functions over records and listings."""

from collections.abc import Iterable, Sequence

from storage import keys
from storage.records import Record, VersionRef


def retained(records: Sequence[Record], keep: int) -> list[Record]:
    """Newest record of each of the `keep` newest restore points, of `records` (newest first).

    Records that name the same versions are one restore point: every attempt and every epoch begins with a record of
    the restore point it starts from, and these must not push out the ones to fall back to. Each record also names the
    version before of every layer.
    """
    points: dict[frozenset[tuple[str, VersionRef]], Record] = {}
    for record in records:
        points.setdefault(frozenset(record.layers.items()), record)
    return list(points.values())[:keep]


def needed_prefixes(records: Iterable[Record]) -> set[str]:
    """Key prefixes of every layer version that one of `records` names."""
    refs = {ref for record in records for ref in record.named()}
    return {(ref.manifest_key or "").rpartition("/")[0] + "/" for ref in refs}


def unnamed(object_keys: Iterable[str], records: Sequence[Record], keep: int) -> list[str]:
    """Keys that no retained record needs: old records, and objects of layer versions nobody names.

    The last key of each epoch's records stays: it is the newest record of all, or fences a stale epoch.
    """
    object_keys, kept = sorted(object_keys), retained(records, keep)
    last = {key.rpartition("/")[0]: key for key in object_keys if key.startswith(keys.RECORDS)}
    kept_records = {*last.values(), *(keys.record(record.epoch, record.seq) for record in kept)}
    prefixes = needed_prefixes(kept)

    def is_unnamed(key: str) -> bool:
        if key.startswith(keys.RECORDS):
            return key not in kept_records
        return key.startswith(keys.LAYERS) and key.rpartition("/")[0] + "/" not in prefixes

    return [key for key in object_keys if is_unnamed(key)]
