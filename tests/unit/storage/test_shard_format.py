"""Shard format v1: what is written is read back bit by bit, and damage is always noticed."""

import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import CorruptObjectError, ObjectNotFoundError
from storage.local_store import LocalStore
from storage.shard_format import (
    BATCH_BYTES,
    DTYPES,
    INDEX_KEY,
    META_KEY,
    SCHEMA,
    Checksums,
    Shard,
    ShardMeta,
    ShardSummary,
    ShardTensor,
)
from storage.shard_reader import read_chunks, read_range, read_shard
from storage.shard_writer import write_shard

KEY = "layers/block.0/0000000007/00000001.000002/00001of00003.arrow"
META = ShardMeta(run="r", layer="block.0", step=7, optimizer_step=8, epoch=1, attempt=2, rank=1, world_size=3)
GOLDEN = Path(__file__).parents[2] / "golden"


def _tensor(name: str, dtype: str, count: int, first: int = 0, kind: str = "param") -> ShardTensor:
    carrier = DTYPES[dtype]
    raw = np.random.default_rng(count + len(name)).integers(0, 256, count * carrier.itemsize, np.uint8)
    data = (raw & 1).view(np.bool_) if dtype == "bool" else raw.view(carrier)
    return ShardTensor(name, kind, dtype, first, count, data)


def _small() -> tuple[ShardTensor, ...]:
    return (
        _tensor("w", "float32", 5, first=100),
        _tensor("w", "bfloat16", 3, first=100, kind="exp_avg"),
        _tensor("w", "float32", 1, kind="step"),
        _tensor("empty", "float16", 0),
        _tensor("mask", "bool", 3, kind="buffer"),
    )


def _facts(tensor: ShardTensor) -> tuple[str, str, str, int, int, bytes]:
    return tensor.name, tensor.kind, tensor.dtype, tensor.first, tensor.count, tensor.data.tobytes()


def _same(shard: Shard, tensors: tuple[ShardTensor, ...]) -> bool:
    return shard.meta == META and [_facts(t) for t in shard.tensors] == [_facts(t) for t in tensors]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_round_trip_of_every_type(store: LocalStore, dtype: str, count: int) -> None:
    tensors = (_tensor("x", "uint8", 3), _tensor("w", dtype, count, first=11))  # 3 bytes first: w is not aligned
    summary = write_shard(store, KEY, META, tensors)
    assert summary.bytes == store.size(KEY)
    shard = read_shard(store, KEY, summary.bytes, summary.digest)
    assert _same(shard, tensors)
    assert all(tensor.data.flags.aligned for tensor in shard.tensors)


def test_round_trip_over_many_batches(store: LocalStore) -> None:
    tensors = (
        _tensor("big", "float32", BATCH_BYTES // 2 + 3, first=1),
        *_small(),
        _tensor("edge", "int8", BATCH_BYTES),
        _tensor("over", "int16", BATCH_BYTES // 2 + 1),
        *(_tensor(f"mid{number}", "float64", 100_000) for number in range(12)),
    )
    summary = write_shard(store, KEY, META, tensors)
    assert _same(read_shard(store, KEY, summary.bytes, summary.digest), tensors)
    _, chunks = read_chunks(store, KEY, summary.bytes, summary.digest)
    assert max(chunk.bytes for chunk in chunks) == BATCH_BYTES
    for tensor in tensors:
        parts = [chunk for chunk in chunks if (chunk.name, chunk.kind) == (tensor.name, tensor.kind)]
        ends = [part.first + part.count for part in parts]
        assert [part.first for part in parts] == [tensor.first, *ends[:-1]]
        found = np.empty_like(tensor.data)
        for part in parts:
            part.fill(found[part.first - tensor.first :][: part.count])
        np.testing.assert_array_equal(found, tensor.data)


def test_empty_shard(store: LocalStore) -> None:
    summary = write_shard(store, KEY, META, ())
    assert _same(read_shard(store, KEY, summary.bytes, summary.digest), ())


def test_batches_are_bounded_and_small_tensors_share_one(store: LocalStore) -> None:
    blocks = [
        _tensor(f"w{number}", "float32", 1000, kind=kind)
        for number in range(9)
        for kind in ("param", "exp_avg", "exp_avg_sq", "step")
    ]
    write_shard(store, "small", META, blocks)
    write_shard(store, "large", META, [_tensor("w", "float32", 3 * BATCH_BYTES // 4), *blocks])
    with pa.ipc.open_file(store.open_reader("small")) as small:
        assert small.num_record_batches == 1
    with pa.ipc.open_file(store.open_reader("large")) as large:
        assert large.num_record_batches == 4
        sizes = [sum(map(len, large.get_batch(number)["payload"].to_pylist())) for number in range(4)]
        assert max(sizes) == BATCH_BYTES


class _Counting(LocalStore):
    """Counts the bytes that readers fetch."""

    fetched = 0

    def open_reader(self, key: str) -> pa.NativeFile:
        store, content = self, self.read(key)

        class Source(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                data = super().read(size)
                store.fetched += len(data)
                return data

        return pa.PythonFile(Source(content), mode="r")


@pytest.mark.parametrize(
    ("first", "count", "batches"),
    [(1, 10, 1), (5, 0, 1), (BATCH_BYTES // 4 - 3, 7, 2), (0, BATCH_BYTES, 4), (BATCH_BYTES, 0, 1)],
)
def test_range_read_fetches_only_its_batches(tmp_path: Path, first: int, count: int, batches: int) -> None:
    store = _Counting(tmp_path)
    tensors = (_tensor("u", "float32", BATCH_BYTES), *_small(), _tensor("v", "float32", BATCH_BYTES, first=50))
    summary = write_shard(store, KEY, META, tensors)
    found = read_range(store, KEY, summary.bytes, "v", "param", 50 + first, count)
    assert found.meta == META
    assert _facts(found.tensors[0])[:5] == ("v", "param", "float32", 50 + first, count)
    assert found.tensors[0].data.tobytes() == tensors[-1].data[first : first + count].tobytes()
    assert store.fetched < batches * BATCH_BYTES + 100_000


def test_range_read_needs_no_intact_neighbours(store: LocalStore) -> None:
    tensors = (_tensor("a", "float32", BATCH_BYTES // 2), _tensor("b", "float32", BATCH_BYTES // 2))
    summary = write_shard(store, KEY, META, tensors)
    raw = bytearray(store.read(KEY))
    raw[len(raw) // 4] ^= 1  # inside `a`
    store.put(KEY, bytes(raw))
    read_range(store, KEY, summary.bytes, "b", "param", 0, 100)
    with pytest.raises(CorruptObjectError, match="checksum"):
        read_range(store, KEY, summary.bytes, "a", "param", 0, BATCH_BYTES // 2)
    with pytest.raises(CorruptObjectError, match="checksum"):
        read_shard(store, KEY, summary.bytes, summary.digest)


@pytest.mark.parametrize(("first", "count"), [(99, 1), (100, 6), (106, 0), (100, -1)])
def test_range_outside_is_refused(store: LocalStore, first: int, count: int) -> None:
    summary = write_shard(store, KEY, META, _small())
    with pytest.raises(CorruptObjectError, match="does not hold elements"):
        read_range(store, KEY, summary.bytes, "w", "param", first, count)
    with pytest.raises(CorruptObjectError, match="does not hold elements"):
        read_range(store, KEY, summary.bytes, "w", "no-such-kind", 100, 1)


class _InMemory(LocalStore):
    """One object in memory, so that tens of thousands of damaged variants can be read quickly."""

    content = b""

    def open_reader(self, key: str) -> pa.NativeFile:
        return pa.BufferReader(self.content)


def _read_damaged(content: bytes, summary: ShardSummary) -> Shard:
    memory = _InMemory(Path("/nowhere"))
    memory.content = content
    return read_shard(memory, KEY, summary.bytes, summary.digest)


def test_every_single_bit_flip_is_noticed_or_harmless(store: LocalStore) -> None:
    tensors = _small()[:3]
    summary = write_shard(store, KEY, META, tensors)
    raw = bytearray(store.read(KEY))
    noticed = 0
    for position in range(len(raw)):
        for bit in range(8):
            raw[position] ^= 1 << bit
            try:
                assert _same(_read_damaged(bytes(raw), summary), tensors), (position, bit)
            except CorruptObjectError as error:
                noticed += "\n" not in str(error)
            raw[position] ^= 1 << bit
    assert noticed > 8 * sum(tensor.data.nbytes for tensor in tensors)


def test_every_truncation_is_noticed(store: LocalStore) -> None:
    summary = write_shard(store, KEY, META, _small())
    raw = store.read(KEY)
    for length in range(len(raw)):
        with pytest.raises(CorruptObjectError, match="truncated"):
            _read_damaged(raw[:length], summary)
        with pytest.raises(CorruptObjectError):  # even if the manifest agrees with the truncated size
            _read_damaged(raw[:length], ShardSummary(length, summary.digest))


@given(st.binary(max_size=300), st.booleans())
def test_noise_is_no_shard(noise: bytes, framed: bool) -> None:
    content = b"ARROW1\0\0" + noise + len(noise).to_bytes(4, "little") + b"ARROW1" if framed else noise
    with pytest.raises(CorruptObjectError):
        _read_damaged(content, ShardSummary(len(content), "0" * 32))


def test_another_shard_under_the_key_is_noticed(store: LocalStore) -> None:
    summary = write_shard(store, KEY, META, _small())
    other = write_shard(store, KEY, META.model_copy(update={"attempt": 3}), _small())
    assert other.bytes == summary.bytes
    with pytest.raises(CorruptObjectError, match="expected digest"):
        read_shard(store, KEY, summary.bytes, summary.digest)


def _forge(
    meta: bytes, index: bytes, rows: list[tuple[str, str, str, int, int, str, bytes]]
) -> tuple[bytes, ShardSummary]:
    """A file whose checksums are all right and whose content is whatever the caller says."""
    checksums = Checksums(meta, index)
    sums = [checksums.of_row(*row[:6], memoryview(row[6])) for row in rows]
    for checksum in sums:
        checksums.add(checksum)
    schema = SCHEMA.with_metadata({META_KEY: meta, INDEX_KEY: index})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        columns = [*zip(*rows, strict=True), sums]
        writer.write_batch(
            pa.RecordBatch.from_arrays(
                [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
            )
        )
    content = sink.getvalue().to_pybytes()
    return content, ShardSummary(len(content), checksums.digest())


def _index(
    first: int = 0, count: int = 2, dtype: str = "float32", chunk: str = '"batch":0,"row":0,"first":0,"count":2'
) -> bytes:
    tensor = f'{{"name":"w","kind":"param","dtype":"{dtype}","first":{first},"count":{count},"chunks":[{{{chunk}}}]}}'
    return f'{{"tensors":[{tensor}]}}'.encode()


_ROW = ("w", "param", "float32", 0, 2, "raw", b"12345678")


def test_forger_makes_good_shards_too() -> None:
    assert _read_damaged(*_forge(META.to_bytes(), _index(), [_ROW])).tensors[0].data.tobytes() == b"12345678"


@pytest.mark.parametrize(
    ("index", "row", "message"),
    [
        (_index(), (*_ROW[:5], "planes", _ROW[6]), "parts in a payload of 8 bytes"),
        (_index(count=2**62, chunk=f'"batch":0,"row":0,"first":0,"count":{2**62}'), _ROW, "promises"),
        (_index(dtype="object"), _ROW, "unknown dtype"),
        (_index(first=1), _ROW, "expected a chunk at element 1"),
        (_index(count=3), _ROW, "chunks hold 2 elements, expected 3"),
        (_index(chunk='"batch":7,"row":0,"first":0,"count":2'), _ROW, "not those of the chunk index"),
        (_index(chunk='"batch":0,"row":1,"first":0,"count":2'), _ROW, "not those of the chunk index"),
        (b'{"tensors":[]}', _ROW, "not those of the chunk index"),
        (b"not json", _ROW, "JSON"),
        (_index(), (*_ROW[:5], "zip", _ROW[6]), "unknown codec 'zip'"),
        (_index(), (*_ROW[:3], 1, *_ROW[4:]), "expected row"),
        (_index(), ("v", *_ROW[1:]), "expected row"),
        (_index(), (*_ROW[:6], b"1234567"), "with 7 bytes"),
        (_index(), (*_ROW[:6], b"123456789"), "with 9 bytes"),
    ],
)
def test_hostile_content_is_refused(
    index: bytes, row: tuple[str, str, str, int, int, str, bytes], message: str
) -> None:
    with pytest.raises(CorruptObjectError, match=message):
        _read_damaged(*_forge(META.to_bytes(), index, [row]))


def test_unknown_format_version_is_refused() -> None:
    newer = META.to_bytes().replace(b'"format_version":1', b'"format_version":2')
    with pytest.raises(CorruptObjectError, match="format_version"):
        _read_damaged(*_forge(newer, _index(), [_ROW]))


def test_range_read_survives_damage(store: LocalStore) -> None:
    summary = write_shard(store, KEY, META, _small())
    raw = bytearray(store.read(KEY))
    memory = _InMemory(Path("/nowhere"))
    right = _small()[0].data[1:3].tobytes()
    for position in range(len(raw)):
        raw[position] ^= 0x81
        memory.content = bytes(raw)
        with suppress(CorruptObjectError):
            assert read_range(memory, KEY, summary.bytes, "w", "param", 101, 2).tensors[0].data.tobytes() == right
        raw[position] ^= 0x81


def test_missing_shard_is_not_found(store: LocalStore) -> None:
    with pytest.raises(ObjectNotFoundError):
        read_shard(store, KEY, 1, "")
    with pytest.raises(ObjectNotFoundError):
        read_range(store, KEY, 1, "w", "param", 0, 1)


def test_failed_write_publishes_nothing(store: LocalStore) -> None:
    tensors = [_tensor("a", "float32", BATCH_BYTES), _tensor("b", "float32", 10)]
    object.__setattr__(tensors[1], "data", None)  # fails after the large batches
    with pytest.raises(TypeError):
        write_shard(store, KEY, META, tensors)
    assert store.list("") == []


@pytest.mark.parametrize(
    ("dtype", "count", "data", "message"),
    [
        ("complex64", 1, np.zeros(1, np.complex64), "cannot be stored"),
        ("float32", 1, np.zeros(1, np.float64), "expected contiguous float32"),
        ("float32", 2, np.zeros(1, np.float32), "of shape"),
        ("float32", 2, np.zeros(4, np.float32)[::2], "contiguous"),
    ],
)
def test_tensor_that_is_not_what_it_says_is_refused(dtype: str, count: int, data: "np.ndarray", message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardTensor("w", "param", dtype, 0, count, data)


def test_same_tensor_twice_is_refused(store: LocalStore) -> None:
    with pytest.raises(ValueError, match="same name and kind"):
        write_shard(store, KEY, META, [_tensor("w", "float32", 1), _tensor("w", "float32", 1, first=1)])


_tensors = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
        st.sampled_from(["param", "buffer", "exp_avg", "step"]),
        st.sampled_from(sorted(DTYPES)),
        st.integers(0, 2**40),
        st.integers(0, 40),
    ),
    max_size=8,
    unique_by=lambda fields: fields[:2],
)


@settings(max_examples=60, deadline=None)
@given(_tensors)
def test_round_trip_property(
    tmp_path_factory: pytest.TempPathFactory, fields: list[tuple[str, str, str, int, int]]
) -> None:
    store = LocalStore(tmp_path_factory.mktemp("s"))
    tensors = tuple(_tensor(name, dtype, count, first, kind) for name, kind, dtype, first, count in fields)
    summary = write_shard(store, KEY, META, tensors)
    assert _same(read_shard(store, KEY, summary.bytes, summary.digest), tensors)


def test_golden_v1_is_still_read() -> None:
    store = LocalStore(GOLDEN)
    shard = read_shard(store, "shard_v1.arrow", 3346, "791b23280632e5ac9da432d524373057")
    assert shard.meta == META
    assert [_facts(tensor) for tensor in shard.tensors] == [
        ("w", "param", "float32", 100, 3, np.array([1.5, -2.0, 0.25], "<f4").tobytes()),
        ("w", "exp_avg", "bfloat16", 100, 3, np.array([0x3F80, 0xBF80, 0x0001], "<u2").tobytes()),
        ("w", "step", "float32", 0, 1, np.array([7.0], "<f4").tobytes()),
        ("position", "buffer", "int64", 0, 2, np.array([0, -1], "<i8").tobytes()),
    ]


def test_golden_v1_of_every_type_in_several_batches_is_still_read() -> None:
    name = "shard_v1_types.arrow"
    digest = "0b931467f82c170cf42e8a78a6b5f94c"
    shard = read_shard(LocalStore(GOLDEN), name, 7794, digest)
    assert shard.meta == META
    assert [(t.name, t.kind, t.dtype, t.first, t.count) for t in shard.tensors] == [
        ("w", kind, dtype, 11, 5)
        for kind, dtype in zip(
            ("param", "buffer", "exp_avg", "exp_avg_sq", "step", "a", "b", "c", "d", "e"), DTYPES, strict=True
        )
    ]
    for tensor in shard.tensors:  # byte i of a tensor is 7 i modulo 251, of a mask i modulo 2
        expected = [i % 2 if tensor.dtype == "bool" else 7 * i % 251 for i in range(tensor.data.nbytes)]
        assert list(tensor.data.tobytes()) == expected
