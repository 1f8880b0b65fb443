"""Reads shards, see `storage.shard_format`. Stored bytes are not trusted, bounded before use, and never executed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.arrow_file import parsing, read_record_batch, record_batch_blocks
from storage.codecs import Base, Codec, Fill, codec_named, decode, open_payload
from storage.errors import CorruptObjectError, LayerCheckError
from storage.object_store import ObjectStore
from storage.shard_format import (
    BATCH_BYTES,
    CODEC_RAW,
    DTYPES,
    INDEX_KEY,
    MAX_EXPANSION,
    META_KEY,
    SCHEMA,
    Checksums,
    Chunk,
    ChunkIndex,
    Shard,
    ShardMeta,
    ShardTensor,
    TensorIndex,
)
from storage.store_common import translated

_LARGEST_READ = 4 * BATCH_BYTES  # nothing that a range read fetches at once (footer, batch) is larger


class _Row(NamedTuple):
    """A row whose checksum is right; `fields` are name, kind, dtype, first, count and codec."""

    fields: tuple[str, str, str, int, int, str]
    payload: pa.Buffer


_Rows = dict[tuple[int, int], _Row]


def read_shard(store: ObjectStore, key: str, bytes: int, digest: str, base: Base | None = None) -> Shard:
    """Read and verify a whole shard.

    `bytes` and `digest` are what its manifest says of the object `key`. `base` is needed for a shard of codec `delta`.

    Returns:
        The shard; arrays are read-only, and those of one chunk are views of the bytes read.

    Raises:
        ObjectNotFoundError: there is no such object.
        CorruptObjectError: it is not the shard that the manifest means, or was encoded against another base version.
        LayerCheckError: it needs a base, and there is none.
        StoreError: the store failed.
    """
    with _whole(store, key, bytes, digest) as (shard, rows):
        tensors = tuple(
            _join(key, tensor, [rows[chunk.batch, chunk.row] for chunk in tensor.chunks], tensor.chunks, base)
            for tensor in shard.index.tensors
        )
    return Shard(shard.meta, tensors)


@dataclass(frozen=True, eq=False)
class StoredChunk:
    """Elements `[first, first + count)` of one flattened tensor: verified, uncompressed, and yet to be decoded."""

    name: str
    kind: str
    dtype: str
    first: int
    count: int
    fill: Fill

    @property
    def bytes(self) -> int:
        """Size of the elements."""
        return self.count * DTYPES[self.dtype].itemsize


def read_chunks(
    store: ObjectStore, key: str, bytes: int, digest: str, base: Base | None = None
) -> tuple[ShardMeta, list[StoredChunk]]:
    """Read and verify a whole shard, as `read_shard`, but leave it to who knows the place to decode its chunks.

    `base` is asked when the shard is read, and again when its chunks are decoded.
    """
    with _whole(store, key, bytes, digest) as (shard, rows):
        chunks = [
            StoredChunk(
                tensor.name,
                tensor.kind,
                tensor.dtype,
                chunk.first,
                chunk.count,
                _opened(key, tensor, rows[chunk.batch, chunk.row], chunk, base),
            )
            for tensor in shard.index.tensors
            for chunk in tensor.chunks
        ]
    return shard.meta, chunks


def check_shard(store: ObjectStore, key: str, bytes: int, digest: str) -> None:
    """Read and verify a whole shard without decoding it, so without the base version that this may take.

    Raises:
        ObjectNotFoundError, CorruptObjectError, StoreError: as `read_shard`.
    """
    with _whole(store, key, bytes, digest) as (shard, rows):
        for tensor in shard.index.tensors:
            for chunk in tensor.chunks:
                _check_row(key, tensor, rows[chunk.batch, chunk.row], chunk)


@contextmanager
def _whole(store: ObjectStore, key: str, bytes: int, digest: str) -> Iterator[tuple["_OpenShard", _Rows]]:
    """All rows of a shard, verified, by (batch, row)."""
    with store.open_reader(key) as source:
        _check_size(source, key, bytes)
        with translated("read", key):
            buffer = source.read_buffer(bytes)
    if buffer.size != bytes:
        raise CorruptObjectError(f"{key}: expected {bytes} bytes, got {buffer.size}; the object is truncated")
    with parsing(key, "a shard"):
        shard = _OpenShard(key, pa.BufferReader(buffer), bytes)
        rows = [row for batch in shard.batches for row in shard.rows(batch)]
        if (found := shard.checksums.digest()) != digest:
            raise CorruptObjectError(f"{key}: expected digest {digest}, got {found}; the object is another one")
        places = [place for tensor in shard.index.tensors for place in tensor.chunks]
        if sorted((chunk.batch, chunk.row) for chunk in places) != shard.seen:
            raise CorruptObjectError(f"{key}: rows stored are not those of the chunk index")
        yield shard, dict(zip(shard.seen, rows, strict=True))


def read_range(
    store: ObjectStore, key: str, bytes: int, name: str, kind: str, first: int, count: int, base: Base | None = None
) -> Shard:
    """Read and verify elements `[first, first + count)` of one tensor, fetching only the batches that hold them.

    The digest cannot be checked without reading everything; the rows' checksums, which cover the shard's metadata,
    are, and the caller compares `meta` with what it expects. Whole chunks are decoded: `base` must know all elements of
    those that overlap the range.

    Returns:
        A shard with this part of this one tensor.

    Raises:
        ObjectNotFoundError, LayerCheckError, StoreError: as `read_shard`.
        CorruptObjectError: as `read_shard`, or the shard holds no such elements.
    """
    with store.open_reader(key) as source:
        _check_size(source, key, bytes)
        with parsing(key, "a shard"):
            shard = _OpenShard(key, pa.PythonFile(_BoundedFile(source, key, bytes), mode="r"), bytes)
            found = [tensor for tensor in shard.index.tensors if (tensor.name, tensor.kind) == (name, kind)]
            held = bool(found) and 0 <= first - found[0].first <= first - found[0].first + count <= found[0].count
        if not held:
            raise CorruptObjectError(
                f"{key} does not hold elements [{first}, {first + count}) of {name[:80]} ({kind[:80]})"
            )
        tensor = found[0]
        chunks = [c for c in tensor.chunks if c.first < first + count and first < c.first + c.count] or tensor.chunks[
            :1
        ]
        with parsing(key, "a shard"):
            read = {batch: list(shard.rows(batch)) for batch in sorted({chunk.batch for chunk in chunks})}
            rows = [read[chunk.batch][chunk.row] for chunk in chunks]
            part = _join(key, tensor, rows, tuple(chunks), base)
    start = max(first - part.first, 0) if count else 0
    return Shard(shard.meta, (ShardTensor(name, kind, tensor.dtype, first, count, part.data[start : start + count]),))


class _OpenShard:
    """A shard whose metadata is parsed and checked; its rows are checked one batch at a time."""

    def __init__(self, key: str, source: pa.NativeFile, size: int) -> None:
        self.key, self._source = key, source
        schema = pa.ipc.open_file(source).schema
        if not schema.equals(SCHEMA):
            raise CorruptObjectError(f"{key}: columns are not those of shard format 1")
        metadata = schema.metadata or {}
        if metadata.keys() != {META_KEY, INDEX_KEY}:
            raise CorruptObjectError(f"{key}: metadata is not that of shard format 1")
        self.meta = ShardMeta.from_bytes(key, metadata[META_KEY])
        self.index = ChunkIndex.from_bytes(key, metadata[INDEX_KEY])
        if (total := sum(tensor.bytes for tensor in self.index.tensors)) > size * MAX_EXPANSION:
            raise CorruptObjectError(f"{key}: the chunk index promises {total} bytes of elements in a file of {size}")
        self._blocks = record_batch_blocks(key, source, size)
        self.checksums = Checksums(metadata[META_KEY], metadata[INDEX_KEY])
        self.seen: list[tuple[int, int]] = []

    @property
    def batches(self) -> range:
        """Numbers of the batches."""
        return range(len(self._blocks))

    def rows(self, number: int) -> Iterator[_Row]:
        """Rows of batch `number`, each verified by its checksum."""
        batch = read_record_batch(self.key, self._source, self._blocks[number], SCHEMA)
        if any(column.null_count for column in batch.columns):
            raise CorruptObjectError(f"{self.key}: batch {number} has null fields")
        *columns, payloads, checksums = batch.columns
        fields = zip(*(column.to_pylist() for column in columns), strict=True)
        found = zip(fields, _views(payloads), checksums.to_pylist(), strict=True)
        for place, (values, payload, checksum) in enumerate(found):
            row = _Row(values, payload)
            if self.checksums.of_row(*row.fields, memoryview(row.payload)) != checksum:
                raise CorruptObjectError(f"{self.key}: checksum of row {place} in batch {number} is wrong")
            self.checksums.add(checksum)
            self.seen.append((number, place))
            yield row


def _views(payloads: pa.BinaryArray) -> Iterator[pa.Buffer]:
    """Each payload as a view; an element taken from the array would be a copy."""
    _, offsets, data = payloads.buffers()
    bounds = np.frombuffer(offsets, np.int32)[payloads.offset :][: len(payloads) + 1].tolist()
    for start, end in pairwise(bounds):
        yield data.slice(start, end - start)


def _join(key: str, tensor: TensorIndex, rows: list[_Row], chunks: tuple[Chunk, ...], base: Base | None) -> ShardTensor:
    """Put the elements of consecutive chunks together."""
    parts = [_decoded(key, tensor, row, chunk, base) for row, chunk in zip(rows, chunks, strict=True)]
    data: npt.NDArray[np.generic] = parts[0] if len(parts) == 1 and parts[0].flags.aligned else np.concatenate(parts)
    data.flags.writeable = False
    return ShardTensor(tensor.name, tensor.kind, tensor.dtype, chunks[0].first, data.size, data)


def _decoded(key: str, tensor: TensorIndex, row: _Row, chunk: Chunk, base: Base | None) -> npt.NDArray[np.generic]:
    elements = _base_elements(key, tensor, row, chunk, base)
    values = elements() if elements else None
    return decode(memoryview(row.payload), row.fields[-1], tensor.dtype, chunk.count, values)


def _opened(key: str, tensor: TensorIndex, row: _Row, chunk: Chunk, base: Base | None) -> Fill:
    elements = _base_elements(key, tensor, row, chunk, base)
    return open_payload(memoryview(row.payload), row.fields[-1], tensor.dtype, chunk.count, elements)


def _base_elements(
    key: str, tensor: TensorIndex, row: _Row, chunk: Chunk, base: Base | None
) -> Callable[[], npt.NDArray[np.generic]] | None:
    """What gives the base's elements of a row, None if its codec needs none; raises unless the index says the same."""
    codec = _check_row(key, tensor, row, chunk)
    if codec is None or not codec.needs_base:
        return None
    if base is None:
        raise LayerCheckError(f"{key}: expected the base version to decode {codec.name}, got none; please report this")
    return partial(base, tensor.name, chunk.first, chunk.count)


def _check_row(key: str, tensor: TensorIndex, row: _Row, chunk: Chunk) -> Codec | None:
    """Raise unless the row is what the index says; returns its codec, None if it is `raw`."""
    *fields, name = row.fields
    expected = [tensor.name, tensor.kind, tensor.dtype, chunk.first, chunk.count]
    size = chunk.count * DTYPES[tensor.dtype].itemsize
    fits = row.payload.size == size if name == CODEC_RAW else size <= BATCH_BYTES
    if fields != expected or not fits:
        got = f"{str(row.fields)[:200]} with {row.payload.size} bytes"
        raise CorruptObjectError(f"{key}: expected row {str(expected)[:200]}, got {got}")
    return None if name == CODEC_RAW else codec_named(name)


def _check_size(source: pa.NativeFile, key: str, expected: int) -> None:
    with translated("read", key):
        size = source.size()
    if size != expected:
        raise CorruptObjectError(
            f"{key}: expected {expected} bytes, got {size}; the object is truncated or another one"
        )


class _BoundedFile:
    """What Arrow reads a range through: no read goes past the end or is larger than a shard ever needs."""

    closed = False

    def __init__(self, source: pa.NativeFile, key: str, size: int) -> None:
        self._source, self._key, self._size, self._position = source, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, count: int) -> pa.Buffer | bytes:
        count = min(count, self._size - self._position)
        if count <= 0:
            return b""
        if count > _LARGEST_READ:
            raise CorruptObjectError(f"{self._key}: a part claims {count} bytes, at most {_LARGEST_READ} are possible")
        with translated("read", self._key):
            self._source.seek(self._position)
            data = self._source.read(count)
        self._position += len(data)
        return data

    def close(self) -> None:
        """The source belongs to the caller."""
