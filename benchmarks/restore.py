"""Restoring a composite, against reading the same bytes through the same filesystem and nothing else."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.piece import Mark, Outcome, Profile
from benchmarks.stores import drop_cached, fast_bucket, local_folder
from benchmarks.subject import CPU, Trained, group_of_one, job_spec, layers_up_to, train
from storage import keys
from storage.catalog import Catalog
from storage.encoding import encoding_of
from storage.messages import LayerPlan, RestorePlan
from storage.object_store import ObjectStore, open_object_store
from storage.options import CheckpointOptions, StorageOptions
from storage.records import Manifest, ShardRef, VersionId
from storage.shard_format import ShardMeta
from storage.shard_writer import write_shard
from workers.layers import Layer
from workers.restore import PARALLEL_READS, restore, shards_of
from workers.slices import cut
from workers.state import PARAM, slice_tensors

CODECS = ("raw", "lossless", "delta")
MOST_RATIO = 1.3
STEPS, EPOCH, ATTEMPT = 3, 1, 1


def run(profile: Profile) -> Outcome:
    """Measure each codec on each store, readings and restores in turn."""
    repeats = profile.pick(quick=3, full=9)
    most_bytes = profile.pick(quick=200, full=600) * 10**6
    found: list[dict[str, Any]] = []
    with group_of_one(), local_folder() as local, fast_bucket() as s3:
        trained = train(job_spec(profile), STEPS)
        layers = layers_up_to(trained, most_bytes)
        for codec in CODECS:
            for name, options in (("disk", local), ("S3", s3)):
                if options is not None:
                    found.append({"store": name, **measure(trained, layers, options, codec, repeats)})
    marks = [
        Mark(
            f"restore, {entry['codec']}, {entry['store']}",
            f"<= {MOST_RATIO}x of reading",
            f"{entry['ratio']:.2f}x ({entry['read_mb_s']:.0f} MB/s read)",
            met=entry["ratio"] <= MOST_RATIO,
        )
        for entry in found
    ]
    return Outcome(marks, {"restores": found})


@dataclass(frozen=True)
class _Stored:
    plan: RestorePlan
    store: ObjectStore
    folder: Path | None
    """Where the objects are files."""

    def each_from_scratch(self, work: Callable[[], None]) -> tuple[float, float]:
        """Wall and CPU seconds of `work`, which finds no file in the page cache."""
        if self.folder is not None:
            drop_cached(self.folder)
        began, cpu_began = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - began, time.process_time() - cpu_began


def measure(
    trained: Trained, layers: Sequence[Layer], options: StorageOptions, codec: str, repeats: int
) -> dict[str, Any]:
    """Store `layers` with `codec`, then read and restore them in turn."""
    stored = _store(trained, layers, options, codec)
    by_name = {layer.name: layer for layer in layers}
    pristine = {part: tensor.clone() for part, tensor in _state(trained, layers).items()}
    reading, restoring = [], []
    for _ in range(repeats):
        reading.append(stored.each_from_scratch(lambda: _read_only(stored)))
        _reset(trained, layers)
        arguments = (stored.plan, stored.store, by_name, trained.model, trained.optimizer, CPU, None)
        restoring.append(stored.each_from_scratch(partial(_restore, arguments)))
        if codec != "delta" and not all(torch.equal(pristine[k], v) for k, v in _state(trained, layers).items()):
            raise RuntimeError(f"restore with codec {codec} did not bring the stored values back")
    for part, tensor in _state(trained, layers).items():
        tensor.copy_(pristine[part])
    size = sum(shard.bytes for _, shard in shards_of(stored.plan))
    read = median(wall for wall, _ in reading)
    return {
        "codec": codec,
        "stored_bytes": size,
        "state_bytes": sum(tensor.nbytes for tensor in pristine.values()),
        "read_mb_s": size / read / 1e6,
        "ratio": median(wall for wall, _ in restoring) / read,
        "ratio_of_fastest": min(restoring)[0] / min(reading)[0],
        "read_wall_and_cpu_seconds": reading,
        "restore_wall_and_cpu_seconds": restoring,
    }


def _store(trained: Trained, layers: Sequence[Layer], options: StorageOptions, codec: str) -> _Stored:
    store = open_object_store(options, f"run-{codec}")
    encoding = encoding_of(CheckpointOptions(codec=codec))
    plans = {}
    for layer in layers:
        version = VersionId(layer=layer.name, step=STEPS, epoch=EPOCH, attempt=ATTEMPT)
        meta = ShardMeta(run="run", optimizer_step=STEPS, rank=0, world_size=1, **version._asdict())
        key = keys.shard(**version._asdict(), rank=0, world_size=1)
        summary = write_shard(store, key, meta, trained.tensors(layer), encoding, trained.base_elements)
        ranges = cut(layer, trained.model, 0, 1).ranges
        shard = ShardRef(key=key, rank=0, bytes=summary.bytes, digest=summary.digest, ranges=ranges)
        manifest = Manifest(version=version, world_size=1, shards=(shard,))
        plans[layer.name] = LayerPlan(ref=Catalog(store).write_manifest(manifest), manifest=manifest)
    plan = RestorePlan(attempt=ATTEMPT + 1, step=STEPS, layers=plans, writers={})
    is_local = "://" not in options.url
    return _Stored(plan, store, Path(options.url) if is_local else None)


def _read_only(stored: _Stored) -> None:
    """Every object whole, with as many threads as a restore has."""

    def read(shard: ShardRef) -> None:
        with stored.store.open_reader(shard.key) as source:
            source.read_buffer(shard.bytes)

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        list(pool.map(read, [shard for _, shard in shards_of(stored.plan)]))


def _restore(arguments: Any) -> None:
    def ask(bad: dict[str, str], outage: str | None) -> None:
        if bad or outage:
            raise RuntimeError(f"restore failed: {bad or outage}")

    restore(*arguments, ask)


def _state(trained: Trained, layers: Sequence[Layer]) -> dict[tuple[str, str, int], torch.Tensor]:
    """Live tensors of the layers, by parameter, kind and first element."""
    return {
        (part.name, part.kind, part.first): part.tensor
        for layer in layers
        for part in slice_tensors(cut(layer, trained.model, 0, 1), layer, trained.model, trained.optimizer)
    }


def _reset(trained: Trained, layers: Sequence[Layer]) -> None:
    """As a new process has it: the base version, and an empty optimizer state."""
    for (name, kind, first), tensor in _state(trained, layers).items():
        if kind == PARAM:
            tensor.copy_(trained.base[name].view(-1)[first : first + tensor.numel()])
        else:
            tensor.zero_()
