"""What may be deleted: pure functions over records and listings."""

from collections.abc import Iterable, Sequence

from storage import keys
from storage.records import Record


def retained(records: Sequence[Record], keep: int) -> list[Record]:
    """Newest `keep` of `records` (newest first). Each also names the version before of every layer."""
    return list(records[:keep])


def needed_prefixes(records: Iterable[Record]) -> set[str]:
    """Key prefixes of every layer version that one of `records` names."""
    refs = {ref for record in records for ref in record.named()}
    return {(ref.manifest_key or "").rpartition("/")[0] + "/" for ref in refs}


def unnamed(object_keys: Iterable[str], records: Sequence[Record], keep: int) -> list[str]:
    """Keys that no retained record needs: old records, and objects of layer versions nobody names."""
    kept = retained(records, keep)
    kept_records = {keys.record(record.epoch, record.seq) for record in kept}
    prefixes = needed_prefixes(kept)

    def is_unnamed(key: str) -> bool:
        if key.startswith(keys.RECORDS):
            return key not in kept_records
        return key.startswith(keys.LAYERS) and key.rpartition("/")[0] + "/" not in prefixes

    return [key for key in object_keys if is_unnamed(key)]
