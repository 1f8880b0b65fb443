"""Verify: read every shard that a retained restore point names, and check it."""

from dataclasses import dataclass, field

from app.existing_run import existing_run, no_restore_point
from storage import keys
from storage.catalog import Catalog
from storage.errors import CorruptObjectError, ObjectNotFoundError
from storage.object_store import ObjectStore
from storage.records import Record, VersionRef
from storage.shard_reader import check_shard


@dataclass
class Verification:
    """What was read, and what is wrong with it."""

    run: str
    restore_points: list[int] = field(default_factory=list)
    versions: int = 0
    objects: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


def verify_run(store: ObjectStore) -> Verification:
    """Read and check every retained restore point; safe beside a live run.

    Raises:
        SpecError: there is no restore point.
    """
    existing_run(store)
    catalog = Catalog(store)
    found = catalog.restorable()
    if not found.records and not found.problems:
        raise no_restore_point(store)
    result = Verification(run=store.url, problems=list(found.problems))
    checked: dict[VersionRef, str | None] = {}
    for record in found.records:
        problems = [
            problem for ref in sorted(record.named(), key=str) if (problem := _check(catalog, ref, checked, result))
        ]
        if problems and _is_gone(store, record):
            continue  # retention has un-named it since it was read
        result.restore_points.append(record.step)
        result.problems += [problem for problem in problems if problem not in result.problems]
    return result


def _check(
    catalog: Catalog, ref: VersionRef, checked: dict[VersionRef, str | None], result: Verification
) -> str | None:
    if ref not in checked:
        checked[ref] = None
        result.versions += 1
        try:
            for shard in catalog.read_manifest(ref).shards:
                check_shard(catalog.store, shard.key, shard.bytes, shard.digest)
                result.objects += 1
                result.bytes += shard.bytes
        except (CorruptObjectError, ObjectNotFoundError) as error:
            checked[ref] = str(error)
    return checked[ref]


def _is_gone(store: ObjectStore, record: Record) -> bool:
    try:
        store.size(keys.record(record.epoch, record.seq))
    except ObjectNotFoundError:
        return True
    return False
