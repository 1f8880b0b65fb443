"""What a run recorded of its ticks: per-layer sums, decisions, and what became durable. Kept as long as the run.

A segment is an Arrow IPC file of one record batch, a row a tick. The schema metadata holds whose it is, the names of
the trained layers, and a digest over these and the batch. An epoch's segments lie in a folder of its own, and a
fenced epoch stores none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage import keys
from storage.arrow_file import parsing, read_record_batch, record_batch_blocks
from storage.errors import CorruptObjectError, ObjectNotFoundError
from storage.messages import LayerSums
from storage.object_store import ObjectStore
from storage.records import NonNegative, Stored, digest_of

LARGEST_SEGMENT_BYTES = 64 << 20
"""No segment is larger; an object that is has not been written by this project."""

META_KEY = b"layercheck.meta"
DIGEST_KEY = b"layercheck.digest"

Array = npt.NDArray[np.float64]


def _fields(**types: pa.DataType) -> list[pa.Field]:
    return [pa.field(name, of_type, nullable=False) for name, of_type in types.items()]


_INT, _FLOAT = pa.int64(), pa.float64()
_SUMS = pa.struct(_fields(**dict.fromkeys(LayerSums._fields, _FLOAT)))
_DURABLE = pa.struct(_fields(layer=pa.string(), step=_INT, bytes=_INT, seconds=_FLOAT))
SCHEMA = pa.schema(
    [
        *_fields(attempt=_INT, step=_INT, restore_point=_INT, held=pa.bool_(), flush=pa.bool_(), seconds=_FLOAT),
        pa.field("loss", _FLOAT),
        pa.field("step_seconds", _FLOAT),
        pa.field("chosen", pa.list_(pa.field("layer", pa.string(), nullable=False)), nullable=False),
        pa.field("durable", pa.list_(pa.field("version", _DURABLE, nullable=False)), nullable=False),
        pa.field("sums", pa.list_(pa.field("layer", _SUMS, nullable=False)), nullable=False),
    ]
)
"""`sums` has an entry for each trained layer, in the order of the metadata's `layers`."""


@dataclass(frozen=True)
class Durable:
    """A layer version whose shards were all stored; `seconds` since the epoch's start."""

    layer: str
    step: int
    bytes: int
    seconds: float


class LayerTable(Mapping[str, LayerSums]):
    """Sums of a tick by layer, kept as one array ([layers, 3]): there may be very many ticks."""

    def __init__(self, rows: Mapping[str, int], array: Array) -> None:
        """`rows` tells each layer's row; it is shared by all ticks."""
        self._rows, self.array = rows, array

    def __getitem__(self, layer: str) -> LayerSums:
        return LayerSums(*self.array[self._rows[layer]].tolist())

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One report of rank 0, and what was decided on it."""

    epoch: int
    attempt: int
    step: int
    seconds: float
    """Since the epoch's start."""
    loss: float | None = None
    step_seconds: float | None = None
    restore_point: int = 0
    """Step of the committed restore point when the report came."""
    held: bool = False
    """Training stood still until the restore point moved."""
    flush: bool = False
    """Training was over."""
    sums: Mapping[str, LayerSums]
    """Of each trained layer, as reported: before what is carried out at this step has become the reference."""
    chosen: tuple[str, ...] = ()
    """Layers ordered at this tick; their snapshot is taken at the next one."""
    durable: tuple[Durable, ...] = ()
    """Since the tick before."""


@dataclass(frozen=True)
class History:
    """Ticks of a run, oldest first, and what is wrong with the segments that had to be left out."""

    ticks: list[Tick] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class SegmentMeta(Stored):
    """Whose segment it is, and of which trained layers."""

    format_version: Literal[1] = 1
    epoch: NonNegative
    seq: NonNegative
    layers: tuple[str, ...]


def read_history(store: ObjectStore) -> History:
    """Everything that the run in `store` has recorded; a damaged segment is left out and named.

    Raises:
        StoreError: the store failed.
    """
    history = History()
    for info in store.list(keys.HISTORY):
        try:
            if info.bytes > LARGEST_SEGMENT_BYTES:
                raise CorruptObjectError(
                    f"{info.key}: expected at most {LARGEST_SEGMENT_BYTES} bytes, got {info.bytes}; delete it"
                )
            history.ticks.extend(decode_segment(info.key, store.read(info.key)))
        except ObjectNotFoundError:
            continue  # the run has been deleted since the listing
        except CorruptObjectError as error:
            history.problems.append(str(error))
    return history


def encode_segment(meta: SegmentMeta, ticks: Sequence[Tick]) -> bytes:
    """The object that `decode_segment` reads; the same ticks give the same bytes."""
    table = np.concatenate([_array_of(tick.sums, meta.layers) for tick in ticks])
    sums = pa.StructArray.from_arrays([*np.ascontiguousarray(table.T)], fields=list(_SUMS))
    offsets = pa.array(np.arange(len(ticks) + 1, dtype=np.int32) * len(meta.layers))
    columns: dict[str, Any] = {
        name: [getattr(tick, name) for tick in ticks] for name in SCHEMA.names if name not in ("durable", "sums")
    }
    columns["durable"] = [[vars(version) for version in tick.durable] for tick in ticks]
    arrays = [pa.array(columns[name], SCHEMA.field(name).type) for name in columns]
    arrays.append(pa.ListArray.from_arrays(offsets, sums, type=SCHEMA.field("sums").type))
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    described = meta.to_bytes()
    digest = _digest(described, batch.serialize())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA.with_metadata({META_KEY: described, DIGEST_KEY: digest})) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def decode_segment(key: str, data: bytes) -> list[Tick]:
    """Ticks of the segment stored at `key`.

    Raises:
        CorruptObjectError: it is not what `encode_segment` made for this key.
    """
    source = pa.BufferReader(data)
    with parsing(key, "a history segment"):
        schema = pa.ipc.open_file(source).schema
        metadata = schema.metadata or {}
        if not schema.equals(SCHEMA) or metadata.keys() != {META_KEY, DIGEST_KEY}:
            raise CorruptObjectError(f"{key}: columns or metadata are not those of history format 1; delete it")
        blocks = record_batch_blocks(key, source, len(data))
        stored = [data[block.offset : block.offset + block.bytes] for block in blocks]
        digest = _digest(metadata[META_KEY], b"".join(stored))
        if digest != metadata[DIGEST_KEY] or len(blocks) != 1:
            raise CorruptObjectError(f"{key}: its content is not what its digest says; delete it")
        meta = SegmentMeta.from_bytes(key, metadata[META_KEY])
        if key != keys.history(meta.epoch, meta.seq):
            raise CorruptObjectError(f"{key}: expected segment {meta.seq} of epoch {meta.epoch} under this name")
        return _ticks(meta, read_record_batch(key, source, blocks[0], SCHEMA))


def _digest(meta: bytes, batch: bytes | pa.Buffer) -> bytes:
    return digest_of(len(meta).to_bytes(8, "little") + meta + bytes(batch)).encode()


def _array_of(sums: Mapping[str, LayerSums], layers: Sequence[str]) -> Array:
    """Shape [layers, 3]."""
    return sums.array if isinstance(sums, LayerTable) else np.array([sums[name] for name in layers]).reshape(-1, 3)


def _ticks(meta: SegmentMeta, batch: pa.RecordBatch) -> list[Tick]:
    """Raises `ValueError` or `TypeError` where a row makes no sense."""
    rows = {layer: row for row, layer in enumerate(meta.layers)}
    columns = dict(zip(SCHEMA.names, batch.columns, strict=True))
    if len(rows) != len(meta.layers) or any(columns[f.name].null_count for f in SCHEMA if not f.nullable):
        raise ValueError("a layer is named twice, or a field is missing")
    tables = _tables(columns.pop("sums"), batch.num_rows, len(rows))
    ticks = []
    for values, table in zip(
        zip(*(column.to_pylist() for column in columns.values()), strict=True), tables, strict=True
    ):
        fields = dict(zip(columns, values, strict=True))
        versions = tuple(Durable(**version) for version in fields.pop("durable"))
        tick = Tick(
            epoch=meta.epoch,
            sums=LayerTable(rows, table),
            chosen=tuple(fields.pop("chosen")),
            durable=versions,
            **fields,
        )
        _check(tick, rows)
        ticks.append(tick)
    return ticks


def _tables(sums: pa.ListArray, count: int, layers: int) -> Array:
    """Shape [count, layers, 3]."""
    flat = sums.flatten()
    parts = flat.flatten()
    lengths = sums.value_lengths().to_numpy(zero_copy_only=False)
    if flat.null_count or any(part.null_count for part in parts) or (lengths != layers).any():
        raise ValueError(f"expected the sums of {layers} layers in each row")
    array: Array = np.stack([part.to_numpy() for part in parts], axis=1).reshape(count, layers, 3)
    return array


def _check(tick: Tick, layers: Mapping[str, int]) -> None:
    """Numbers of a tick that readers count on; sums and losses may be any, as training may have gone wrong."""
    counts = [tick.attempt, tick.step, tick.restore_point]
    seconds = [tick.seconds]
    for version in tick.durable:
        counts += (version.step, version.bytes)
        seconds.append(version.seconds)
    named = {*tick.chosen, *(version.layer for version in tick.durable)}
    if min(counts) < 0 or not named <= layers.keys():
        raise ValueError(f"step {tick.step}: a negative number, or a layer that is not trained")
    if any(not math.isfinite(at) or at < 0 for at in seconds):
        raise ValueError(f"step {tick.step}: expected seconds since the epoch's start")
