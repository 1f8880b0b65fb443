"""What is fed with hostile bytes, and what must come out: the right data, or an error of ours in one line."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from app.status import status_of
from storage import keys
from storage.catalog import Catalog
from storage.codecs import codec_named
from storage.errors import CorruptObjectError, LayerCheckError, ObjectNotFoundError
from storage.liveness import read_life
from storage.records import EpochClaim, EpochLife, Manifest, Record, Sealed, Stored, digest_of
from storage.retention import Kept
from storage.shard_format import DTYPES, Shard, ShardMeta
from storage.shard_reader import read_range, read_shard
from storage.store_common import ObjectInfo
from tests.fuzz import segments
from tests.fuzz.mutations import damaged, distorted
from tests.fuzz.shards import KEY, META, Facts, Forgery, forged, honest
from tests.helpers.records import golden_documents, ref

_CODECS = ("planes", "blocks-4x256", "blocks-8x64", "roots-8x256", "roots-2x8", "delta-4x256", "delta-8x8")
GOLDEN = Path(__file__).parents[1] / "golden"
LONGEST_MESSAGE = 1000


class Case(NamedTuple):
    """One hostile input: `read` returns normally if it finds the right data, and raises `WrongDataError` if not."""

    target: str
    data: bytes
    read: Callable[[], None]


class WrongDataError(Exception):
    """A reader returned something that was never written."""


class MemoryStore:
    """An object store of one object."""

    url = "memory"

    def __init__(self, key: str, data: bytes) -> None:
        self._key, self._data = key, data

    def open_reader(self, key: str) -> pa.NativeFile:
        return pa.BufferReader(self.read(key))

    def read(self, key: str) -> bytes:
        if key != self._key:
            raise ObjectNotFoundError(f"cannot read {key}: no such object")
        return self._data

    def size(self, key: str) -> int:
        return len(self.read(key))

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [ObjectInfo(self._key, len(self._data))] if self._key.startswith(prefix) else []


def outcome(case: Case) -> str:
    """`right` or `refused`.

    Raises:
        Exception: anything else: a violation.
    """
    try:
        case.read()
    except LayerCheckError as error:
        message = str(error)
        if "\n" in message or len(message) > LONGEST_MESSAGE:
            raise WrongDataError(
                f"expected one short line, got {len(message)} characters: {message[:200]!r}"
            ) from error
        return "refused"
    return "right"


def _require(found: object, expected: object) -> None:
    if found != expected:
        raise WrongDataError(f"expected {str(expected)[:300]}, got {str(found)[:300]}")


# --- shards


def _shards() -> list[tuple[bytes, str, ShardMeta, Facts]]:
    """Whole shards: bytes, digest and content."""
    metas = [META.model_copy(update={"attempt": number}) for number in range(12)]
    made = [replace(honest(Random(meta.attempt)), meta=meta.to_bytes()) for meta in metas]
    return [(*shard.file(), meta, shard.facts()) for shard, meta in zip(made, metas, strict=True)]


_SHARDS = _shards()
_FILES = [data for data, *_ in _SHARDS] + [path.read_bytes() for path in sorted(GOLDEN.glob("*.arrow"))]


def _facts(shard: Shard) -> Facts:
    return [(t.name, t.kind, t.dtype, t.first, t.count, t.data.tobytes()) for t in shard.tensors]


def _whole_shard(rng: Random) -> Case:
    original, digest, meta, facts = rng.choice(_SHARDS)
    data = damaged(rng, original, _FILES) if rng.random() < 0.99 else rng.choice(_FILES)

    def read() -> None:
        shard = read_shard(MemoryStore(KEY, data), KEY, len(data), digest)
        _require((shard.meta, _facts(shard)), (meta, facts))

    return Case("shard", data, read)


def _range(rng: Random) -> Case:
    original, _, meta, facts = rng.choice(_SHARDS)
    name, kind, dtype, first, count, elements = rng.choice(facts)
    data = damaged(rng, original, _FILES)
    skip = rng.randrange(count + 1)
    wanted = rng.randrange(count - skip + 1)
    width = len(elements) // count if count else 1

    def read() -> None:
        part = read_range(MemoryStore(KEY, data), KEY, len(data), name, kind, first + skip, wanted)
        expected = [(name, kind, dtype, first + skip, wanted, elements[skip * width : (skip + wanted) * width])]
        if part.meta != meta:  # what a range read leaves to its caller
            raise CorruptObjectError("another shard")
        _require(_facts(part), expected)

    return Case("range of a shard", data, read)


def _forged_shard(rng: Random) -> Case:
    shard, data, digest = forged(rng)
    return Case("forged shard", data, partial(_read_forged, shard, data, digest))


def _read_forged(shard: Forgery, data: bytes, digest: str) -> None:
    found = read_shard(MemoryStore(KEY, data), KEY, len(data), digest)
    _require(_facts(found), shard.facts())
    _require(found.meta, ShardMeta.model_validate_json(shard.meta))


def _bomb(rng: Random) -> Case:
    """A compressed file with right checksums, whose buffers then claim other sizes."""
    shard = honest(rng)
    original, digest = shard.file(rng.choice(("lz4", "zstd")))
    data = damaged(rng, original, [original])
    return Case("compressed shard", data, partial(_read_forged, shard, data, digest))


def _encoded_shard(rng: Random) -> Case:
    """A row of a codec, with a payload of the codec's own or of anybody's; its checksum is right."""
    dtype, name = rng.choice(list(DTYPES)), rng.choice(_CODECS)
    values = np.frombuffer(rng.randbytes(rng.choice((8, 64, 4096))), np.uint8).copy()
    values[rng.randrange(8) :: 2] = 0  # so that it is worth compressing
    values = (values & 1).view("?") if dtype == "bool" else values.view(DTYPES[dtype])
    codec = codec_named(name)
    payload = codec.encode(values, dtype, np.zeros_like(values) if codec.needs_base else None) or rng.randbytes(40)
    payload = damaged(rng, payload, _FILES) if rng.random() < 0.6 else payload
    count = rng.choice((values.size, values.size, values.size + 1, 10 * values.size, 1 << 20, 1 << 40))
    named = rng.choice((name, name, name, name + "0", "planes", "raw", "blocks-4x3"))
    tensor = {"name": "w", "kind": "param", "dtype": dtype, "first": 0, "count": count}
    index = {"tensors": [{**tensor, "chunks": [{"batch": 0, "row": 0, "first": 0, "count": count}]}]}
    row = ("w", "param", dtype, 0, count, named, payload)
    data, digest = Forgery(META.to_bytes(), json.dumps(index).encode(), [[row]]).file()

    def base(_name: str, _first: int, wanted: int) -> npt.NDArray[np.generic]:
        return np.zeros(wanted, DTYPES[dtype])

    def read() -> None:
        (found,) = read_shard(MemoryStore(KEY, data), KEY, len(data), digest, base).tensors
        # What a forged payload means, its codec alone can tell; but as much as the row says, of its type.
        _require((found.data.shape, found.data.dtype), ((count,), DTYPES[dtype]))

    return Case("encoded shard", data, read)


# --- documents


_GOLDEN = golden_documents()
_DOCUMENTS = (
    (_GOLDEN[Record], keys.record(1, 3)),
    (_GOLDEN[Manifest], keys.manifest("block.0", 7, 1, 1)),
    (_GOLDEN[EpochClaim], keys.epoch_claim(1)),
    (_GOLDEN[EpochLife], keys.epoch_life(1)),
)
_TEXTS = [document.to_bytes() for document, _ in _DOCUMENTS]


def _read_document(kind: type[Sealed], key: str, data: bytes, digest: str) -> Sealed | None:
    """As the project itself reads it; None: passed over as one more broken record."""
    store = MemoryStore(key, data)
    catalog = Catalog(store)
    if kind is Record:
        found = catalog.restorable()
        newest = catalog.newest_record()
        _require([newest] if newest else [], found.records)
        if newest is None:
            raise LayerCheckError(found.problems[0])
        return newest
    if kind is Manifest:
        return catalog.read_manifest(ref("block.0", 7, digest=digest))
    return catalog.newest_claim() if kind is EpochClaim else read_life(store, 1)


def _document(rng: Random) -> Case:
    document, key = rng.choice(_DOCUMENTS)
    data = damaged(rng, document.to_bytes(), _TEXTS)
    digest = digest_of(document.to_bytes())

    def read() -> None:
        _require(_read_document(type(document), key, data, digest), document)

    return Case(type(document).__name__, data, read)


def _forged_document(rng: Random) -> Case:
    """A document with the right digest that says anything: what is accepted can be used and written again."""
    document, key = rng.choice(_DOCUMENTS)
    text = distorted(rng, Stored.to_bytes(document))
    data = b'{"digest":"%s",%s' % (digest_of(b"{" + text[1:]).encode(), text[1:])

    def read() -> None:
        found = _read_document(type(document), key, data, digest_of(data))
        assert found is not None
        _require(type(found).from_bytes(key, found.to_bytes()), found)
        if isinstance(found, Record):
            status_of("run", [Kept(found, ("recent",))]).model_dump_json()
            found.named()

    return Case(f"forged {type(document).__name__}", data, read)


# --- history


def _segment(rng: Random) -> Case:
    data = damaged(rng, segments.DATA, _FILES)
    return Case("history", data, lambda: _require(segments.reads_right(data), expected=True))


def _forged_segment(rng: Random) -> Case:
    data = segments.forged(rng)
    return Case("forged history", data, lambda: _require(segments.is_usable(data), expected=True))


MAKERS: Sequence[Callable[[Random], Case]] = (
    _whole_shard,
    _whole_shard,
    _range,
    _forged_shard,
    _bomb,
    _encoded_shard,
    _document,
    _document,
    _forged_document,
    _segment,
    _forged_segment,
)


def case(seed: int, number: int) -> Case:
    """Input `number` of the campaign `seed`; always the same."""
    rng = Random(f"{seed}/{number}")
    return rng.choice(MAKERS)(rng)
