"""What a run's newest record says, in the form that `status --json` prints."""

from collections.abc import Sequence

from app.existing_run import existing_run, no_restore_point, rule_of
from storage.catalog import Catalog
from storage.fault_points import fired_faults
from storage.object_store import ObjectStore
from storage.records import Incident, Recovery, Stored
from storage.retention import Kept, Kind, retained


class LayerStatus(Stored):
    """One layer in the newest restore point. `bytes`: what is stored of it; the base version costs none."""

    name: str
    step: int
    age: int
    bytes: int


class KeptPoint(Stored):
    """A restore point that is kept, and why."""

    step: int
    kinds: tuple[Kind, ...]


class RunStatus(Stored):
    """A run as of its newest restore point. Ages in steps, over the trained layers; times in seconds."""

    run: str
    epoch: int
    step: int
    restore_point: int
    staleness_bound_steps: int
    max_age: int
    mean_age: float
    layers: tuple[LayerStatus, ...]
    restore_points: tuple[KeptPoint, ...]
    attempts: int
    ticks: int
    bytes_written: int
    full_checkpoint_bytes: int
    reduction: float | None
    recoveries: tuple[Recovery, ...]
    incidents: tuple[Incident, ...]
    finished: bool
    loss: float | None
    eval_losses: tuple[tuple[int, float | None], ...]
    step_seconds_median: float | None
    tick_seconds_median: float | None
    tick_seconds_p99: float | None
    held_seconds: float


def status_of(run_url: str, kept: Sequence[Kept]) -> RunStatus:
    """Status of the run at `run_url` as the newest of the restore points `kept`, the first, tells it.

    `reduction` is how many times fewer bytes were written than full checkpoints at the same ticks would have taken
    (ticks x full_checkpoint_bytes / bytes_written); null when nothing was written. A frozen layer has age 0.
    """
    record = kept[0].record
    ages = record.ages()
    totals, progress = record.totals, record.progress
    layers = tuple(
        LayerStatus(name=name, step=version.step, age=ages.get(name, 0), bytes=version.bytes)
        for name, version in record.layers.items()
    )
    full_bytes = record.full_checkpoint_bytes
    return RunStatus(
        run=run_url,
        epoch=record.epoch,
        step=progress.step,
        restore_point=record.step,
        staleness_bound_steps=record.staleness_bound_steps,
        max_age=max(ages.values(), default=0),
        mean_age=sum(ages.values()) / len(ages) if ages else 0.0,
        layers=layers,
        restore_points=tuple(KeptPoint(step=point.record.step, kinds=point.kinds) for point in kept),
        attempts=totals.attempts,
        ticks=totals.ticks,
        bytes_written=totals.bytes_written,
        full_checkpoint_bytes=full_bytes,
        reduction=totals.ticks * full_bytes / totals.bytes_written if totals.bytes_written else None,
        recoveries=record.recoveries,
        incidents=record.incidents,
        finished=record.finished,
        loss=progress.loss,
        eval_losses=progress.eval_losses,
        step_seconds_median=progress.step_seconds_median,
        tick_seconds_median=progress.tick_seconds_median,
        tick_seconds_p99=progress.tick_seconds_p99,
        held_seconds=totals.held_seconds,
    )


def read_status(store: ObjectStore) -> RunStatus:
    """Status of the run that `store` holds.

    Raises:
        SpecError: there is no run, or none that has committed anything yet.
        StoreError: the store cannot be read.
    """
    rule = rule_of(existing_run(store))
    kept = retained(Catalog(store).restorable().records, rule)
    if not kept:
        raise no_restore_point(store)
    status = status_of(store.url, kept)
    return status.model_copy(update={"incidents": (*fired_faults(store), *status.incidents)})
