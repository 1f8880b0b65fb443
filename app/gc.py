"""Gc: delete what no retained restore point needs, of a run that nobody works on."""

from dataclasses import dataclass

from app.existing_run import existing_run, no_restore_point
from storage.catalog import Catalog
from storage.errors import RunLiveError, SpecError
from storage.liveness import is_alive
from storage.object_store import ObjectStore
from storage.retention import unnamed


@dataclass(frozen=True)
class Collected:
    """What was deleted, or would be."""

    keys: tuple[str, ...]
    bytes: int
    dry_run: bool


def collect(store: ObjectStore, *, dry_run: bool) -> Collected:
    """Delete unnamed objects and restore points beyond the newest that the run's spec keeps.

    Raises:
        SpecError: there is no restore point.
        RunLiveError: the run is alive; it cleans up behind itself.
    """
    claim, catalog = existing_run(store), Catalog(store)
    if not dry_run and is_alive(store, claim):
        raise RunLiveError(
            f"{store.url}: epoch {claim.epoch} of this run is alive (pid {claim.where.pid} on {claim.where.host}) "
            "and cleans up behind itself; wait until it ends, or stop it"
        )
    listed = store.list("")
    found = catalog.restorable()
    if found.problems:
        raise SpecError(f"RUN: {store.url}: {'; '.join(found.problems)}; nothing is deleted on this basis")
    if not found.records:
        raise no_restore_point(store)
    doomed = set(
        unnamed([info.key for info in listed], found.records, int(claim.spec["checkpoint"]["keep_restore_points"]))
    )
    catalog.check_fence(claim.epoch)
    if not dry_run:
        store.delete(sorted(doomed))
    return Collected(tuple(sorted(doomed)), sum(info.bytes for info in listed if info.key in doomed), dry_run)
