"""Shards to damage, and forged ones: checksums and digest are right, the rest is whatever the forger likes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pyarrow as pa

from storage.shard_format import DTYPES, INDEX_KEY, META_KEY, SCHEMA, Checksums, ShardMeta
from tests.fuzz.mutations import distorted

KEY = "layers/block.0/0000000007/00000001.000002/00001of00003.arrow"
META = ShardMeta(run="r", layer="block.0", step=7, optimizer_step=8, epoch=1, attempt=2, rank=1, world_size=3)

Row = tuple[str, str, str, int, int, str, bytes]
Facts = list[tuple[str, str, str, int, int, bytes]]
"""Of each tensor: name, kind, dtype, first, count, the elements' bytes."""


@dataclass(frozen=True)
class Forgery:
    """Everything a shard's file is made of."""

    meta: bytes
    index: bytes
    batches: list[list[Row]]

    def file(self, compression: str | None = None, column: tuple[str, pa.DataType] | None = None) -> tuple[bytes, str]:
        """The file and its digest; `column` replaces the type of one column."""
        checksums = Checksums(self.meta, self.index)
        schema = SCHEMA
        if column is not None:
            schema = schema.set(schema.get_field_index(column[0]), pa.field(*column, nullable=False))
        schema = schema.with_metadata({META_KEY: self.meta, INDEX_KEY: self.index})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            for rows in self.batches:
                sums = [checksums.of_row(*row[:6], memoryview(row[6])) for row in rows]
                for checksum in sums:
                    checksums.add(checksum)
                columns = [*zip(*rows, strict=True), sums] if rows else [[] for _ in SCHEMA]
                arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
                cast = [array.cast(f.type) for array, f in zip(arrays, schema, strict=True)]
                writer.write_batch(pa.RecordBatch.from_arrays(cast, schema=schema))
        return sink.getvalue().to_pybytes(), checksums.digest()

    def facts(self) -> Facts:
        """What a reader that accepts the file must find in it."""
        return [
            (
                *(tensor[field] for field in ("name", "kind", "dtype", "first", "count")),
                b"".join(self.batches[c["batch"]][c["row"]][6] for c in tensor["chunks"]),
            )
            for tensor in json.loads(self.index)["tensors"]
        ]


def honest(rng: Random) -> Forgery:
    """A shard as a writer might have made it, in small batches."""
    batches: list[list[Row]] = [[] for _ in range(rng.randrange(1, 4))]
    tensors: list[dict[str, Any]] = []
    for number in range(rng.randrange(1, 5)):
        dtype = rng.choice(list(DTYPES))
        name, kind = f"w{number}", rng.choice(("param", "exp_avg", "step", "buffer"))
        first = position = rng.choice((0, 100, 2**40))
        chunks = []
        for _ in range(rng.randrange(1, 4)):
            count = rng.randrange(6)
            payload = rng.randbytes(count * DTYPES[dtype].itemsize)
            batch = rng.randrange(len(batches))
            chunks.append({"batch": batch, "row": len(batches[batch]), "first": position, "count": count})
            batches[batch].append((name, kind, dtype, position, count, "raw", payload))
            position += count
        fields = {"name": name, "kind": kind, "dtype": dtype, "first": first, "count": position - first}
        tensors.append({**fields, "chunks": chunks})
    return Forgery(META.to_bytes(), json.dumps({"tensors": tensors}).encode(), batches)


def forged(rng: Random) -> tuple[Forgery, bytes, str]:
    """A forgery, its file and its digest."""
    shard = honest(rng)
    compression = column = None
    match rng.randrange(7):
        case 0:
            shard = Forgery(shard.meta, distorted(rng, shard.index), shard.batches)
        case 1:
            shard = Forgery(distorted(rng, shard.meta), shard.index, shard.batches)
        case 2:
            shard = Forgery(shard.meta, shard.index, _shuffled(rng, shard.batches))
        case 3:
            shard = Forgery(shard.meta, shard.index, [_shuffled(rng, rows) for rows in shard.batches])
        case 4:
            shard = Forgery(shard.meta, shard.index, [[_bent(rng, row) for row in rows] for rows in shard.batches])
        case 5:
            compression = rng.choice(("lz4", "zstd"))
        case _:
            column = rng.choice((("payload", pa.large_binary()), ("name", pa.large_string()), ("name", pa.binary())))
    return shard, *shard.file(compression, column)


def _shuffled(rng: Random, items: Sequence[Any]) -> list[Any]:
    """Some of the items, some more than once, in any order."""
    kept = list(items)
    for _ in range(rng.choice((0, 1, 1, 2))):
        match rng.randrange(3):
            case 0 if kept:
                kept.append(rng.choice(kept))
            case 1 if kept:
                kept.pop(rng.randrange(len(kept)))
            case _:
                rng.shuffle(kept)
    return kept


def _bent(rng: Random, row: Row) -> Row:
    fields: list[Any] = list(row)
    if rng.random() < 0.5:
        place = rng.randrange(len(fields))
        if isinstance(fields[place], int):
            fields[place] = rng.choice((fields[place] + 1, 0, -1, 2**62, 2**63 - 1, -(2**63)))
        elif isinstance(fields[place], str):
            fields[place] = rng.choice(("", "w0", "param", "float64", "zip", "x" * 100_000, "ä\0\n"))
        else:
            fields[place] = rng.choice((b"", fields[place][1:], fields[place] + b"x", bytes(100_000)))
    return tuple(fields)
