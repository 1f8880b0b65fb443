"""WriterGroup: follows the ShardWriters and passes on what became of the shards."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ray

from storage.actor_setup import ActorSetup
from storage.errors import LayerCheckError
from storage.messages import WriterQuestion, WriterReport
from storage.records import VersionId
from storage.writer_actor import ensure_writer, find_writer, writer_name, writers_of_others

RESTART_WAIT_S = 1.0
POLL_S = 1.0
"""Longest wait of a ShardWriter for something new to tell."""
DRAIN_POLL_S = 0.05
"""The same while a worker group waits for its restore plan."""
PAUSE_S = 0.001
"""Least time between two questions to writers, on average over all of them."""


class Bookkeeper(Protocol):
    """Who is told what became of the shards."""

    def take(self, report: WriterReport) -> None:
        """Book what a writer tells."""
        ...

    def as_of(self) -> object:
        """Another object when more versions may be over than before."""
        ...

    def is_over(self, version: VersionId) -> bool:
        """Whether the writers may forget what is stored of `version`."""
        ...


@dataclass(frozen=True)
class _Held:
    """What a writer said it holds, when it was asked at `moment`."""

    moment: int
    pending: Mapping[VersionId, frozenset[int]]


class WriterGroup:
    """The ShardWriters of the nodes that have workers, and for a time those that others before left behind."""

    def __init__(self, setup: ActorSetup, uploads: Bookkeeper, give_up: Callable[[Exception], None]) -> None:
        self._setup, self._uploads, self._give_up = setup, uploads, give_up
        self._nodes: dict[str, str] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._left_behind: set[str] = set()
        self._heard: dict[str, _Heard] = {}
        self._held: dict[str, _Held] = {}
        self._followed: dict[str, Any] = {}
        self._epoch = self._draining = 0
        self._turn = asyncio.Lock()
        self.moment = 0
        """Counts questions to writers: what happened at a moment, a writer asked later takes into account."""
        self.changed_at = 0
        """Moment at which a writer last turned out to have been started anew, or was first heard of."""
        self.in_doubt = False
        """Set while somebody needs to know which shards the writers still hold."""

    def open(self, epoch: int) -> None:
        """From now on `epoch` asks."""
        self._epoch = epoch

    @property
    def names(self) -> dict[str, str]:
        """Actor name of each node's writer."""
        return dict(self._nodes)

    def follow(self, nodes: Iterable[str]) -> None:
        """The writers of `nodes`, started where they do not live, are what ranks hand over to from now on.

        Those of other nodes are left behind: they start nothing new, but what they have accepted may yet count.
        """
        self._nodes = {node: writer_name(self._setup.run_id, self._setup.driver, node) for node in nodes}
        wanted = set(self._nodes.values()) | self._left_behind
        for name in set(self._followers) - wanted:
            self._forsake(name)
            self._leave_behind(name)
        for node, name in self._nodes.items():
            if name in self._left_behind:  # its node has workers again
                self._left_behind.discard(name)
                self._forsake(name)
            if name not in self._followers:
                self._spawn(name, partial(self._follow, name, node))

    async def inherit(self) -> None:
        """Follow what writers of drivers before this one still live: what they have accepted may yet count."""
        setup = self._setup
        for name in await asyncio.to_thread(writers_of_others, setup.run_id, setup.driver):
            if name not in self._followers:
                self._leave_behind(name)

    def _leave_behind(self, name: str) -> None:
        self._left_behind.add(name)
        self._spawn(name, partial(self._follow_left_behind, name))

    def end_left_behind(self) -> None:
        """What they hold counts no more, and they have no other master: end them."""
        for name in list(self._left_behind):
            self._forsake(name)
            self._heard.pop(name, None)
            _end(name)
        self._left_behind.clear()

    def pending_ranks(self, version: VersionId) -> set[int]:
        """Ranks whose shards of `version` the writers hold and have not stored yet, as far as they have said."""
        return {rank for held in self._held.values() for rank in held.pending.get(version, ())}

    def all_heard_since(self, moment: int) -> bool:
        """Whether every writer has said what it holds when it was asked after `moment`."""
        heard = [self._held.get(name) for name in self._followers]
        return all(held is not None and held.moment > moment for held in heard)

    async def drain(self, is_settled: Callable[[], bool], timeout_s: float) -> None:
        """Wait until no writer has anything on its way and `is_settled`, at most `timeout_s`."""
        moment, deadline = self.moment, time.monotonic() + timeout_s
        self._draining += 1
        try:
            self.nudge()
            while time.monotonic() < deadline:
                pending = any(held.pending for held in self._held.values())
                if self.all_heard_since(moment) and not pending and is_settled():
                    return
                await asyncio.sleep(0.02)
        finally:
            self._draining -= 1

    def nudge(self) -> None:
        """Somebody waits for what the writers hold: they store it as fast as possible, and answer at once."""
        for writer in self._followed.values():
            writer.nudge.remote()

    async def check_token(self, token: str) -> None:
        """Raise `StoreError` unless every writer sees the object that holds `token`."""
        for node in self._nodes:
            try:
                await (await self._writer(node)).check_token.remote(token)
            except ray.exceptions.RayTaskError as error:  # its text is a traceback; the cause's is one line
                raise (error.cause if isinstance(error.cause, LayerCheckError) else error) from None

    def kill(self) -> None:
        """End the writers of this driver, and no others."""
        for follower in self._followers.values():
            follower.cancel()
        for name in self._nodes.values():
            _end(name)

    async def _writer(self, node: str) -> Any:
        setup = self._setup
        return await asyncio.to_thread(
            ensure_writer,
            setup.storage,
            setup.run,
            writer_name(setup.run_id, setup.driver, node),
            node,
            setup.faults,
        )

    def _spawn(self, name: str, following: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await following()
            except Exception as error:  # noqa: BLE001 - without its follower no shard becomes durable
                self._give_up(error)

        self._followers[name] = asyncio.get_running_loop().create_task(guarded())

    def _forsake(self, name: str) -> None:
        follower = self._followers.pop(name, None)
        if follower is not None:
            follower.cancel()
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._held.pop(name, None)
        self._followed.pop(name, None)

    async def _follow(self, name: str, node: str) -> None:
        while True:
            # Ends when it is being restarted, or its node is lost.
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                await self._listen(name, await self._writer(node))
            self._forget(name)
            await asyncio.sleep(RESTART_WAIT_S)

    async def _follow_left_behind(self, name: str) -> None:
        # A restarted one has lost what it held, and one of other code cannot be understood.
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            await self._listen(name, await asyncio.to_thread(find_writer, name))
        self._left_behind.discard(name)
        self._followers.pop(name, None)
        self._heard.pop(name, None)
        self._forget(name)

    async def _listen(self, name: str, writer: Any) -> None:
        self._followed[name] = writer
        heard = self._heard.setdefault(name, _Heard(self._uploads))
        while True:
            self.moment += 1
            moment = self.moment
            report: WriterReport = await writer.poll.remote(self._question(heard))
            if report.life != heard.life:
                self.changed_at = self.moment
                self._held.pop(name, None)
            async with self._turn:  # one report at a time, and other work between any two
                heard.take(report)
                await asyncio.sleep(0)
            if report.pending is not None:
                self._held[name] = _Held(moment, report.pending)
            # However many writers there are, together they cost the CheckpointActor no more than one every so often.
            await asyncio.sleep(PAUSE_S * len(self._followers))

    def _question(self, heard: "_Heard") -> WriterQuestion:
        is_draining = self._draining > 0
        return WriterQuestion(
            epoch=self._epoch,
            life=heard.life,
            seen=heard.last,
            over=heard.over(),
            wait_s=DRAIN_POLL_S if is_draining else POLL_S,
            tell_pending=is_draining or self.in_doubt,
        )


class _Heard:
    """How far the present life of a writer was heard, and what it may forget; outlives who listens to it."""

    def __init__(self, uploads: Bookkeeper) -> None:
        self.life, self.last = "", 0
        self._uploads = uploads
        self._stored: set[VersionId] = set()
        """Versions that it keeps shards of."""
        self._over: frozenset[VersionId] = frozenset()
        self._as_of: object = None

    def over(self) -> frozenset[VersionId]:
        """Versions that it may forget; said again until there is an answer."""
        if self._as_of is not self._uploads.as_of():
            self._as_of = self._uploads.as_of()
            self._over |= {version for version in self._stored if self._uploads.is_over(version)}
        return self._over

    def take(self, report: WriterReport) -> None:
        """Pass on what the answer tells."""
        if report.life != self.life:
            self._stored.clear()
        self._stored -= self._over
        self._over = frozenset()
        self._stored.update(stored.version for stored in report.stored)
        self.life, self.last = report.life, report.last
        self._uploads.take(report)


def _end(name: str) -> None:
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.kill(find_writer(name))
