"""Shard format v1: one rank's slice of one layer at one step, as an Arrow IPC file.

Every row is one *chunk*: a run of consecutive elements of one tensor. A record batch carries at most `BATCH_BYTES` of
elements; `storage.codecs` tells how they become a payload. The schema metadata holds who wrote the shard (`ShardMeta`)
and where every chunk is (`ChunkIndex`), so that a range is read without a scan. A row's checksum covers all its fields
and the metadata; the shard's digest covers the metadata and all row checksums in order.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pydantic import Field, model_validator

from storage.records import NonNegative, Stored, VersionId

BATCH_BYTES = 8 << 20
"""Largest size of the elements in one record batch, and so of its payload."""

CODEC_RAW = "raw"

MAX_EXPANSION = 64
"""Largest ratio of a chunk's elements to its payload: bounds what a file of a given size can make a reader allocate."""

META_KEY = b"layercheck.meta"
INDEX_KEY = b"layercheck.chunks"

DTYPES: Mapping[str, "np.dtype[np.generic]"] = {
    name: np.dtype(little_endian)
    for name, little_endian in {
        "float64": "<f8",
        "float32": "<f4",
        "float16": "<f2",
        "bfloat16": "<u2",  # numpy has none: its bits travel as uint16
        "int64": "<i8",
        "int32": "<i4",
        "int16": "<i2",
        "int8": "i1",
        "uint8": "u1",
        "bool": "?",
    }.items()
}
"""numpy type that carries each of torch's types, by torch's name."""

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
        pa.field("codec", pa.string(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)


@dataclass(frozen=True, eq=False)
class ShardTensor:
    """Elements `[first, first + count)` of one flattened tensor."""

    name: str
    """Name of the parameter or buffer it belongs to."""

    kind: str
    """`param`, `buffer`, or the optimizer state's own name, e.g. `exp_avg`."""

    dtype: str
    """torch's name of the element type, a key of `DTYPES`."""

    first: int
    count: int

    data: npt.NDArray[np.generic]
    """Shape (count,), C-contiguous, of type `DTYPES[dtype]`; may be read-only."""

    def __post_init__(self) -> None:
        expected = DTYPES.get(self.dtype)
        if expected is None:
            raise ValueError(
                f"{self.name} ({self.kind}): dtype {self.dtype!r} cannot be stored, only {', '.join(DTYPES)}"
            )
        if self.data.shape != (self.count,) or self.data.dtype != expected or not self.data.flags.c_contiguous:
            raise ValueError(
                f"{self.name} ({self.kind}): expected contiguous {expected} of shape ({self.count},) for {self.dtype}, "
                f"got {self.data.dtype} of shape {self.data.shape}"
            )
        if self.first < 0:
            raise ValueError(f"{self.name} ({self.kind}): first element must not be negative, got {self.first}")


class ShardMeta(Stored):
    """Who wrote a shard, and of what."""

    format_version: Literal[1] = 1
    run: str
    layer: str
    step: NonNegative
    optimizer_step: NonNegative
    epoch: NonNegative
    attempt: NonNegative
    rank: NonNegative
    world_size: Annotated[int, Field(ge=1)]

    @property
    def version(self) -> VersionId:
        """The layer version that the shard is a part of."""
        return VersionId(layer=self.layer, step=self.step, epoch=self.epoch, attempt=self.attempt)


@dataclass(frozen=True, eq=False)
class Shard:
    """What a shard holds."""

    meta: ShardMeta
    tensors: tuple[ShardTensor, ...]


@dataclass(frozen=True)
class ShardSummary:
    """What a manifest needs to know of a stored shard."""

    bytes: int
    digest: str


class Chunk(Stored):
    """Where elements `[first, first + count)` of a tensor are."""

    batch: NonNegative
    row: NonNegative
    first: NonNegative
    count: NonNegative


class TensorIndex(Stored):
    """One tensor and its chunks, in order and without gaps; an empty tensor has one empty chunk."""

    name: str
    kind: str
    dtype: str
    first: NonNegative
    count: NonNegative
    chunks: Annotated[tuple[Chunk, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _chunks_are_the_tensor(self) -> Self:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        position = self.first
        for chunk in self.chunks:
            if chunk.first != position:
                raise ValueError(f"{self.name}: expected a chunk at element {position}, got {chunk.first}")
            position += chunk.count
        if position != self.first + self.count:
            raise ValueError(f"{self.name}: chunks hold {position - self.first} elements, expected {self.count}")
        return self

    @property
    def bytes(self) -> int:
        """Size of the elements."""
        return self.count * DTYPES[self.dtype].itemsize


class ChunkIndex(Stored):
    """All tensors of a shard."""

    tensors: tuple[TensorIndex, ...]

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        names = [(tensor.name, tensor.kind) for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError("a tensor is listed twice")
        chunks = [(chunk.batch, chunk.row) for tensor in self.tensors for chunk in tensor.chunks]
        if len(set(chunks)) != len(chunks):
            raise ValueError("a row is listed twice")
        return self


class Checksums:
    """Checksums of one shard; what they cover is said at the top of this module."""

    def __init__(self, meta: bytes, index: bytes) -> None:
        """Take the metadata exactly as it is stored."""
        self._seed = xxhash.xxh3_128_digest(len(meta).to_bytes(8, "little") + meta + index)
        self._digest = xxhash.xxh3_128(self._seed)

    def of_row(self, name: str, kind: str, dtype: str, first: int, count: int, codec: str, payload: memoryview) -> int:
        """XXH3-64 of the metadata, the fields and `payload`."""
        fields = json.dumps([name, kind, dtype, first, count, codec]).encode()
        hasher = xxhash.xxh3_64(self._seed + len(fields).to_bytes(8, "little") + fields)
        hasher.update(payload)
        return hasher.intdigest()

    def add(self, checksum: int) -> None:
        """Count in the checksum of the next row, in the order in which rows are stored."""
        self._digest.update(checksum.to_bytes(8, "little"))

    def digest(self) -> str:
        """XXH3-128 of the metadata and of the checksums added so far, in hexadecimal."""
        return self._digest.hexdigest()
