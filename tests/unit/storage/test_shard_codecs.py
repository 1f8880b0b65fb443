"""Shards of every codec: what comes back, in whole and in ranges, against which base, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from storage.codecs import Base, base_of
from storage.encoding import encoding_of, largest_share
from storage.errors import CorruptObjectError, LayerCheckError
from storage.local_store import LocalStore
from storage.options import CheckpointOptions
from storage.records import digest_of
from storage.shard_format import BATCH_BYTES, Shard, ShardMeta, ShardSummary, ShardTensor
from storage.shard_reader import check_shard, read_range, read_shard
from storage.shard_writer import write_shard

KEY = "layers/block.0/0000000007/00000001.000002/00001of00003.arrow"
META = ShardMeta(run="r", layer="block.0", step=7, optimizer_step=8, epoch=1, attempt=2, rank=1, world_size=3)
GOLDEN = Path(__file__).parents[2] / "golden"
CODECS = ("raw", "lossless", "delta")
FIRST = 1000


def options(codec: str) -> CheckpointOptions:
    return CheckpointOptions.model_validate({"codec": codec})


def layer(count: int, dtype: str = "float32", seed: int = 0) -> tuple[ShardTensor, ...]:
    """A slice's tensors: elements from `FIRST` on, as AdamW leaves them, with `step` and a buffer."""
    rng = np.random.default_rng(seed)
    moment = (rng.standard_normal(count) * 1e-4).astype(np.float32)
    values: dict[str, npt.NDArray[Any]] = {
        "param": base_values(count) + moment,
        "exp_avg": moment,
        "exp_avg_sq": np.square(rng.standard_normal(count) * 1e-4).astype(np.float32),
    }
    if dtype == "bfloat16":
        values = {kind: (array.view(np.uint32) >> np.uint32(16)).astype(np.uint16) for kind, array in values.items()}
    scalars = (
        ShardTensor("w", "step", "float32", 0, 1, np.array([7.0], np.float32)),
        ShardTensor("positions", "buffer", "int64", 0, 40, np.arange(40)),
    )
    return (*(ShardTensor("w", kind, dtype, FIRST, count, array) for kind, array in values.items()), *scalars)


def base_values(count: int) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(9).standard_normal(count) * 0.02).astype(np.float32)


def base(count: int, dtype: str = "float32") -> Base:
    values: npt.NDArray[Any] = base_values(count)
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return base_of([ShardTensor("w", "param", dtype, FIRST, count, values)])


def write(store: LocalStore, codec: str, tensors: tuple[ShardTensor, ...], base: Base | None) -> ShardSummary:
    return write_shard(store, KEY, META, tensors, encoding_of(options(codec)), base)


def content(shard: Shard) -> dict[str, npt.NDArray[np.generic]]:
    return {tensor.kind: tensor.data for tensor in shard.tensors}


def codecs_of(store: LocalStore) -> dict[str, set[str]]:
    rows: dict[str, set[str]] = {}
    with pa.ipc.open_file(store.open_reader(KEY)) as file:
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            for kind, codec in zip(batch["kind"].to_pylist(), batch["codec"].to_pylist(), strict=True):
                rows.setdefault(kind, set()).add(codec)
    return rows


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 300, 5000])
@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_exact_codecs_come_back_bit_for_bit(store: LocalStore, codec: str, count: int, dtype: str) -> None:
    tensors = layer(count, dtype)
    summary = write(store, codec, tensors, None)
    found = read_shard(store, KEY, summary.bytes, summary.digest)
    assert [t.data.tobytes() for t in found.tensors] == [t.data.tobytes() for t in tensors]
    assert all(not tensor.data.flags.writeable for tensor in found.tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 300, 5000])
def test_delta_comes_back_within_its_bounds(store: LocalStore, count: int, dtype: str) -> None:
    tensors = layer(count, dtype)
    summary = write(store, "delta", tensors, base(count, dtype))
    found = read_shard(store, KEY, summary.bytes, summary.digest, base(count, dtype))
    exact = {tensor.kind: tensor.data for tensor in tensors}
    got = content(found)
    assert (got["step"], got["buffer"].tolist()) == (7.0, list(range(40)))
    if dtype == "float32" and count:
        moved = np.abs(exact["param"] - base_values(count)).max()
        assert np.abs(got["param"] - exact["param"]).max() <= moved / 14 + 1e-8
        assert np.abs(got["exp_avg"] - exact["exp_avg"]).max() <= np.abs(exact["exp_avg"]).max() * 1.0001
        roots = np.sqrt(exact["exp_avg_sq"])
        assert np.abs(np.sqrt(got["exp_avg_sq"]) - roots).max() <= roots.max() / 30 * 1.0001
        assert got["exp_avg_sq"].min() > 0


def test_rows_say_how_they_are_encoded(store: LocalStore) -> None:
    write(store, "delta", layer(5000), base(5000))
    assert codecs_of(store) == {
        "param": {"delta-4x256"},
        "exp_avg": {"blocks-2x256"},
        "exp_avg_sq": {"roots-4x256"},
        "step": {"raw"},
        "buffer": {"raw"},
    }
    write(store, "lossless", layer(5000), None)
    assert codecs_of(store)["param"] == {"planes"}


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, codec: str) -> None:
    one, other = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    assert write(one, codec, layer(3000), base(3000)) == write(other, codec, layer(3000), base(3000))
    assert one.read(KEY) == other.read(KEY)


@pytest.mark.parametrize("codec", CODECS)
def test_a_range_is_what_the_whole_shard_holds_there(store: LocalStore, codec: str) -> None:
    chunk = BATCH_BYTES // 4
    count = chunk + 777  # two chunks
    summary = write(store, codec, layer(count), base(count))
    whole = content(read_shard(store, KEY, summary.bytes, summary.digest, base(count)))
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        for first, size in ((0, 10), (chunk - 3, 6), (count - 100, 100), (777, 0)):
            part = read_range(store, KEY, summary.bytes, "w", kind, FIRST + first, size, base(count)).tensors[0]
            assert (part.first, part.count) == (FIRST + first, size)
            assert part.data.tobytes() == whole[kind][first : first + size].tobytes()


def test_delta_is_checked_without_its_base_but_not_decoded_without_or_against_another(store: LocalStore) -> None:
    summary = write(store, "delta", layer(3000), base(3000))
    check_shard(store, KEY, summary.bytes, summary.digest)
    with pytest.raises(LayerCheckError, match=r"expected the base version to decode delta-4x256, got none"):
        read_shard(store, KEY, summary.bytes, summary.digest)

    def another(name: str, first: int, count: int) -> npt.NDArray[np.generic]:
        values = base(3000)(name, first, count).copy()
        values[-1:] = 0
        return values

    with pytest.raises(CorruptObjectError, match="another base version than this model's"):
        read_shard(store, KEY, summary.bytes, summary.digest, another)
    with pytest.raises(CorruptObjectError, match="not a shard"):
        read_shard(store, KEY, summary.bytes, summary.digest, base_of([]))


def test_delta_is_not_encoded_without_a_base(store: LocalStore) -> None:
    with pytest.raises(ValueError, match="needs the base version, got none"):
        write(store, "delta", layer(3000), None)
    assert store.list("") == []


class InMemory(LocalStore):
    """One object in memory, so that many damaged variants are read quickly."""

    content = b""

    def open_reader(self, key: str) -> pa.NativeFile:
        return pa.BufferReader(self.content)


@pytest.mark.parametrize("codec", ["lossless", "delta"])
def test_damage_is_noticed(store: LocalStore, codec: str) -> None:
    summary = write(store, codec, layer(400), base(400))
    raw, memory = bytearray(store.read(KEY)), InMemory(Path("/nowhere"))
    right = read_shard(store, KEY, summary.bytes, summary.digest, base(400))
    noticed = 0
    for position in range(0, len(raw), 7):
        raw[position] ^= 0x42
        memory.content = bytes(raw)
        try:
            found = read_shard(memory, KEY, summary.bytes, summary.digest, base(400))
            check_shard(memory, KEY, summary.bytes, summary.digest)
            assert [t.data.tobytes() for t in found.tensors] == [t.data.tobytes() for t in right.tensors]
        except CorruptObjectError:
            noticed += 1
        raw[position] ^= 0x42
    assert noticed > len(raw) / 7 / 2


@pytest.mark.parametrize(
    ("dtype", "bits", "share"), [("float32", (4, 4, 8), 16.375 / 96), ("bfloat16", (2, 2, 4), 8.375 / 48)]
)
def test_an_encoded_layer_takes_at_most_its_promised_share(
    store: LocalStore, dtype: str, bits: tuple[int, int, int], share: float
) -> None:
    names = ("weight_bits", "exp_avg_bits", "exp_avg_sq_bits")
    wanted = CheckpointOptions.model_validate({"codec": "delta", "delta": dict(zip(names, bits, strict=True))})
    assert largest_share(wanted, dtype) == pytest.approx(share)
    tensors = layer(1 << 18, dtype)[:3]
    summary = write_shard(store, KEY, META, tensors, encoding_of(wanted), base(1 << 18, dtype))
    assert summary.bytes <= share * sum(tensor.data.nbytes for tensor in tensors) + 4000
    assert largest_share(options("lossless"), dtype) == 1


def golden_layer() -> tuple[tuple[ShardTensor, ...], Base]:
    """600 elements without any random numbers, whose generators may change."""
    numbers = np.arange(600, dtype=np.float32)
    start = (numbers % 37 - 18) / 64
    moved = start + (numbers % 11 - 5) / 8192
    values = {"param": moved, "exp_avg": (numbers % 23 - 11) / 4096, "exp_avg_sq": np.square(numbers % 53) / 65536}
    tensors = tuple(ShardTensor("w", kind, "float32", 5, 600, array) for kind, array in values.items())
    return tensors, base_of([ShardTensor("w", "param", "float32", 5, 600, start)])


GOLDEN_FILES = {
    "shard_v1_lossless.arrow": (4194, "11de608ab0e626fc89773d910e1838f6", "9ed35dd04ba3478625b70a2744854c42"),
    "shard_v1_delta.arrow": (3298, "910ee42f4ba268237ef19134949b5073", "471f273fa5950da940e7f51f310f87c0"),
}


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_files_are_still_read(name: str) -> None:
    size, digest, content_digest = GOLDEN_FILES[name]
    tensors, base = golden_layer()
    shard = read_shard(LocalStore(GOLDEN), name, size, digest, base)
    assert shard.meta == META
    assert [(t.name, t.kind, t.dtype, t.first, t.count) for t in shard.tensors] == [
        (t.name, t.kind, t.dtype, t.first, t.count) for t in tensors
    ]
    assert digest_of(b"".join(t.data.tobytes() for t in shard.tensors)) == content_digest
    assert np.abs(content(shard)["param"] - tensors[0].data).max() <= 5 / 8192 / 14 + 1e-7
