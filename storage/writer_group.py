"""WriterGroup: follows the ShardWriter of each node and passes on what became of the shards."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import ray

from storage.errors import LayerCheckError
from storage.fault_points import FaultOptions
from storage.messages import ShardOutcome, WriterReport
from storage.options import StorageOptions
from storage.records import VersionId
from storage.writer_actor import NAMESPACE, ensure_writer, writer_name

RESTART_WAIT_S = 1.0

ShardKey = tuple[VersionId, int]
"""A shard: its version and its rank."""


class WriterGroup:
    """The ShardWriters of the nodes that have workers."""

    def __init__(
        self,
        storage: StorageOptions,
        run: str,
        run_id: str,
        faults: Sequence[FaultOptions],
        take_outcome: Callable[[ShardOutcome], ShardKey | None],
        give_up: Callable[[Exception], None],
    ) -> None:
        """`take_outcome` books an outcome and returns its key once the writer may forget it."""
        self._storage, self._run, self._run_id, self._faults = storage, run, run_id, faults
        self._take_outcome, self._give_up = take_outcome, give_up
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, tuple[float, frozenset[ShardKey]]] = {}

    @property
    def names(self) -> dict[str, str]:
        """Actor name of each node's writer."""
        return {node: writer_name(self._run_id, node) for node in self._followers}

    def follow(self, nodes: Iterable[str]) -> None:
        """Follow the writers of `nodes`, starting those that do not live, and no others."""
        wanted = set(nodes)
        for node in set(self._followers) - wanted:
            self._followers.pop(node).cancel()
            self._held.pop(node, None)
        for node in wanted - set(self._followers):
            self._followers[node] = asyncio.get_running_loop().create_task(self._guarded(self._follow(node)))

    def pending(self) -> set[ShardKey]:
        """Shards that the writers hold and have not stored yet, as far as they were heard of."""
        return {key for _, pending in self._held.values() for key in pending}

    async def drain(self, is_settled: Callable[[], bool], timeout_s: float) -> None:
        """Wait until no writer has anything on its way and `is_settled`, at most `timeout_s`."""
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            heard = [self._held.get(node) for node in self._followers]
            if all(held is not None and held[0] >= began and not held[1] for held in heard) and is_settled():
                return
            await asyncio.sleep(0.02)

    async def check_token(self, token: str) -> None:
        """Raise `StoreError` unless every writer sees the object that holds `token`."""
        for node in self._followers:
            try:
                await (await self._writer(node)).check_token.remote(token)
            except ray.exceptions.RayTaskError as error:  # its text is a traceback; the cause's is one line
                raise (error.cause if isinstance(error.cause, LayerCheckError) else error) from None

    def kill(self) -> None:
        """End the writers."""
        for node, follower in self._followers.items():
            follower.cancel()
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(writer_name(self._run_id, node), namespace=NAMESPACE))

    async def _writer(self, node: str) -> Any:
        return await asyncio.to_thread(ensure_writer, self._storage, self._run, self._run_id, node, self._faults)

    async def _guarded(self, following: Awaitable[None]) -> None:
        try:
            await following
        except Exception as error:  # noqa: BLE001 - without its follower no shard becomes durable
            self._give_up(error)

    async def _follow(self, node: str) -> None:
        seen, forget = -1, list[ShardKey]()
        while True:
            asked = time.monotonic()
            try:
                report: WriterReport = await (await self._writer(node)).poll.remote(seen, forget)
            except (ray.exceptions.RayError, ValueError):  # it is being restarted, or its node is lost
                self._held.pop(node, None)
                seen, forget = -1, []
                await asyncio.sleep(RESTART_WAIT_S)
                continue
            seen = report.news
            forget = [key for key in map(self._take_outcome, report.outcomes) if key is not None]
            self._held[node] = (asked, report.pending)
