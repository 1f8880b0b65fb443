"""Blocks of an Arrow file: each in its own place, and never compressed."""

import struct
from dataclasses import replace
from random import Random

import pyarrow as pa
import pytest

from storage.arrow_file import Block, read_record_batch, record_batch_blocks
from storage.errors import CorruptObjectError
from storage.shard_format import SCHEMA
from storage.shard_reader import read_range, read_shard
from tests.fuzz.shards import KEY, honest
from tests.fuzz.targets import MemoryStore

BOMB_BYTES = 1 << 40
ROW = ("w", "param", "uint8", 0, 1 << 16, "raw", bytes(1 << 16))


def _blocks(data: bytes) -> list[Block]:
    return record_batch_blocks(KEY, pa.BufferReader(data), len(data))


def test_blocks_are_what_arrow_reads() -> None:
    data, _ = honest(Random(5)).file()
    reader = pa.ipc.open_file(pa.BufferReader(data))
    blocks = _blocks(data)
    assert len(blocks) == reader.num_record_batches > 1
    for number, block in enumerate(blocks):
        assert read_record_batch(KEY, pa.BufferReader(data), block, SCHEMA).equals(reader.get_batch(number))


def test_blocks_that_share_bytes_are_refused() -> None:
    data, digest = honest(Random(5)).file()
    first, second = (struct.pack("<q", block.offset) for block in _blocks(data)[:2])
    at = data.rindex(second)  # in the footer
    doubled = data[:at] + first + data[at + 8 :]
    for read in (
        lambda: read_shard(MemoryStore(KEY, doubled), KEY, len(doubled), digest),
        lambda: read_range(MemoryStore(KEY, doubled), KEY, len(doubled), "w0", "param", 0, 1),
    ):
        with pytest.raises(CorruptObjectError, match="separate parts"):
            read()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_file_is_refused_before_it_takes_memory(compression: str) -> None:
    data, digest = replace(honest(Random(5)), batches=[[ROW]]).file(compression)
    claimed = (1 << 16).to_bytes(8, "little")
    assert claimed in data
    bomb = data.replace(claimed, BOMB_BYTES.to_bytes(8, "little"))
    with pytest.raises(CorruptObjectError, match="compressed"):
        read_shard(MemoryStore(KEY, bomb), KEY, len(bomb), digest)
