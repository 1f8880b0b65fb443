"""ShardWriters and who listens to them, in the test's own process."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray

from storage.encoding import RAW
from storage.messages import FailedShard, ShardOrder, StoredShards, WriterReport
from storage.quantize import Floats
from storage.records import VersionId
from storage.shard_format import ShardMeta, ShardTensor
from storage.writer_actor import ShardWriter
from storage.writer_group import WriterGroup


async def accept_shard(
    writer: ShardWriter, meta: ShardMeta, values: Floats, *, first: int = 0, spread_s: float | None = None
) -> None:
    """Hand a shard of `values` over, elements from `first` on of a parameter `w`."""
    tensor = ShardTensor("w", "param", "float32", first, values.size, values)
    await writer.accept(ShardOrder(meta=meta, ranges=(), encoding=RAW, spread_s=spread_s), [tensor], [])


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it is true; whoever calls sets a limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Taken:
    """Keeps what the writers tell. Versions in `over` may be forgotten."""

    def __init__(self) -> None:
        self.stored: list[StoredShards] = []
        self.failed: list[FailedShard] = []
        self.over: set[VersionId] = set()

    def shards(self) -> int:
        """Shards told to be stored, each as often as it was told."""
        return sum(len(stored.entries) for stored in self.stored)

    def take(self, report: WriterReport) -> None:
        """See `storage.writer_group.Bookkeeper`."""
        self.stored += report.stored
        self.failed += report.failed

    def as_of(self) -> object:
        """See `storage.writer_group.Bookkeeper`."""
        return object()

    def is_over(self, version: VersionId) -> bool:
        """See `storage.writer_group.Bookkeeper`."""
        return version in self.over


class Dead:
    """What is left of an actor whose node is lost."""

    def __getattr__(self, name: str) -> Any:
        async def called(*_: Any) -> None:
            raise ray.exceptions.ActorDiedError

        return called


class Called:
    """An object of this process, called as a Ray actor is."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def die(self) -> None:
        """From now on every call fails."""
        self.actor = Dead()

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self.actor, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


class LocalGroup(WriterGroup):
    """A group whose writers live here, by node."""

    called: dict[str, Called]
    ended_left_behind = False

    def silence(self) -> None:
        """Listen to nobody any more: who listened is dead."""
        for follower in self._followers.values():
            follower.cancel()

    async def inherit(self) -> None:
        """No driver before this one has left a writer."""

    def end_left_behind(self) -> None:
        """Remember that it was called."""
        self.ended_left_behind = True

    async def _writer(self, node: str) -> Any:
        return self.called[node]
