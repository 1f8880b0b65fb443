"""Snapshots: a layer's slices, copied at one step, as what a ShardWriter takes.

They are handed over in a thread of their own. On a CPU the put into Ray's object store, there, is the copy, and the
training thread waits for it before the next optimizer step. On a GPU a side stream copies into reused pinned buffers;
the next optimizer step waits for that copy, the training thread does not.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from storage.shard_format import ShardTensor
from workers.state import BUFFER, StateTensor, dtype_name, to_numpy

HandOver = Callable[[list[ShardTensor]], None]


class Snapshotter:
    """Takes snapshots of live tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = _PinnedCopier(device) if device.type == "cuda" else None
        self._hand_overs = ThreadPoolExecutor(1, thread_name_prefix="hand-over")
        self._running: list[Future[None]] = []

    def take(self, snapshots: Iterable[tuple[Sequence[StateTensor], HandOver]]) -> None:
        """Call each `hand_over`, in another thread, with a copy of its tensors as they are now.

        On a CPU it is given the live tensors and makes the copy. What it raises is raised by a later call.
        """
        works = [self._prepared(tensors, hand_over) for tensors, hand_over in snapshots]
        self._take_results([future for future in self._running if future.done()])
        # Only now: the first one under way would keep the interpreter from this thread.
        self._running += [self._hand_overs.submit(work) for work in works]

    def _prepared(self, tensors: Sequence[StateTensor], hand_over: HandOver) -> Callable[[], None]:
        # A forward pass may change buffers.
        steady = [part._replace(tensor=part.tensor.clone()) if part.kind == BUFFER else part for part in tensors]
        if self._cuda is not None:
            return self._cuda.copying(steady, hand_over)
        return lambda: hand_over([_shard_tensor(part, part.tensor) for part in steady])

    def before_optimizer_step(self) -> None:
        """Let no copy read what the optimizer is about to change."""
        if self._cuda is None:
            self._take_results(list(self._running))
        else:
            self._cuda.before_optimizer_step()

    def close(self) -> None:
        """Wait for the copies under way."""
        self._hand_overs.shutdown()
        self._take_results(list(self._running))

    def _take_results(self, futures: Sequence[Future[None]]) -> None:
        for future in futures:
            self._running.remove(future)
            future.result()


class _PinnedCopier:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None
        self._free: list[Tensor] = []

    def copying(self, tensors: Sequence[StateTensor], hand_over: HandOver) -> Callable[[], None]:
        """Start to copy; returns what waits for the copy and hands it over."""
        sizes = [-(-part.tensor.nbytes // 16) * 16 for part in tensors]
        buffer = self._buffer(sum(sizes))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies, first = [], 0
        with torch.cuda.stream(self._stream):
            for part, size in zip(tensors, sizes, strict=True):
                copy = buffer[first : first + part.tensor.nbytes].view(part.tensor.dtype)
                copy.copy_(part.tensor, non_blocking=True)
                if part.kind == BUFFER:  # a clone, which nobody else holds
                    part.tensor.record_stream(self._stream)
                copies.append(_shard_tensor(part, copy))
                first += size
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)
        return partial(self._finish, self._copied, buffer, copies, hand_over)

    def before_optimizer_step(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _buffer(self, size: int) -> Tensor:
        """Smallest free pinned buffer that holds `size` bytes, or a new one."""
        fitting = sorted((b for b in self._free if b.numel() >= size), key=Tensor.numel)
        if fitting:
            self._free = [b for b in self._free if b is not fitting[0]]
            return fitting[0]
        return torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)

    def _finish(self, copied: torch.cuda.Event, buffer: Tensor, copies: list[ShardTensor], hand_over: HandOver) -> None:
        copied.synchronize()
        hand_over(copies)
        self._free.append(buffer)


def on_host(part: StateTensor) -> ShardTensor:
    """`part` as it is now; on a CPU a view of it, not a copy."""
    return _shard_tensor(part, part.tensor.cpu())


def _shard_tensor(part: StateTensor, values: Tensor) -> ShardTensor:
    return ShardTensor(
        name=part.name,
        kind=part.kind,
        dtype=dtype_name(values),
        first=part.first,
        count=values.numel(),
        data=to_numpy(values),
    )
