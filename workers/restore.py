"""Restore of a composite: each object is read once per cluster, verified, broadcast and filled in place."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from storage.codecs import Base
from storage.errors import CorruptObjectError, ObjectNotFoundError, StoreError
from storage.messages import RestorePlan
from storage.object_store import ObjectStore
from storage.records import ShardRef
from storage.shard_format import ShardTensor
from storage.shard_reader import read_chunks
from workers.layers import Layer
from workers.slices import cut
from workers.state import STEP, fill, from_numpy, model_base, slice_tensors
from workers.together import do_together

PARALLEL_READS = 4
_ALIGNMENT = 16  # a tensor's bytes inside a broadcast buffer must be viewable as any type


@dataclass(frozen=True)
class Entry:
    """One tensor run inside a shard's broadcast buffer."""

    name: str
    kind: str
    dtype: str
    first: int
    count: int
    offset: int
    nbytes: int


@dataclass
class Share:
    """What one rank has read of a plan: verified chunks of tensors by object key, and what is wrong with a layer."""

    tensors: dict[str, list[ShardTensor]] = field(default_factory=dict)
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
            kept = share.tensors.get(shard.key)
            result.tensors[shard.key] = kept if kept is not None else _read_checked(store, plan, layer, shard, base)
        except (CorruptObjectError, ObjectNotFoundError) as error:
            result.bad[layer] = str(error)
        except StoreError as error:
            result.outage = str(error)

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        list(pool.map(read, wanted))
    return result


def _read_checked(store: ObjectStore, plan: RestorePlan, layer: str, ref: ShardRef, base: Base) -> list[ShardTensor]:
    shard = read_chunks(store, ref.key, ref.bytes, ref.digest, base)
    version = plan.layers[layer].ref
    said = (shard.meta.layer, shard.meta.step, shard.meta.epoch, shard.meta.attempt, shard.meta.rank)
    expected = (layer, version.step, version.epoch, version.attempt, ref.rank)
    if said != expected:
        raise CorruptObjectError(
            f"{ref.key}: expected the shard of (layer, step, epoch, attempt, rank) {expected}, got {said}; "
            "bring the object back from a copy"
        )
    return list(shard.tensors)


def index_of(share: Share) -> dict[str, list[Entry]]:
    """Layout of the broadcast buffer of each object this rank has read."""
    return {key: list(_entries(tensors)) for key, tensors in share.tensors.items()}


def _entries(tensors: list[ShardTensor]) -> Iterator[Entry]:
    offset = 0
    for t in tensors:
        yield Entry(t.name, t.kind, t.dtype, t.first, t.count, offset, t.data.nbytes)
        offset += -(-t.data.nbytes // _ALIGNMENT) * _ALIGNMENT


def uncovered(
    plan: RestorePlan,
    layers: dict[str, Layer],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    index: dict[str, list[Entry]],
) -> dict[str, str]:
    """Layers whose shards together do not hold every element of the layer state exactly once."""
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
            for first, count in sorted(runs[part.name, part.kind]):
                end = first + count if first == end else -1
            if end != part.first + part.tensor.numel():
                bad[name] = f"{planned.ref.manifest_key}: the shards do not hold all of {part.name} ({part.kind})"
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
    for _, shard in shards_of(plan):
        entries = index[shard.key]
        size = max((entry.offset + entry.nbytes for entry in entries), default=0)
        if size == 0:
            continue
        if assigned[shard.key] == rank:
            buffer = _packed(share.tensors.pop(shard.key), entries, size).to(device)
        else:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(buffer, src=assigned[shard.key])
        for entry in entries:
            fill(model, optimizer, entry.name, entry.kind, entry.first, _values(buffer, entry))


def _fill_alone(plan: RestorePlan, share: Share, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill straight from the bytes that were read: with nobody to broadcast to, nothing need be packed."""
    chunks = [
        (chunk, from_numpy(np.require(chunk.data, requirements="A"), chunk.dtype))
        for _, shard in shards_of(plan)
        for chunk in share.tensors.pop(shard.key)
    ]

    def fill_in(item: tuple[ShardTensor, Tensor]) -> None:
        chunk, values = item
        fill(model, optimizer, chunk.name, chunk.kind, chunk.first, values)

    with ThreadPoolExecutor(PARALLEL_READS) as pool:
        list(pool.map(fill_in, [item for item in chunks if item[0].kind != STEP]))
    for item in chunks:
        if item[0].kind == STEP:  # of a tensor that is split among layers every part has one: their order matters
            fill_in(item)


def _packed(tensors: list[ShardTensor], entries: list[Entry], size: int) -> Tensor:
    packed = np.empty(size, dtype=np.uint8)
    for tensor, entry in zip(tensors, entries, strict=True):
        packed[entry.offset : entry.offset + entry.nbytes] = tensor.data.view(np.uint8)
    return torch.from_numpy(packed)


def _values(buffer: Tensor, entry: Entry) -> Tensor:
    return buffer[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype))


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

    The model must hold the base version: codec `delta` decodes against it, before anything is filled.
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
