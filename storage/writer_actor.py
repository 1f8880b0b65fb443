"""ShardWriter: the CheckpointActor's hands on one node. Stores accepted shards outside the training processes.

It is a detached Ray actor, so what it has accepted still lands when the training process, or the CheckpointActor, dies.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from storage import keys
from storage.codecs import base_of
from storage.errors import LayerCheckError
from storage.fault_points import FaultOptions, FaultPoints
from storage.finite import count_nonfinite
from storage.messages import FailedShard, ShardOrder, StoredShards, WriterQuestion, WriterReport
from storage.object_store import open_object_store
from storage.options import StorageOptions
from storage.pace import Pace, Window
from storage.probe import check_token
from storage.records import ShardRef, VersionId
from storage.shard_format import ShardTensor
from storage.shard_writer import write_shard

NAMESPACE = "layercheck"
PARALLEL_UPLOADS = 4
MOST_TOLD = 2048
"""Outcomes in one report: bounds how long the CheckpointActor is busy with it."""
ABANDONED_S = 600.0
"""A writer that was asked before, that no CheckpointActor has asked for this long, and that holds nothing, ends."""


@dataclass(frozen=True)
class _Outcome:
    """How storing a shard ended: `shard` when it is durable, else `problem`."""

    version: VersionId
    world_size: int
    shard: ShardRef | None = None
    problem: str = ""
    poisoned: bool = False


class ShardWriter:
    """Accepts shards, stores them, and keeps each outcome until it may forget it."""

    def __init__(self, storage: StorageOptions, run: str, faults: Sequence[FaultOptions]) -> None:
        self._store = open_object_store(storage, run)
        self._faults = FaultPoints(faults, "writer", self._store)
        self._pace = Pace()
        self._uploads = ThreadPoolExecutor(PARALLEL_UPLOADS, thread_name_prefix="upload")
        self._life = uuid.uuid4().hex
        self._pending: dict[VersionId, set[int]] = {}
        self._outcomes: dict[int, _Outcome] = {}
        """By number, in ascending order."""
        self._last = 0
        """Number of the newest outcome."""
        self._epoch = 0
        """The newest that has asked."""
        self._changed = asyncio.Event()
        self._last_poll = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def check_token(self, token: str) -> None:
        """Prove that this node sees the store that the CheckpointActor sees.

        Raises:
            StoreError: it does not.
        """
        await asyncio.to_thread(check_token, self._store, token)

    async def accept(self, order: ShardOrder, tensors: Sequence[ShardTensor], base: Sequence[ShardTensor]) -> None:
        """Take a shard over and return at once. The tensors are views of Ray's object store, not copies.

        `base`: the base version of the same elements of the parameters; nothing if `order.encoding` needs none.
        """
        self._pending.setdefault(order.meta.version, set()).add(order.meta.rank)
        window = self._pace.window(order.meta.step, order.spread_s)
        task = asyncio.get_running_loop().create_task(self._store_shard(order, tensors, base, window))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def poll(self, question: WriterQuestion) -> WriterReport:
        """Answer as soon as there is an outcome after those seen, or after the time that the question gives."""
        self._last_poll = time.monotonic()
        self._watch_for_abandonment()
        self._epoch = max(self._epoch, question.epoch)
        if question.life != self._life:
            return self._report(0, tell_pending=question.tell_pending)
        if question.epoch == self._epoch:
            self._forget(question.seen, question.over)
        self._changed.clear()
        if self._last == question.seen:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), question.wait_s)
        return self._report(question.seen, tell_pending=question.tell_pending)

    def _forget(self, seen: int, over: Set[VersionId]) -> None:
        self._outcomes = {
            number: outcome
            for number, outcome in self._outcomes.items()
            if (number > seen if outcome.shard is None else outcome.version not in over)
        }

    def _report(self, seen: int, *, tell_pending: bool) -> WriterReport:
        told = dict(islice((item for item in self._outcomes.items() if item[0] > seen), MOST_TOLD))
        last = max(told, default=self._last)
        stored: dict[VersionId, StoredShards] = {}
        failed = []
        for outcome in told.values():
            version, shard = outcome.version, outcome.shard
            if shard is None:
                failed.append(FailedShard(version=version, problem=outcome.problem, poisoned=outcome.poisoned))
                continue
            if version not in stored:
                stored[version] = StoredShards(version, outcome.world_size, {}, {})
            stored[version].entries[shard.rank] = shard.to_bytes()
            stored[version].sizes[shard.rank] = shard.bytes
        pending = None
        if tell_pending and last == self._last:
            pending = {version: frozenset(ranks) for version, ranks in self._pending.items()}
        return WriterReport(
            life=self._life, last=last, stored=tuple(stored.values()), failed=tuple(failed), pending=pending
        )

    async def nudge(self) -> None:
        """Somebody waits for what is held: store it as fast as possible, and let a `poll` that waits answer now."""
        self._pace.hurry()
        self._changed.set()

    def _watch_for_abandonment(self) -> None:
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._end_when_abandoned())

    async def _end_when_abandoned(self) -> None:
        while (quiet_s := time.monotonic() - self._last_poll) < ABANDONED_S or self._pending:  # noqa: ASYNC110
            await asyncio.sleep(max(1.0, ABANDONED_S - quiet_s))
        ray.kill(ray.get_runtime_context().current_actor)

    async def _store_shard(
        self, order: ShardOrder, tensors: Sequence[ShardTensor], base: Sequence[ShardTensor], window: Window
    ) -> None:
        version, rank = order.meta.version, order.meta.rank
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._uploads, self._store_blocking, order, tensors, base, window)
        self._last += 1
        self._outcomes[self._last] = outcome
        self._pending[version].discard(rank)
        if not self._pending[version]:
            del self._pending[version]
        self._changed.set()

    def _store_blocking(
        self, order: ShardOrder, tensors: Sequence[ShardTensor], base: Sequence[ShardTensor], window: Window
    ) -> _Outcome:
        version, rank, world_size = order.meta.version, order.meta.rank, order.meta.world_size
        strike = partial(self._faults.strike, step=version.step, attempt=version.attempt, rank=rank)

        def after_batch(share: float) -> None:
            strike("during_upload")
            if share < 1:  # else it is as good as stored
                window.wait(share)

        window.wait(0.0)
        outcome = _Outcome(version, world_size)
        try:
            for tensor in tensors:
                bad = count_nonfinite(tensor)
                if bad:
                    what = f"{bad} non-finite value(s) in {tensor.kind} of {tensor.name}"
                    problem = f"{version.layer} at step {version.step}: {what}; not stored over a good version"
                    return replace(outcome, problem=problem, poisoned=True)
            key = keys.shard(**version._asdict(), rank=rank, world_size=world_size)
            strike("before_upload")
            summary = write_shard(
                self._store,
                key,
                order.meta,
                tensors,
                order.encoding,
                base_of(base),
                after_batch=after_batch,
            )
            strike("after_upload")
        except LayerCheckError as error:
            return replace(outcome, problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the actor must hear of it rather than wait
            return replace(outcome, problem=f"{version.layer} at step {version.step}: {type(error).__name__}: {error}")
        shard = ShardRef(key=key, rank=rank, bytes=summary.bytes, digest=summary.digest, ranges=order.ranges)
        return replace(outcome, shard=shard)


def writer_name(run_id: str, driver: str, node_id: str) -> str:
    """Name of the ShardWriter of a run on a node, in `NAMESPACE`.

    Each driver has writers of its own: with its code, its credentials and its store options.
    """
    return f"writer:{run_id}:{driver}:{node_id}"


def writers_of_others(run_id: str, driver: str) -> list[str]:
    """Names of the ShardWriters of this run that drivers before `driver` have left behind."""
    named = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [
        name
        for name in named
        if name.startswith(writer_name(run_id, "", "")[:-1]) and not name.startswith(writer_name(run_id, driver, ""))
    ]


def find_writer(name: str) -> Any:
    """Handle of the ShardWriter `name`.

    Raises:
        ValueError: it does not live.
    """
    return ray.get_actor(name, namespace=NAMESPACE)


def ensure_writer(
    storage: StorageOptions, run: str, name: str, node_id: str, faults: Sequence[FaultOptions] = ()
) -> Any:
    """Handle of the ShardWriter `name` on a node; starts it if it does not live."""
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 1000,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    return ray.remote(ShardWriter).options(**options).remote(storage, run, faults)
