"""What the ranks do together while one of them waits: short collectives, so that a dead rank is noticed at once."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from storage.actor_calls import patiently

STANDING_WAIT_S = 0.5
"""Longest wait between two collectives while training stands still."""

T = TypeVar("T")


def do_together(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Result of this rank's blocking `work`, when every rank's is done. `group` is a CPU group."""
    with ThreadPoolExecutor(1, thread_name_prefix="together") as pool:
        future = pool.submit(work)
        _wait_for_all(future, group)
        return future.result()


def _wait_for_all(future: Future[Any], group: dist.ProcessGroup | None) -> None:
    done = torch.zeros(1)
    while not done:
        wait([future], timeout=STANDING_WAIT_S)
        done.fill_(future.done())
        dist.all_reduce(done, dist.ReduceOp.MIN, group=group)


def ask_together(actor: Any, group: dist.ProcessGroup | None, method: str, *args: Any) -> Any:
    """Rank 0 calls the CheckpointActor and waits; every rank gets the answer. `group` is a CPU group."""
    asks = dist.get_rank() == 0
    box = [do_together(lambda: patiently(actor, method, *args) if asks else None, group)]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]
