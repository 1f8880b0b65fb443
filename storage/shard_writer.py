"""Writes shards, see `storage.shard_format`: streaming, without a second copy of what is large."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage.object_store import ObjectStore
from storage.shard_format import (
    BATCH_BYTES,
    CODEC_RAW,
    DTYPES,
    INDEX_KEY,
    META_KEY,
    SCHEMA,
    Checksums,
    Chunk,
    ChunkIndex,
    ShardMeta,
    ShardSummary,
    ShardTensor,
    TensorIndex,
)

_ALONE_BYTES = 1 << 20  # chunks from here on get a batch of their own and are not copied
_FLUSH_BYTES = 64 << 20  # Arrow buffers uploads in the background without a limit of its own


@dataclass(frozen=True)
class _Piece:
    """Elements `[start, start + length)` of `tensor.data`: one row."""

    tensor: ShardTensor
    start: int
    length: int

    @property
    def bytes(self) -> int:
        return self.length * DTYPES[self.tensor.dtype].itemsize

    @property
    def payload(self) -> memoryview:
        data = self.tensor.data[self.start : self.start + self.length]
        return data.view(np.uint8).data


def write_shard(
    store: ObjectStore,
    key: str,
    meta: ShardMeta,
    tensors: Sequence[ShardTensor],
    after_batch: Callable[[], None] = lambda: None,
) -> ShardSummary:
    """Store `tensors` as a shard under `key`; durable on return, invisible after an exception.

    `after_batch` is called when a record batch has been written.

    Raises:
        StoreError: the store failed.
        ValueError: two tensors have the same name and kind.
    """
    batches = _plan(tensors)
    index = _index(tensors, batches)
    meta_bytes, index_bytes = meta.to_bytes(), index.to_bytes()
    checksums = Checksums(meta_bytes, index_bytes)
    schema = SCHEMA.with_metadata({META_KEY: meta_bytes, INDEX_KEY: index_bytes})
    with store.open_writer(key) as stream:
        # No `with`: closing the writer on the way out of an exception would give the torn file a valid footer.
        writer = pa.ipc.new_file(stream, schema)
        unflushed = 0
        for batch in batches:
            writer.write_batch(_encode(batch, schema, checksums))
            after_batch()
            unflushed += sum(piece.bytes for piece in batch)
            if unflushed >= _FLUSH_BYTES:
                stream.flush()
                unflushed = 0
        writer.close()
        written = stream.tell()
    return ShardSummary(written, checksums.digest())


def _plan(tensors: Sequence[ShardTensor]) -> list[list[_Piece]]:
    """Cut tensors into rows and group them into batches: large rows alone, small ones packed at the end."""
    large: list[list[_Piece]] = []
    packed: list[list[_Piece]] = []
    packed_bytes = 0
    for piece in (piece for tensor in tensors for piece in _cut(tensor)):
        if piece.bytes >= _ALONE_BYTES:
            large.append([piece])
            continue
        if not packed or packed_bytes + piece.bytes > BATCH_BYTES:
            packed.append([])
            packed_bytes = 0
        packed[-1].append(piece)
        packed_bytes += piece.bytes
    return large + packed


def _cut(tensor: ShardTensor) -> Iterator[_Piece]:
    longest = BATCH_BYTES // DTYPES[tensor.dtype].itemsize
    for start in range(0, max(tensor.count, 1), longest):
        yield _Piece(tensor, start, min(longest, tensor.count - start))


def _index(tensors: Sequence[ShardTensor], batches: list[list[_Piece]]) -> ChunkIndex:
    chunks: dict[tuple[str, str], list[Chunk]] = {(tensor.name, tensor.kind): [] for tensor in tensors}
    if len(chunks) != len(tensors):
        raise ValueError("two tensors of a shard have the same name and kind")
    for number, batch in enumerate(batches):
        for row, piece in enumerate(batch):
            tensor = piece.tensor
            chunk = Chunk(batch=number, row=row, first=tensor.first + piece.start, count=piece.length)
            chunks[tensor.name, tensor.kind].append(chunk)
    return ChunkIndex(
        tensors=tuple(
            TensorIndex(
                name=tensor.name,
                kind=tensor.kind,
                dtype=tensor.dtype,
                first=tensor.first,
                count=tensor.count,
                chunks=tuple(sorted(chunks[tensor.name, tensor.kind], key=lambda chunk: (chunk.first, chunk.batch))),
            )
            for tensor in tensors
        )
    )


def _encode(batch: list[_Piece], schema: pa.Schema, checksums: Checksums) -> pa.RecordBatch:
    rows: list[tuple[str, str, str, int, int, str]] = []
    sums: list[int] = []
    for piece in batch:
        tensor = piece.tensor
        row = (tensor.name, tensor.kind, tensor.dtype, tensor.first + piece.start, piece.length, CODEC_RAW)
        rows.append(row)
        sums.append(checksums.of_row(*row, piece.payload))
        checksums.add(sums[-1])
    columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), SCHEMA, strict=False)]
    return pa.RecordBatch.from_arrays([*columns, _payloads(batch), pa.array(sums, pa.uint64())], schema=schema)


def _payloads(batch: list[_Piece]) -> pa.Array:
    """The payload column: zero-copy for a single row, else one joined copy of at most `BATCH_BYTES`."""
    payloads = [piece.payload for piece in batch]
    joined = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    offsets = np.cumsum([0, *(len(payload) for payload in payloads)], dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(batch), [None, pa.py_buffer(offsets), pa.py_buffer(joined)])
