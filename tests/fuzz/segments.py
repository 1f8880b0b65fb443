"""Segments of a run's history to damage, and forged ones: the digest is right, the rest is what the forger likes."""

from random import Random
from typing import Any

import pyarrow as pa

from storage import keys
from storage.history import DIGEST_KEY, META_KEY, SCHEMA, _digest, decode_segment, encode_segment
from storage.records import Stored
from tests.fuzz.mutations import distorted
from tests.helpers.history import plain, segment

KEY = keys.history(1, 0)
META, TICKS = segment()
DATA = encode_segment(META, TICKS)
_RIGHT = plain(TICKS)


def reads_right(data: bytes) -> bool:
    """Whether `data` is read as what was recorded.

    Raises:
        LayerCheckError: it is refused.
    """
    return plain(decode_segment(KEY, data)) == _RIGHT


def is_usable(data: bytes) -> bool:
    """Whether what is read of `data` can be used, and recorded again.

    Raises:
        LayerCheckError: it is refused.
    """
    ticks = decode_segment(KEY, data)
    if not ticks:
        return True
    for tick in ticks:
        assert all(tick.sums[layer] is not None for layer in tick.chosen)
        assert min(tick.step, tick.attempt, *(version.bytes for version in tick.durable), 0) == 0
    meta = META.model_copy(update={"layers": tuple(ticks[0].sums)})
    return plain(decode_segment(KEY, encode_segment(meta, ticks))) == plain(ticks)


def forged(rng: Random) -> bytes:
    """A segment that says anything."""
    rows = pa.ipc.open_file(pa.BufferReader(DATA)).read_all().to_pylist()
    meta, schema, compression, copies = Stored.to_bytes(META), SCHEMA, None, 1
    match rng.randrange(7):
        case 0:
            meta = distorted(rng, meta)
        case 1:
            rows = [row for row in rows for _ in range(rng.randrange(3))]
        case 2:
            compression = rng.choice(("lz4", "zstd"))
        case 3:
            copies = rng.choice((0, 2))
        case 4:
            name, of_type = rng.choice((("step", pa.int32()), ("loss", pa.float32()), ("attempt", pa.uint64())))
            schema = schema.set(schema.get_field_index(name), pa.field(name, of_type, nullable=name == "loss"))
        case _:
            for _ in range(rng.choice((1, 2))):
                _bend(rng, rows)
    arrays = [pa.array([row[f.name] for row in rows], f.type) for f in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    digest = _digest(meta, b"".join([bytes(batch.serialize())] * copies))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, schema.with_metadata({META_KEY: meta, DIGEST_KEY: digest}), options=options) as writer:
        for _ in range(copies):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _bend(rng: Random, rows: list[dict[str, Any]]) -> None:
    """Change one value somewhere; what may not be null becomes so, too."""
    row = rng.choice(rows)
    name = rng.choice(SCHEMA.names)
    value = row[name]
    if isinstance(value, list) and rng.random() < 0.7:
        if value and rng.random() < 0.5:
            value[rng.randrange(len(value))] = _bent(rng, value[0])
        elif value and rng.random() < 0.5:
            value.pop()
        else:
            value.append(_bent(rng, value[0] if value else None))
    else:
        row[name] = _bent(rng, value)


def _bent(rng: Random, value: Any) -> Any:
    if rng.random() < 0.1:
        return None
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((0, -1, value + 1, 2**31, 2**63 - 1, -(2**63)))
        case float():
            return rng.choice((float("nan"), float("inf"), -1.0, 1e300, 0.0))
        case str():
            return rng.choice(("", "block.9", "block.1", "x" * 100_000, "ä\0\n"))
        case dict():
            key = rng.choice(list(value))
            return value | {key: _bent(rng, value[key])}
        case _:
            return None
