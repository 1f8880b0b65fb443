"""A run's history: what was taken down is what is read; damage is told, and costs its segment alone."""

import asyncio
import math
import threading
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage import keys
from storage.catalog import Catalog
from storage.errors import CorruptObjectError, FencedError, StoreError
from storage.history import DIGEST_KEY, LayerTable, decode_segment, encode_segment, read_history
from storage.messages import Report
from storage.recorder import SEGMENT_SUMS, Recorder
from storage.store_health import StoreHealth
from tests.helpers.history import LAYERS, plain, segment
from tests.helpers.memory_store import MemoryStore
from tests.helpers.records import claim, facts, manifest

GOLDEN = Path(__file__).parents[2] / "golden" / "history_v1.arrow"
KEY = keys.history(1, 0)


def test_what_was_recorded_is_read() -> None:
    meta, ticks = segment()
    found = decode_segment(KEY, encode_segment(meta, ticks))
    assert plain(found) == plain(ticks)
    assert found[0].sums["embedding"].reference_sq == 7
    assert math.isnan(found[1].sums["block.0"].drift_sq)


def test_golden_v1_is_still_read() -> None:
    assert plain(decode_segment(KEY, GOLDEN.read_bytes())) == plain(segment()[1])


def test_every_flipped_bit_is_noticed_or_harmless() -> None:
    meta, ticks = segment()
    data = encode_segment(meta, ticks)
    right, noticed = plain(ticks), 0
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        try:
            assert plain(decode_segment(KEY, bytes(flipped))) == right
        except CorruptObjectError:
            noticed += 1
    assert noticed > len(data) // 2
    for length in range(0, len(data), 7):
        with pytest.raises(CorruptObjectError):
            decode_segment(KEY, data[:length])


def test_a_damaged_segment_is_left_out_and_named() -> None:
    store = MemoryStore()
    for epoch, seq in ((2, 0), (1, 0), (1, 1), (1, 2)):
        store.put(keys.history(epoch, seq), encode_segment(*segment(epoch, seq)))
    damaged, renamed = keys.history(1, 0), keys.history(1, 2)
    store.objects[damaged] = store.objects[damaged][:-9]
    store.objects[renamed] = store.objects[keys.history(1, 1)]
    history = read_history(store)
    assert [tick.epoch for tick in history.ticks] == [1] * 4 + [2] * 4
    assert [problem.split(":")[0] for problem in history.problems] == [damaged, renamed]


def report(step: int, layers: int = len(LAYERS)) -> Report:
    return Report(attempt=1, step=step, sums=np.full((layers, 3), float(step)), loss=1.0)


def recorder(store: MemoryStore) -> Recorder:
    made = Recorder(Catalog(store), StoreHealth(60, lambda kind, what: None))
    made.open(4)
    return made


def test_the_recorder_keeps_order_and_what_became_durable_in_between() -> None:
    store = MemoryStore()

    async def record() -> None:
        recording = recorder(store)
        recording.tick(report(1), facts(*LAYERS), 0, ("block.0",))
        recording.stored(manifest("block.0", 2))
        recording.tick(report(2), facts(*LAYERS), 1, ())
        await recording.close()
        recording.tick(report(3), facts(*LAYERS), 2, ("block.1", "embedding"))
        await recording.close()
        await recording.close()

    asyncio.run(record())
    assert sorted(store.objects) == [keys.history(4, 0), keys.history(4, 1)]
    ticks = read_history(store).ticks
    assert [(t.epoch, t.step, t.restore_point, t.chosen) for t in ticks] == [
        (4, 1, 0, ("block.0",)),
        (4, 2, 1, ()),
        (4, 3, 2, ("block.1", "embedding")),
    ]
    ((version,),) = [t.durable for t in ticks if t.durable]
    assert (version.layer, version.step, version.bytes) == ("block.0", 2, manifest("block.0", 2).bytes)
    assert ticks[0].seconds <= version.seconds <= ticks[1].seconds
    assert ticks[2].sums["embedding"].drift_sq == 3.0


def test_a_fenced_epoch_stores_no_segment() -> None:
    """It wakes up after a newer one took over: the store stays as it is."""
    store = MemoryStore()
    for _ in range(5):  # epochs up to 5, one after the recorder's own
        Catalog(store).claim(claim(nonce=uuid.uuid4().hex))
    before = dict(store.objects)

    async def record() -> None:
        recording = recorder(store)
        recording.tick(report(1), facts(*LAYERS), 0, ())
        with pytest.raises(FencedError):
            await recording.close()

    asyncio.run(record())
    assert store.objects == before


def test_a_store_that_fails_for_a_while_costs_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And many sums are stored before their time."""
    monkeypatch.setattr("storage.store_health.RETRY_S", 0.01)
    failures: list[str] = []

    class Failing(MemoryStore):
        stored = threading.Event()

        def put(self, key: str, data: bytes) -> None:
            if len(failures) < 3:
                failures.append(key)
                raise StoreError("503")
            super().put(key, data)
            self.stored.set()

    store, layers = Failing(), 1 << 10

    async def record() -> None:
        recording = recorder(store)
        names = facts(*(f"l{number}" for number in range(layers)))
        storing = asyncio.create_task(recording.run_forever())
        for step in range(1, SEGMENT_SUMS // layers + 1):
            recording.tick(report(step, layers), names, 0, ())
        assert await asyncio.to_thread(store.stored.wait, 60)
        storing.cancel()

    asyncio.run(record())
    assert failures == [keys.history(4, 0)] * 3
    assert [tick.step for tick in read_history(store).ticks] == list(range(1, SEGMENT_SUMS // layers + 1))


def test_closing_waits_for_the_segment_that_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its minute was over when the run was, and whoever stored it has been cancelled."""
    monkeypatch.setattr("storage.recorder.SEGMENT_S", 0.01)

    class Slow(MemoryStore):
        asked, goes_on = threading.Event(), threading.Event()

        def put(self, key: str, data: bytes) -> None:
            self.asked.set()
            assert self.goes_on.wait(60)
            super().put(key, data)

    store = Slow()

    async def record() -> None:
        recording = recorder(store)
        recording.tick(report(1), facts(*LAYERS), 0, ())
        storing = asyncio.create_task(recording.run_forever())
        assert await asyncio.to_thread(store.asked.wait, 60)
        storing.cancel()
        closing = asyncio.create_task(recording.close())
        done, _ = await asyncio.wait([closing, storing], timeout=0.2)
        assert done == {storing}, "it closed before the segment was stored"
        store.goes_on.set()
        await closing

    asyncio.run(record())
    assert [tick.step for tick in read_history(store).ticks] == [1]


def test_a_segment_has_room_for_one_batch_only() -> None:
    data = encode_segment(*segment())
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        batch = reader.get_batch(0)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, reader.schema) as writer:
            writer.write_batch(batch)
            writer.write_batch(batch)
        assert DIGEST_KEY in reader.schema.metadata
    with pytest.raises(CorruptObjectError, match="digest"):
        decode_segment(KEY, sink.getvalue().to_pybytes())


def test_sums_of_a_tick_are_a_mapping() -> None:
    table = LayerTable({"a": 0, "b": 1}, np.arange(6.0).reshape(2, 3))
    assert dict(table) == {"a": (0.0, 1.0, 2.0), "b": (3.0, 4.0, 5.0)}
    assert (len(table), list(table)) == (2, ["a", "b"])
