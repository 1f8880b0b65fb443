"""The run that a command names."""

from storage.catalog import Catalog
from storage.errors import SpecError
from storage.object_store import ObjectStore
from storage.options import CheckpointOptions
from storage.records import EpochClaim
from storage.retention import Rule


def existing_run(store: ObjectStore) -> EpochClaim:
    """Newest epoch's claim of the run that `store` holds.

    Raises:
        SpecError: it holds no run.
        StoreError: it cannot be reached.
    """
    store.check_reachable()  # seconds, where a read of an endpoint that is not there takes its retries
    claim = Catalog(store).newest_claim()
    if claim is None:
        raise SpecError(
            f"RUN: expected the storage URL of a run, such as runs/quickstart, got {store.url}, which holds none"
            "; correct it"
        )
    return claim


def rule_of(claim: EpochClaim) -> Rule:
    """Which restore points the run keeps, as its spec says."""
    return Rule.of(CheckpointOptions.model_validate(claim.spec["checkpoint"]))


def no_restore_point(store: ObjectStore) -> SpecError:
    """The run exists, but has committed nothing yet."""
    return SpecError(
        f"RUN: expected a run with a readable restore point, got {store.url}, which has none; try again when it has one"
    )
