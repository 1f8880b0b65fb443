"""Listening to ShardWriters: each outcome is told once, and draining waits for uploads and for nothing else."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage import writer_actor, writer_group
from storage.messages import WriterQuestion, WriterReport
from storage.shard_format import ShardMeta
from storage.writer_actor import ShardWriter
from tests.helpers.records import actor_setup
from tests.helpers.writers import Called, LocalGroup, Taken, accept_shard, eventually

FOR_EVER_S = 3600.0
RANKS = 8


def meta(rank: int = 0, layer: str = "a") -> ShardMeta:
    return ShardMeta(run="r", layer=layer, step=1, optimizer_step=1, epoch=1, attempt=1, rank=rank, world_size=RANKS)


async def accept(
    writer: ShardWriter, which: ShardMeta, elements: int = 10, fill: float = 0.0, spread_s: float | None = None
) -> None:
    await accept_shard(writer, which, np.full(elements, fill, "<f4"), spread_s=spread_s)


def listening(folder: Path, body: Callable[[ShardWriter, LocalGroup, Taken], Awaitable[None]]) -> None:
    """Run `body` beside a group that listens to one writer."""

    async def run() -> None:
        setup = actor_setup(folder)
        taken, problems = Taken(), list[Exception]()
        writer, group = ShardWriter(setup.storage, setup.run, ()), LocalGroup(setup, taken, problems.append)
        group.called = {"node": Called(writer)}
        group.follow(["node"])
        await body(writer, group, taken)
        assert problems == []

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("uploads", [0, 1, RANKS])
def test_draining_waits_for_uploads_but_neither_for_a_poll_nor_for_their_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uploads: int
) -> None:
    monkeypatch.setattr(writer_group, "POLL_S", FOR_EVER_S)

    async def body(writer: ShardWriter, group: LocalGroup, taken: Taken) -> None:
        await asyncio.sleep(0.1)  # its second poll waits for news now, for ever
        for rank in range(uploads):
            await accept(writer, meta(rank), 1 << 20, spread_s=FOR_EVER_S if rank else 0.0)
        if uploads > 1:
            await asyncio.sleep(0.2)
            assert taken.shards() <= 2, "nothing was spread: a test of nothing"
        await group.drain(lambda: True, FOR_EVER_S)
        assert taken.shards() == uploads
        assert group.pending_ranks(meta().version) == set()

    listening(tmp_path, body)


def test_every_outcome_is_told_once_and_kept_until_its_version_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in every report made what 1,024 ranks store cost minutes."""
    monkeypatch.setattr(writer_actor, "MOST_TOLD", 3)

    async def body(writer: ShardWriter, group: LocalGroup, taken: Taken) -> None:
        told = list[WriterReport]()
        poll, all_stored = writer.poll, asyncio.Event()

        async def recorded(question: WriterQuestion) -> WriterReport:
            await all_stored.wait()  # more to tell than one report takes, but for what a question under way may get
            told.append(await poll(question))
            return told[-1]

        writer.poll = recorded  # type: ignore[method-assign]
        for layer in "ab":
            for rank in range(RANKS):
                await accept(writer, meta(rank, layer))
        await accept(writer, meta(0, "c"), fill=float("nan"))
        await eventually(lambda: len(writer._outcomes) == 2 * RANKS + 1)
        all_stored.set()
        await group.drain(lambda: len(taken.failed) == 1, FOR_EVER_S)
        ranks = [(stored.version.layer, rank) for stored in taken.stored for rank in stored.entries]
        assert sorted(ranks) == [(layer, rank) for layer in "ab" for rank in range(RANKS)]
        assert max(sum(len(s.entries) for s in report.stored) + len(report.failed) for report in told) == 3
        await group.drain(lambda: True, FOR_EVER_S)
        assert len(taken.failed) == 1
        assert await kept(writer) == {"a": RANKS, "b": RANKS}
        taken.over.add(meta(0, "a").version)
        await group.drain(lambda: True, FOR_EVER_S)
        await group.drain(lambda: True, FOR_EVER_S)  # what the first one learned, the second one tells
        assert await kept(writer) == {"b": RANKS}

    listening(tmp_path, body)


def test_what_a_writer_has_stored_and_not_told_does_not_look_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_actor, "MOST_TOLD", 3)

    async def body(writer: ShardWriter) -> None:
        question = WriterQuestion(epoch=1, wait_s=0.0, tell_pending=True)
        for rank in range(RANKS):
            await accept(writer, meta(rank))
        await eventually(lambda: len(writer._outcomes) > RANKS // 2)
        told = set[int]()
        while len(told) < RANKS:
            report = await writer.poll(question)
            told |= {rank for stored in report.stored for rank in stored.entries}
            pending = set() if report.pending is None else report.pending.get(meta().version, set())
            assert report.pending is None or told | pending == set(range(RANKS))
            question = replace(question, life=report.life, seen=report.last)

    alone(tmp_path, body)


def test_a_writer_forgets_nothing_for_a_stale_epoch(tmp_path: Path) -> None:
    """A failure that only a stale CheckpointActor has heard of would hold its layer up for ever."""

    async def body(writer: ShardWriter) -> None:
        new = WriterQuestion(epoch=2, wait_s=0.0)
        life = (await writer.poll(new)).life
        await accept(writer, meta(0))
        await accept(writer, meta(1), fill=float("nan"))
        await eventually(lambda: not writer._pending)
        stale = WriterQuestion(epoch=1, life=life, seen=2, over=frozenset({meta().version}), wait_s=0.0)
        await writer.poll(stale)
        report = await writer.poll(replace(new, life=life))
        assert [list(stored.entries) for stored in report.stored] == [[0]]
        assert len(report.failed) == 1
        await writer.poll(replace(stale, epoch=2))
        report = await writer.poll(new)
        assert (report.stored, report.failed) == ((), ())

    alone(tmp_path, body)


def alone(folder: Path, body: Callable[[ShardWriter], Awaitable[None]]) -> None:
    """Run `body` with a writer to which nobody listens."""

    async def run() -> None:
        setup = actor_setup(folder)
        await body(ShardWriter(setup.storage, setup.run, ()))

    asyncio.run(asyncio.wait_for(run(), 60))


async def kept(writer: ShardWriter) -> dict[str, int]:
    """Stored shards, by layer, that a CheckpointActor which has just started hears of."""
    found: dict[str, int] = {}
    question = WriterQuestion(epoch=0, wait_s=0.0)
    while True:
        report = await writer.poll(question)
        for stored in report.stored:
            found[stored.version.layer] = found.get(stored.version.layer, 0) + len(stored.entries)
        if not report.stored:
            return found
        question = WriterQuestion(epoch=0, life=report.life, seen=report.last, wait_s=0.0)


def test_a_new_life_of_a_writer_is_noticed_and_heard_from_its_beginning(tmp_path: Path) -> None:
    async def body(writer: ShardWriter, group: LocalGroup, taken: Taken) -> None:
        await accept(writer, meta(0))
        await eventually(lambda: len(taken.stored) == 1)
        moment, again = group.moment, ShardWriter(actor_setup(tmp_path).storage, "run", ())
        assert group.changed_at <= moment
        await accept(again, meta(1))
        await asyncio.sleep(0.1)
        taken.over.add(meta().version)  # outcome 1 of the life before may be forgotten, that of this one is another
        writer.poll = again.poll  # type: ignore[method-assign]
        await eventually(lambda: len(taken.stored) == 2)
        assert [list(stored.entries) for stored in taken.stored] == [[0], [1]]
        assert group.changed_at > moment
        group.in_doubt = True
        again._pending[meta().version] = {5}
        await eventually(lambda: group.pending_ranks(meta().version) == {5})

    listening(tmp_path, body)
