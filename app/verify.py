"""Verify: read every shard that a retained restore point needs, and check it."""

from dataclasses import dataclass, field

from app.existing_run import existing_run, no_restore_point, rule_of
from storage.catalog import Catalog
from storage.errors import CorruptObjectError, ObjectNotFoundError
from storage.object_store import ObjectStore
from storage.records import VersionRef
from storage.retention import retained
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

    What could not be read, and is not needed any more when the catalog is read again, was swept meanwhile.

    Raises:
        SpecError: there is no restore point.
    """
    rule = rule_of(existing_run(store))
    catalog = Catalog(store)
    found = catalog.restorable()
    if not found.records and not found.problems:
        raise no_restore_point(store)
    result = Verification(run=store.url)
    kept = retained(found.records, rule)
    refs = sorted({ref for point in kept for ref in point.needed}, key=str)
    broken = {ref: problem for ref in refs if (problem := _problem(catalog, ref, result)) is not None}
    if broken or found.problems:
        found = catalog.restorable()
        still_needed = {ref for point in retained(found.records, rule) for ref in point.needed}
        swept = broken.keys() - still_needed
        broken = {ref: problem for ref, problem in broken.items() if ref not in swept}
        kept = [point for point in kept if not point.needed & swept]
    result.restore_points = [point.record.step for point in kept]
    result.problems = [*found.problems, *broken.values()]
    return result


def _problem(catalog: Catalog, ref: VersionRef, result: Verification) -> str | None:
    """Read a version; what is wrong with it, or None."""
    result.versions += 1
    try:
        for shard in catalog.read_manifest(ref).shards:
            check_shard(catalog.store, shard.key, shard.bytes, shard.digest)
            result.objects += 1
            result.bytes += shard.bytes
    except (CorruptObjectError, ObjectNotFoundError) as error:
        return str(error)
    return None
