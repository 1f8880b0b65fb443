"""Recorder: keeps what the CheckpointActor hears and decides at each tick, and stores it in segments."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from storage import keys
from storage.assembly import Assembly
from storage.catalog import Catalog
from storage.history import Durable, LayerTable, SegmentMeta, Tick, encode_segment
from storage.messages import Report
from storage.records import LayerFacts
from storage.store_health import StoreHealth

SEGMENT_S = 60.0
"""Time between two segments: what dies with the actor."""
SEGMENT_SUMS = 1 << 17
"""A segment is stored early when it holds the sums of so many layers: 3 MB."""


class Recorder:
    """Taking a tick down is an append; encoding and storing happen in a thread."""

    def __init__(self, catalog: Catalog, health: StoreHealth) -> None:
        self._catalog, self._health = catalog, health
        self._began = time.monotonic()
        self._epoch = self._seq = 0
        self._rows: dict[str, int] = {}
        self._ticks: list[Tick] = []
        self._durable: list[Durable] = []
        self._full = asyncio.Event()
        self._storing: asyncio.Task[None] | None = None

    def open(self, epoch: int) -> None:
        """What follows was heard and decided by `epoch`."""
        self._epoch, self._began = epoch, time.monotonic()

    def tick(self, report: Report, trained: Sequence[LayerFacts], restore_point: int, chosen: tuple[str, ...]) -> None:
        """`report` has come, and `chosen` was decided on it. `trained`: whose sums it tells, the same all the time."""
        if len(self._rows) != len(trained):
            self._rows = {fact.name: row for row, fact in enumerate(trained)}
        durable, self._durable = tuple(self._durable), []
        tick = Tick(
            epoch=self._epoch,
            attempt=report.attempt,
            step=report.step,
            seconds=time.monotonic() - self._began,
            loss=report.loss,
            step_seconds=report.step_seconds,
            restore_point=restore_point,
            held=report.hold,
            flush=report.flush,
            sums=LayerTable(self._rows, report.sums),
            chosen=chosen,
            durable=durable,
        )
        self._ticks.append(tick)
        if len(self._ticks) * len(self._rows) >= SEGMENT_SUMS:
            self._full.set()

    def stored(self, assembly: Assembly) -> None:
        """All shards of a version are stored."""
        seconds, version = time.monotonic() - self._began, assembly.version
        self._durable.append(Durable(version.layer, version.step, assembly.bytes, seconds))

    async def run_forever(self) -> None:
        """Store a segment now and then.

        Raises:
            FencedError: a newer epoch has been claimed.
            StoreError: the store has failed for too long.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), SEGMENT_S)
            self._full.clear()
            if segment := self._take():
                self._storing = asyncio.create_task(self._health.retrying(self._put, *segment))
                await asyncio.shield(self._storing)  # whoever cancels this, `close` waits for the segment

    async def close(self) -> None:
        """Store what is left, without patience; what is being stored comes first.

        Raises:
            FencedError: a newer epoch has been claimed.
            StoreError: it could not be stored.
        """
        if self._storing and not self._storing.done():
            await self._storing
        if segment := self._take():
            await asyncio.to_thread(self._put, *segment)

    def _take(self) -> tuple[SegmentMeta, list[Tick]] | None:
        """What is to be the next segment; it is never taken, or stored, again under another number."""
        if not self._ticks:
            return None
        ticks, self._ticks = self._ticks, []
        meta = SegmentMeta(epoch=self._epoch, seq=self._seq, layers=tuple(self._rows))
        self._seq += 1
        return meta, ticks

    def _put(self, meta: SegmentMeta, ticks: list[Tick]) -> None:
        self._catalog.check_fence(meta.epoch)
        self._catalog.store.put(keys.history(meta.epoch, meta.seq), encode_segment(meta, ticks))
