"""Hand-over of snapshots to the node's ShardWriter, without waiting for it."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import torch.distributed as dist

from storage.encoding import Encoding
from storage.messages import Order, ShardOrder
from storage.shard_format import ShardMeta, ShardTensor
from storage.writer_actor import find_writer
from workers.faults import FaultInjector
from workers.slices import Slice


class HandOvers:
    """Gives one rank's shards to the ShardWriter, and finds out which of them it did not get."""

    def __init__(
        self,
        writer_name: str,
        run: str,
        slices: Mapping[str, Slice],
        encoding: Encoding,
        base: Mapping[str, ray.ObjectRef[list[ShardTensor]]],
        node_bytes: Mapping[str, int],
        faults: FaultInjector,
    ) -> None:
        """`base` holds, if `encoding` needs it, what this rank owns of each layer's base version.

        `node_bytes`: bytes of each layer that all ranks of this node own.
        """
        self._writer_name, self._run, self._slices, self._faults = writer_name, run, slices, faults
        self._encoding, self._base, self._node_bytes = encoding, base, node_bytes
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._writer: Any = None
        self._under_way: deque[tuple[str, ray.ObjectRef[None] | None]] = deque()
        self._unacknowledged: Counter[str] = Counter()

    def expect(self, layers: Iterable[str]) -> None:
        """Snapshots of `layers` are taken and will be given, later and from another thread."""
        self._unacknowledged.update(layers)

    @property
    def unacknowledged(self) -> set[str]:
        """Layers of which this rank does not know yet whether the writer has accepted its shard."""
        return set(self._unacknowledged)

    def give(self, order: Order, layer: str, step: int, tensors: list[ShardTensor]) -> None:
        """Put the snapshot of `layer` at `step` into Ray's object store and offer it to the writer.

        It runs in another thread than `failed`.
        """
        meta = ShardMeta(
            run=self._run,
            layer=layer,
            step=step,
            optimizer_step=step,
            epoch=order.epoch,
            attempt=order.attempt,
            rank=self._rank,
            world_size=self._world_size,
        )
        spread_s = order.spread_of(sum(tensor.data.nbytes for tensor in tensors), self._node_bytes)
        ranges = self._slices[layer].ranges
        shard = ShardOrder(meta=meta, ranges=ranges, encoding=self._encoding, spread_s=spread_s)
        put = ray.put(tensors)
        self._faults.strike("hand_over", step)
        try:
            self._writer = writer = self._writer or find_writer(self._writer_name)  # `failed` may forget it meanwhile
            self._under_way.append((layer, writer.accept.remote(shard, put, self._base.get(layer, ()))))
        except ValueError:  # the writer is not there at this moment
            self._under_way.append((layer, None))

    def failed(self) -> set[str]:
        """Layers whose shard the writer did not get, each told once."""
        failed = set()
        given = [self._under_way.popleft() for _ in range(len(self._under_way))]
        answered = _ready([accepted for _, accepted in given if accepted is not None])
        for layer, accepted in given:
            if accepted is not None and accepted not in answered:
                self._under_way.append((layer, accepted))
                continue
            self._unacknowledged -= Counter([layer])
            try:
                if accepted is None:
                    failed.add(layer)
                else:
                    ray.get(accepted)
            except ray.exceptions.RayError:
                failed.add(layer)
        if failed:
            self._writer = None
        return failed


def _ready(refs: list[ray.ObjectRef[None]]) -> set[ray.ObjectRef[None]]:
    """Those of `refs` that are there, asked for at once."""
    return set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
