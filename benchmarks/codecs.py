"""How fast one core makes shards: what it encodes, checks and sums up a second, of the state of a model in training.

It is the ShardWriter's own code on real tensors; only the store is missing, so nothing waits.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, cast

import pyarrow as pa

from benchmarks.piece import Mark, Outcome, Profile
from benchmarks.subject import Trained, group_of_one, job_spec, layers_up_to, train
from storage.encoding import encoding_of
from storage.finite import count_nonfinite
from storage.object_store import ObjectStore
from storage.options import CheckpointOptions, parse_write_budget
from storage.shard_format import ShardMeta
from storage.shard_writer import write_shard
from workers.layers import Layer

CODECS = ("raw", "lossless", "delta")
STEPS = 3


class _Nowhere:
    """A store that takes every object at once, and drops it."""

    @contextmanager
    def open_writer(self, key: str) -> Iterator[pa.NativeFile]:
        yield pa.MockOutputStream()


def run(profile: Profile) -> Outcome:
    """Encode some layers again and again; each must keep up with what training hands over."""
    repeats = profile.pick(quick=2, full=7)
    with group_of_one():
        trained = train(job_spec(profile), STEPS)
        layers = layers_up_to(trained, profile.pick(quick=100, full=300) * 10**6)
        found = {codec: measure(trained, layers, codec, repeats) for codec in CODECS}
    needed_mb_s = _handed_over_mb_s(trained)
    marks = [
        Mark(
            f"encoding, {codec}, one core",
            f">= {needed_mb_s:.0f} MB/s, what training hands over",
            f"{values['mb_s']:.0f} MB/s, to {values['share']:.1%} of the bytes",
            met=values["mb_s"] >= needed_mb_s,
        )
        for codec, values in found.items()
    ]
    return Outcome(marks, {"handed_over_mb_s": needed_mb_s, "step_seconds": trained.step_seconds, "codecs": found})


def measure(trained: Trained, layers: list[Layer], codec: str, repeats: int) -> dict[str, Any]:
    """Encode `layers`; MB/s are of the state, a CPU second of this thread each."""
    encoding = encoding_of(CheckpointOptions(codec=codec))
    store, seconds = cast("ObjectStore", _Nowhere()), []
    tensors = {layer.name: trained.tensors(layer) for layer in layers}
    size = sum(part.data.nbytes for parts in tensors.values() for part in parts)

    for _ in range(repeats):
        began, stored = time.thread_time(), 0
        for layer in layers:
            meta = ShardMeta(
                run="run",
                layer=layer.name,
                step=STEPS,
                optimizer_step=STEPS,
                epoch=1,
                attempt=1,
                rank=0,
                world_size=1,
            )
            assert not any(map(count_nonfinite, tensors[layer.name]))
            stored += write_shard(store, "key", meta, tensors[layer.name], encoding, trained.base_elements).bytes
        seconds.append(time.thread_time() - began)
    return {"mb_s": size / median(seconds) / 1e6, "share": stored / size, "state_bytes": size, "cpu_seconds": seconds}


def _handed_over_mb_s(trained: Trained) -> float:
    """MB a second of state that a run of this spec hands over, if its steps are as fast as those just made."""
    unit, amount = parse_write_budget(trained.spec.checkpoint.write_budget)
    if unit == "bytes_per_s":
        return amount / 1e6
    size = sum(part.data.nbytes for layer in trained.layers for part in trained.tensors(layer))
    return amount * size / min(trained.step_seconds) / 1e6
