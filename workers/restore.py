"""Restore of a composite: each object is read once per cluster, verified, broadcast and filled in place.

What is read waits, its compressed parts uncompressed, until everything is verified: with codec `delta` a fraction of
the state. Then it is decoded where it belongs: a lone rank's into the live tensors, else into the buffer that is
broadcast, a few objects ahead.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from storage.codecs import Base
from storage.errors import CorruptObjectError, LayerCheckError, ObjectNotFoundError, StoreError
from storage.messages import RestorePlan
from storage.object_store import ObjectStore
from storage.records import ShardRef
from storage.shard_format import DTYPES
from storage.shard_reader import StoredChunk, read_chunks
from workers.layers import Layer
from workers.slices import cut
from workers.state import fill, from_numpy, model_base, part_of, slice_tensors, to_numpy
from workers.together import do_together

PARALLEL_READS = 4
_ALIGNMENT = 16  # a tensor's bytes inside a broadcast buffer must be viewable as any type


@dataclass(frozen=True)
class Entry:
    """One chunk inside a shard's broadcast buffer."""

    name: str
    kind: str
    dtype: str
    first: int
    count: int
    offset: int
    bytes: int


@dataclass
class Share:
    """What one rank has read of a plan: verified chunks by object key, and what is wrong with a layer."""

    chunks: dict[str, list[StoredChunk]] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    outage: str | None = None
    """What the store said when it did not let an object be read that may well be there."""


def shards_of(plan: RestorePlan) -> list[tuple[str, ShardRef]]:
    """(layer, shard) of every object the plan needs, in an order that all ranks agree on: the newest layers last.

    So what a tensor that is split among layers has only once (`step`) is, when they are filled in this order, that of
    its newest part.
    """
    layers = sorted(plan.layers.items(), key=lambda item: (item[1].ref.step, item[0]))
    return [(name, shard) for name, planned in layers if planned.manifest for shard in planned.manifest.shards]


def readers(plan: RestorePlan, world_size: int) -> dict[str, int]:
    """Rank that reads each object: the largest first, each to the rank with the least to read."""
    load = [0] * world_size
    assigned = {}
    for _, shard in sorted(shards_of(plan), key=lambda item: (-item[1].bytes, item[1].key)):
        rank = load.index(min(load))
        load[rank] += shard.bytes
        assigned[shard.key] = rank
    return assigned


def read_share(store: ObjectStore, plan: RestorePlan, rank: int, world_size: int, share: Share, base: Base) -> Share:
    """Read and verify this rank's objects; what `share` holds already is kept if the plan still needs it."""
    assigned = readers(plan, world_size)
    wanted = [(layer, shard) for layer, shard in shards_of(plan) if assigned[shard.key] == rank]
    result = Share()

    def read(item: tuple[str, ShardRef]) -> None:
        layer, shard = item
        try:
            kept = share.chunks.get(shard.key)
            result.chunks[shard.key] = kept if kept is not None else _read_checked(store, plan, layer, shard, base)
        except (CorruptObjectError, ObjectNotFoundError) as error:
            result.bad[layer] = str(error)
        except StoreError as error:
            result.outage = str(error)

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        list(pool.map(read, wanted))
    return result


def _read_checked(store: ObjectStore, plan: RestorePlan, layer: str, ref: ShardRef, base: Base) -> list[StoredChunk]:
    meta, chunks = read_chunks(store, ref.key, ref.bytes, ref.digest, base)
    version = plan.layers[layer].ref
    said = (meta.layer, meta.step, meta.epoch, meta.attempt, meta.rank)
    expected = (layer, version.step, version.epoch, version.attempt, ref.rank)
    if said != expected:
        raise CorruptObjectError(
            f"{ref.key}: expected the shard of (layer, step, epoch, attempt, rank) {expected}, got {said}; "
            "bring the object back from a copy"
        )
    return chunks


def index_of(share: Share) -> dict[str, list[Entry]]:
    """Layout of the broadcast buffer of each object this rank has read."""
    return {key: list(_entries(chunks)) for key, chunks in share.chunks.items()}


def _entries(chunks: list[StoredChunk]) -> Iterator[Entry]:
    offset = 0
    for chunk in chunks:
        yield Entry(chunk.name, chunk.kind, chunk.dtype, chunk.first, chunk.count, offset, chunk.bytes)
        offset += -(-chunk.bytes // _ALIGNMENT) * _ALIGNMENT


def uncovered(
    plan: RestorePlan,
    layers: dict[str, Layer],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    index: dict[str, list[Entry]],
) -> dict[str, str]:
    """Layers whose shards together do not hold every element of the layer state exactly once.

    Raises:
        LayerCheckError: they hold something else. All ranks raise it, before anything is filled.
    """
    bad = {}
    for name, planned in plan.layers.items():
        if planned.manifest is None:
            continue
        runs: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for shard in planned.manifest.shards:
            for entry in index.get(shard.key, []):
                runs[entry.name, entry.kind].append((entry.first, entry.count))
        for part in slice_tensors(cut(layers[name], model, 0, 1), layers[name], model, optimizer):
            end = part.first
            for first, count in sorted(runs.pop((part.name, part.kind), [])):
                end = first + count if first == end else -1
            if end != part.first + part.tensor.numel():
                bad[name] = f"{planned.ref.manifest_key}: the shards do not hold all of {part.name} ({part.kind})"
        for other, kind in runs:
            raise LayerCheckError(
                f"{planned.ref.manifest_key}: {other} ({kind}) is no part of {name} in this model and optimizer; "
                "use those of the run, and the versions of transformers and torch that it was started with"
            )
    return bad


def distribute(
    plan: RestorePlan,
    share: Share,
    index: dict[str, list[Entry]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Broadcast every object from the rank that read it and fill it in, in place, on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        _fill_alone(plan, share, model, optimizer)
        return
    assigned = readers(plan, world_size)
    sizes = {key: max((entry.offset + entry.bytes for entry in entries), default=0) for key, entries in index.items()}
    keys = [shard.key for _, shard in shards_of(plan) if sizes[shard.key] > 0]

    own = deque(key for key in keys if assigned[key] == rank)
    coming = deque[Future[Tensor]]()
    with ThreadPoolExecutor(PARALLEL_READS) as pool:

        def pack_next() -> None:
            if own:
                key = own.popleft()
                coming.append(pool.submit(_packed, share.chunks.pop(key), index[key], sizes[key]))

        for _ in range(PARALLEL_READS):
            pack_next()
        for key in keys:
            if assigned[key] == rank:
                buffer = coming.popleft().result().to(device)
                pack_next()
            else:
                buffer = torch.empty(sizes[key], dtype=torch.uint8, device=device)
            dist.broadcast(buffer, src=assigned[key])
            for entry in index[key]:
                fill(model, optimizer, entry.name, entry.kind, entry.first, _values(buffer, entry))


def _fill_alone(plan: RestorePlan, share: Share, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With nobody to broadcast to, decode straight into the live tensors."""
    # What a tensor that is split among layers has only once (`step`) comes with each part. That of the newest counts,
    # and chunks are filled in any order.
    newest = {
        (chunk.name, chunk.kind, chunk.first, chunk.count): chunk
        for _, shard in shards_of(plan)
        for chunk in share.chunks.pop(shard.key)
    }

    def fill_in(chunk: StoredChunk) -> None:
        part = part_of(model, optimizer, chunk.name, chunk.kind, chunk.first, chunk.count, chunk.dtype)
        values = to_numpy(part if part.is_cpu else torch.empty_like(part, device="cpu"))
        chunk.fill(values)
        if not part.is_cpu:
            part.copy_(from_numpy(values, chunk.dtype))

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        list(pool.map(fill_in, newest.values()))


def _packed(chunks: list[StoredChunk], entries: list[Entry], size: int) -> Tensor:
    packed = np.empty(size, dtype=np.uint8)
    for chunk, entry in zip(chunks, entries, strict=True):
        chunk.fill(packed[entry.offset : entry.offset + entry.bytes].view(DTYPES[chunk.dtype]))
    return torch.from_numpy(packed)


def _values(buffer: Tensor, entry: Entry) -> Tensor:
    return buffer[entry.offset : entry.offset + entry.bytes].view(getattr(torch, entry.dtype))


Ask = Callable[[dict[str, str], str | None], RestorePlan | None]


def restore(
    plan: RestorePlan,
    store: ObjectStore,
    layers: dict[str, Layer],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    group: dist.ProcessGroup | None,
    ask: Ask,
) -> RestorePlan:
    """Bring model and optimizer to the composite of `plan`, or of a plan that replaces it when objects are unreadable.

    The model must hold the base version: codec `delta` decodes each element against it, just before it is filled.
    `group` is a CPU group for the ranks' small messages. `ask` tells the CheckpointActor, from all ranks, which layers
    are unreadable, or that the store fails; it returns another plan, or the same one to go on reading, or None to go on
    with this one.

    Returns:
        The plan that was restored.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share, base = Share(), model_base(model)
    while True:
        share = do_together(partial(read_share, store, plan, rank, world_size, share, base), group)
        told: list[tuple[dict[str, list[Entry]], dict[str, str], str | None] | None] = [None] * world_size
        dist.all_gather_object(told, (index_of(share), share.bad, share.outage), group=group)
        heard = [message for message in told if message is not None]
        index = {key: entries for part, _, _ in heard for key, entries in part.items()}
        bad = {layer: problem for _, part, _ in heard for layer, problem in part.items()}
        outage = next((problem for _, _, problem in heard if problem is not None), None)
        if outage is None:
            bad = {**uncovered(plan, layers, model, optimizer, index), **bad}
        replacement = ask(bad, outage)
        if replacement is None:
            break
        plan = replacement
    distribute(plan, share, index, model, optimizer, device)
    return plan
