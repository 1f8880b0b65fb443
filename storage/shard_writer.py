"""Writes shards, see `storage.shard_format`: streaming, encoded a record batch at a time, raw rows without a copy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage.codecs import Base, codec_named
from storage.encoding import RAW, Encoding
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
    encoding: Encoding = RAW,
    base: Base | None = None,
    after_batch: Callable[[float], None] = lambda _: None,
) -> ShardSummary:
    """Store `tensors` as a shard under `key`; durable on return, invisible after an exception.

    A chunk is stored raw where its codec has no place for it or does not make it smaller. `after_batch` is called when
    a record batch has been written, with the share of the elements' bytes that is written.

    Raises:
        StoreError: the store failed.
        ValueError: two tensors have the same name and kind, or `encoding` needs a base and there is none.
    """
    batches = _plan(tensors)
    index = _index(tensors, batches)
    meta_bytes, index_bytes = meta.to_bytes(), index.to_bytes()
    checksums = Checksums(meta_bytes, index_bytes)
    schema = SCHEMA.with_metadata({META_KEY: meta_bytes, INDEX_KEY: index_bytes})
    with store.open_writer(key) as stream:
        # No `with`: closing the writer on the way out of an exception would give the torn file a valid footer.
        writer = pa.ipc.new_file(stream, schema)
        unflushed = done = 0
        total = sum(piece.bytes for batch in batches for piece in batch)
        for batch in batches:
            encoded = [_encoded(piece, encoding, base) for piece in batch]
            writer.write_batch(_record_batch(batch, encoded, schema, checksums))
            done += sum(piece.bytes for piece in batch)
            after_batch(done / total if total else 1.0)
            unflushed += sum(len(payload) for _, payload in encoded)
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


def _encoded(piece: _Piece, encoding: Encoding, base: Base | None) -> tuple[str, memoryview]:
    """Codec and payload of a row."""
    tensor, first = piece.tensor, piece.tensor.first + piece.start
    name = encoding.codec_of(tensor.kind)
    if name == CODEC_RAW:
        return name, piece.payload
    codec, values = codec_named(name), tensor.data[piece.start : piece.start + piece.length]
    if codec.needs_base and base is None:
        raise ValueError(f"{tensor.name}: {name} needs the base version, got none")
    payload = codec.encode(
        values, tensor.dtype, base(tensor.name, first, piece.length) if base and codec.needs_base else None
    )
    if payload is None or len(payload) >= piece.bytes:
        return CODEC_RAW, piece.payload
    return name, memoryview(payload)


def _record_batch(
    batch: list[_Piece], encoded: list[tuple[str, memoryview]], schema: pa.Schema, checksums: Checksums
) -> pa.RecordBatch:
    rows: list[tuple[str, str, str, int, int, str]] = []
    sums: list[int] = []
    for piece, (codec, payload) in zip(batch, encoded, strict=True):
        tensor = piece.tensor
        row = (tensor.name, tensor.kind, tensor.dtype, tensor.first + piece.start, piece.length, codec)
        rows.append(row)
        sums.append(checksums.of_row(*row, payload))
        checksums.add(sums[-1])
    columns = [pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), SCHEMA, strict=False)]
    payloads = _column([payload for _, payload in encoded])
    return pa.RecordBatch.from_arrays([*columns, payloads, pa.array(sums, pa.uint64())], schema=schema)


def _column(payloads: list[memoryview]) -> pa.Array:
    """The payload column: zero-copy for a single row, else one joined copy of at most `BATCH_BYTES`."""
    joined = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    offsets = np.cumsum([0, *(len(payload) for payload in payloads)], dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(payloads), [None, pa.py_buffer(offsets), pa.py_buffer(joined)])
