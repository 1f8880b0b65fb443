"""Draining the ShardWriters: a worker group that waits for its restore plan waits for uploads, and for nothing else."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from storage import writer_group
from storage.encoding import RAW
from storage.messages import ShardOrder, ShardOutcome
from storage.shard_format import ShardMeta, ShardTensor
from storage.writer_actor import ShardWriter
from storage.writer_group import ShardKey, WriterGroup
from tests.helpers.records import actor_setup

FOR_EVER_S = 3600.0
META = ShardMeta(run="r", layer="a", step=1, optimizer_step=1, epoch=1, attempt=1, rank=0, world_size=1)


class _Called:
    """A ShardWriter of this process, called as an actor is."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._writer, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


class _Group(WriterGroup):
    """A group whose one writer lives here."""

    called: _Called

    async def _writer(self, node: str) -> Any:
        return self.called


@pytest.mark.parametrize("uploads", [0, 1, 9])
def test_draining_waits_for_uploads_but_neither_for_a_poll_nor_for_their_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uploads: int
) -> None:
    monkeypatch.setattr(writer_group, "POLL_S", FOR_EVER_S)
    setup = actor_setup(tmp_path)
    taken: list[ShardOutcome] = []
    problems: list[Exception] = []

    def take(outcome: ShardOutcome) -> ShardKey:
        taken.append(outcome)
        return outcome.version, outcome.rank

    async def drain() -> None:
        writer = ShardWriter(setup.storage, setup.run, ())
        group = _Group(setup, take, problems.append)
        group.called = _Called(writer)
        group.follow(["node"])
        await asyncio.sleep(0.1)  # its second poll waits for news now, for ever
        for rank in range(uploads):
            tensor = ShardTensor("w", "param", "float32", 0, 1 << 20, np.zeros(1 << 20, "<f4"))
            meta = META.model_copy(update={"rank": rank, "world_size": uploads})
            order = ShardOrder(meta=meta, ranges=(), encoding=RAW, spread_s=FOR_EVER_S if rank else 0.0)
            await writer.accept(order, [tensor], [])
        if uploads > 1:
            await asyncio.sleep(0.2)
            assert len(taken) <= 2, "nothing was spread: a test of nothing"
        await group.drain(lambda: True, FOR_EVER_S)
        assert len(taken) == uploads
        assert not group.pending()

    asyncio.run(asyncio.wait_for(drain(), 60))
    assert problems == []
