"""Catalog records of a run with layers of 100 bytes, made up by tests."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage import keys
from storage.actor_setup import ActorSetup
from storage.options import CheckpointOptions, StorageOptions
from storage.records import (
    BASE,
    BaseVersion,
    ElementRange,
    EpochClaim,
    EpochLife,
    Fence,
    Incident,
    LayerFacts,
    Manifest,
    ProcessId,
    Progress,
    Record,
    Recovery,
    Sealed,
    ShardRef,
    Totals,
    VersionId,
    VersionRef,
)

LAYER_BYTES = 100
HERE = ProcessId(host="h", boot_id="b", pid=1, started="1")


def facts(*names: str, frozen: tuple[str, ...] = ()) -> tuple[LayerFacts, ...]:
    """Facts of the layers `names`."""
    return tuple(LayerFacts(name=name, bytes=LAYER_BYTES, frozen=name in frozen) for name in names)


def ref(layer: str, step: int, *, attempt: int = 1, epoch: int = 1, digest: str = "d") -> VersionRef:
    """What a record says of a stored version; the base version at step 0."""
    if step == 0:
        return BASE
    key = keys.manifest(layer, step, epoch, attempt)
    return VersionRef(
        step=step, epoch=epoch, attempt=attempt, manifest_key=key, manifest_digest=digest, bytes=LAYER_BYTES
    )


def shard(version: VersionId, rank: int, world_size: int) -> ShardRef:
    """The shard of `rank`, cut evenly."""
    first, end = (LAYER_BYTES * r // world_size for r in (rank, rank + 1))
    return ShardRef(
        key=keys.shard(**version._asdict(), rank=rank, world_size=world_size),
        rank=rank,
        bytes=end - first,
        digest="d",
        ranges=(ElementRange(tensor="w", first=first, count=end - first),),
    )


def told_of(version: VersionId, ranks: Iterable[int], world_size: int) -> tuple[dict[int, bytes], dict[int, int]]:
    """What a ShardWriter tells of the shards of `ranks`: entries and sizes."""
    shards = [shard(version, rank, world_size) for rank in ranks]
    return {part.rank: part.to_bytes() for part in shards}, {part.rank: part.bytes for part in shards}


def manifest(layer: str, step: int, *, world_size: int = 2) -> Manifest:
    """A manifest of a version of epoch 1, attempt 1."""
    version = VersionId(layer=layer, step=step, epoch=1, attempt=1)
    return Manifest(
        version=version,
        world_size=world_size,
        shards=tuple(shard(version, rank, world_size) for rank in range(world_size)),
    )


def record(layers: dict[str, VersionRef], *, epoch: int = 1, seq: int = 0, bound: int = 100, **more: Any) -> Record:
    """The record of a restore point over `layers`."""
    return Record(
        epoch=epoch,
        seq=seq,
        step=max(version.step for version in layers.values()),
        layers=layers,
        facts=facts(*layers),
        base=BaseVersion(source="model", digest="d"),
        spec_fingerprint="f",
        staleness_bound_steps=bound,
        **more,
    )


def claim(driver: str = "driver", nonce: str = "nonce", **changes: Any) -> EpochClaim:
    """A claim of whatever epoch is free."""
    return EpochClaim(
        epoch=0,
        nonce=nonce,
        driver=driver,
        where=changes.pop("where", HERE),
        claimed_at="2026-11-29T12:00:00+00:00",
        spec={},
        spec_fingerprint="f",
        data_fingerprint="d",
        **changes,
    )


def golden_documents() -> dict[type[Sealed], Sealed]:
    """One of each kind with every field filled in, as `tests/golden` holds them: format version 1."""
    layers = {"block.0": ref("block.0", 7), "block.1": ref("block.1", 5), "embedding": ref("embedding", 0)}
    told = record(
        layers,
        seq=3,
        previous={"block.0": ref("block.0", 3)},
        totals=Totals(ticks=9, bytes_written=700, attempts=2, attempts_without_commit=1, held_seconds=0.25),
        progress=Progress(step=8, loss=1.5, eval_losses=((4, 2.5), (8, None)), step_seconds_median=0.5),
        recoveries=(Recovery(attempt=2, cause="SIGKILL", restore_point=6, steps_lost=1, max_age=2, mean_age=0.5),),
        incidents=(Incident(step=6, kind="slow store", what="503"),),
    )
    owned = claim().model_copy(update={"epoch": 1, "spec": {"name": "r", "steps": 1, "rates": [2.5, None]}})
    life, fence = EpochLife(epoch=1, beat=77), Fence(fenced_by=2)
    return {Record: told, Manifest: manifest("block.0", 7), EpochClaim: owned, EpochLife: life, Fence: fence}


def actor_setup(folder: Path, **changes: Any) -> ActorSetup:
    """What a driver gives the CheckpointActor of a run stored in `folder`."""
    setup = ActorSetup(
        storage=StorageOptions(url=str(folder)),
        run="run",
        run_id="run",
        checkpoint=CheckpointOptions(),
        in_flight_limit_bytes=1000,
        encoded_share=1.0,
        spec={},
        spec_fingerprint="f",
        data_fingerprint="d",
        driver="driver",
        where=HERE,
        attempts_without_progress=5,
        store_outage_s=60,
    )
    return replace(setup, **changes)
