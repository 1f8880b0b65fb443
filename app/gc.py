"""Gc: delete what no retained restore point needs, of a run that nobody works on."""

from dataclasses import dataclass

from app.existing_run import existing_run, no_restore_point, rule_of
from storage.catalog import Catalog
from storage.errors import RunLiveError, SpecError
from storage.leftovers import Known, delete_leftovers, find_leftovers
from storage.liveness import is_alive
from storage.object_store import ObjectStore


@dataclass(frozen=True)
class Collected:
    """What was deleted, or would be: objects, and uploads or temporary files that were never finished."""

    keys: tuple[str, ...]
    unfinished: tuple[str, ...]
    bytes: int
    dry_run: bool


def collect(store: ObjectStore, *, dry_run: bool) -> Collected:
    """Delete unnamed objects, restore points that the run's spec does not keep, and abandoned uploads.

    A submission that begins meanwhile loses nothing: what the newest attempt may still have named is left alone until
    the run is finished.

    Raises:
        SpecError: there is no restore point, or one cannot be read.
        RunLiveError: the run is alive; it cleans up behind itself.
    """
    claim, catalog = existing_run(store), Catalog(store)
    if not dry_run and is_alive(store, claim):
        raise RunLiveError(
            f"{store.url}: epoch {claim.epoch} of this run is alive (pid {claim.where.pid} on {claim.where.host}) "
            "and cleans up behind itself; wait until it ends, or stop it"
        )
    rule = rule_of(claim)

    def known() -> Known:
        found = catalog.restorable()
        if found.problems:
            raise SpecError(f"RUN: {store.url}: {'; '.join(found.problems)}; nothing is deleted on this basis")
        if not found.records:
            raise no_restore_point(store)
        return Known(found.records, (), rule, claim.epoch + 1)  # the epoch is dead: what it was writing is left over

    leftovers = find_leftovers(store, known)
    catalog.check_fence(claim.epoch)
    if not dry_run:
        delete_leftovers(store, leftovers)
    return Collected(
        keys=tuple(sorted(info.key for info in leftovers.objects)),
        unfinished=tuple(sorted(begun.key for begun in leftovers.unfinished)),
        bytes=sum(info.bytes for info in leftovers.objects),
        dry_run=dry_run,
    )
