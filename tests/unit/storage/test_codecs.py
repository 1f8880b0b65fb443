"""Codecs: `planes` is exact; quantized values stay within their bounds; nothing hostile is decoded."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.codecs import Quantized, codec_named, decode, open_payload
from storage.quantize import Scale
from storage.shard_format import DTYPES, MAX_EXPANSION

Array = npt.NDArray[Any]

BITS, BLOCKS = (2, 4, 8), (16, 256)
LARGEST = {("SIGNED", 2): 1, ("SIGNED", 4): 7, ("SIGNED", 8): 127, ("ROOT", 2): 3, ("ROOT", 4): 15, ("ROOT", 8): 255}
TINY = float(np.finfo(np.float32).tiny)
SMALLEST = {"float32": 2.0**-149, "bfloat16": 2.0**-133}
ROUNDING = {"float32": 2.0**-22, "bfloat16": 2.0**-8}


def as_float64(values: Array, dtype: str) -> Array:
    words = values if dtype == "float32" else (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.astype(np.float64)


def of_float32(values: Array, dtype: str) -> Array:
    """Elements of type `dtype`, as numpy carries them."""
    return values if dtype == "float32" else (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def by_block(values: Array, block: int) -> Array:
    whole = np.zeros(-(-values.size // block) * block)
    whole[: values.size] = values
    return whole.reshape(-1, block)


def check_bound(name: str, values: Array, dtype: str, base: Array | None = None) -> Array | None:
    """Encode and decode; every element within the stated bound. None if it is left to `raw`."""
    codec = codec_named(name)
    assert isinstance(codec, Quantized)
    payload = codec.encode(values, dtype, base)
    if payload is None:
        return None
    assert payload == codec.encode(values.copy(), dtype, base)
    found = decode(memoryview(payload), name, dtype, values.size, base)
    assert (found.shape, found.dtype) == (values.shape, DTYPES[dtype])
    exact, decoded = as_float64(values, dtype), as_float64(found, dtype)
    start = np.zeros_like(exact) if base is None else as_float64(base, dtype)
    is_root = codec.grid.scale is Scale.ROOT
    measured, got = (np.sqrt(exact), np.sqrt(decoded)) if is_root else (exact - start, decoded - start)
    largest = LARGEST[codec.grid.scale.name, codec.grid.bits]
    tops = np.abs(by_block(measured, codec.grid.block)).max(axis=1, initial=0, keepdims=True)
    half_bins = np.maximum(tops / largest, TINY) / 2
    if not is_root and codec.grid.bits == 2:  # signs
        half_bins = np.maximum(tops, TINY)
    magnitude = np.maximum.reduce([np.abs(exact), np.abs(decoded), np.abs(start), np.full_like(exact, TINY)])
    rounding = ROUNDING[dtype] * magnitude  # of the elements; their roots err by half of it, relatively
    if is_root:
        rounding = np.where(decoded > 0, rounding / np.sqrt(magnitude), 0) + np.sqrt(SMALLEST[dtype])
    slack = by_block(rounding, codec.grid.block) + half_bins * 2.0**-18
    errors = np.abs(by_block(got, codec.grid.block) - by_block(measured, codec.grid.block))
    assert (errors <= half_bins + slack).all(), (errors - half_bins - slack).max()
    zero_blocks = (by_block(measured, codec.grid.block) == 0).all(axis=1)
    assert (by_block(got, codec.grid.block)[zero_blocks] == 0).all()
    return found


names = st.builds(
    "{}-{}x{}".format,
    st.sampled_from(["blocks", "roots", "delta"]),
    st.sampled_from(BITS),
    st.sampled_from(BLOCKS),
)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(names, st.sampled_from(["float32", "bfloat16"]), st.data())
def test_quantized_values_stay_within_the_bound(name: str, dtype: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 70))
    fill = st.one_of(st.just(0.0), floats)
    drawn = data.draw(hnp.arrays(np.float32, count, elements=floats, fill=fill))
    base = data.draw(hnp.arrays(np.float32, count, elements=floats, fill=fill))
    with np.errstate(over="ignore"):
        values, base = of_float32(drawn, dtype), of_float32(base, dtype)
    if name.startswith("roots"):
        values = of_float32(np.abs(drawn), dtype)
    check_bound(name, values, dtype, base if name.startswith("delta") else None)


def special_arrays() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    noise = rng.standard_normal(5_000).astype(np.float32)  # the last block is shorter than the others
    outlier = noise[:1000] * np.float32(1e-6)
    outlier[321] = 1e3
    mixed = noise[:999].copy()
    mixed[::3] = 0
    return {
        "empty": noise[:0],
        "one": noise[:1],
        "noise": noise,
        "tail": noise[:257],
        "zeros": np.zeros(700, np.float32),
        "negative zeros": np.full(300, -0.0, np.float32),
        "constant": np.full(600, 3.7e-5, np.float32),
        "denormals": noise[:600] * np.float32(1e-41),
        "smallest": np.full(300, 1e-45, np.float32),
        "outlier": outlier,
        "mixed": mixed,
        "wide": (noise[:4096] * 10.0 ** rng.integers(-30, 30, 4096)).astype(np.float32),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", special_arrays())
def test_special_arrays_are_quantized_within_the_bound(what: str, dtype: str) -> None:
    drawn = special_arrays()[what]
    base = of_float32(np.float32(0.02) * np.roll(drawn, 1), dtype)
    for bits in BITS:
        for block in BLOCKS:
            values, squares = of_float32(drawn, dtype), of_float32(np.abs(drawn), dtype)
            assert check_bound(f"blocks-{bits}x{block}", values, dtype) is not None
            assert check_bound(f"roots-{bits}x{block}", squares, dtype) is not None
            assert check_bound(f"delta-{bits}x{block}", values, dtype, base) is not None


@pytest.mark.parametrize("outliers", [0, 3])
def test_signs_keep_the_inner_product_with_what_they_stand_for(outliers: int) -> None:
    values = np.random.default_rng(2).standard_normal(64 * 256).astype(np.float32) * np.float32(1e-6)
    values[: 256 * outliers : 256] *= 20
    found = check_bound("blocks-2x256", values, "float32")
    assert found is not None
    blocks, decoded = by_block(as_float64(values, "float32"), 256), by_block(as_float64(found, "float32"), 256)
    np.testing.assert_allclose((blocks * decoded).sum(axis=1), (blocks**2).sum(axis=1), rtol=1e-5)
    quiet = slice(outliers, None)
    noise = ((decoded - blocks)[quiet] ** 2).sum() / (blocks[quiet] ** 2).sum()
    assert noise < 0.27  # of a normal distribution: 0.19 / 0.81


@pytest.mark.parametrize("bits", BITS)
def test_no_neighbour_of_an_outlier_in_the_second_moment_decodes_to_zero(bits: int) -> None:
    values = np.full(512, 1e-12, np.float32)
    values[100] = 1.0
    found = check_bound(f"roots-{bits}x256", values, "float32")
    assert found is not None
    assert found.min() > 0
    half_bin = 0.5 / LARGEST["ROOT", bits]
    np.testing.assert_allclose(np.sqrt(found[:100]), half_bin, rtol=1e-5)
    np.testing.assert_allclose(found[256:], 1e-12, rtol=1e-5)  # another block


def test_a_parameter_that_did_not_move_decodes_to_itself() -> None:
    base = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    moved = base.copy()
    moved[500:] += np.float32(1e-3)
    found = check_bound("delta-4x256", moved, "float32", base)
    assert found is not None
    assert np.array_equal(found[:500], base[:500])


@pytest.mark.parametrize("name", ["blocks-4x16", "roots-8x16", "delta-4x16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_has_no_place_on_the_grid_is_left_to_raw(name: str, bad: float) -> None:
    values = np.full(5_000, 0.5, np.float32)
    values[-1] = bad
    assert codec_named(name).encode(values, "float32", np.zeros_like(values) if "delta" in name else None) is None


def test_negative_second_moments_and_other_types_are_left_to_raw() -> None:
    assert codec_named("roots-8x16").encode(np.full(40, -1.0, np.float32), "float32", None) is None
    assert codec_named("blocks-4x16").encode(np.ones(400), "float64", None) is None


def test_a_base_at_the_end_of_its_range_is_left_to_raw() -> None:
    base = np.full(40, -3.4e38, np.float32)
    assert codec_named("delta-8x16").encode(np.full(40, 8e37, np.float32), "float32", base) is None


def test_another_base_is_refused() -> None:
    base = np.zeros(300, np.float32)
    payload = codec_named("delta-4x256").encode(np.ones(300, np.float32), "float32", base)
    assert payload is not None
    base[299] = 1e-3
    with pytest.raises(ValueError, match="another base version"):
        decode(memoryview(payload), "delta-4x256", "float32", 300, base)


@pytest.mark.parametrize(
    ("name", "largest_bits"), [("blocks-2x256", 2.2), ("blocks-4x256", 4.2), ("roots-8x256", 8.2), ("delta-4x64", 4.6)]
)
def test_size_is_at_most_what_the_spec_promises(name: str, largest_bits: float) -> None:
    values = np.abs(np.random.default_rng(1).standard_normal(1 << 18)).astype(np.float32)
    payload = codec_named(name).encode(values, "float32", np.zeros_like(values) if "delta" in name else None)
    assert payload is not None
    assert len(payload) <= largest_bits * values.size / 8


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.binary(max_size=400))
def test_planes_are_exact(dtype: str, content: bytes) -> None:
    carrier = DTYPES[dtype]
    data = np.frombuffer(content[: len(content) // carrier.itemsize * carrier.itemsize], np.uint8)
    values = (data & 1).view(np.bool_) if dtype == "bool" else data.view(carrier)
    payload = codec_named("planes").encode(values, dtype, None)
    assert payload is not None
    assert payload == codec_named("planes").encode(values.copy(), dtype, None)
    assert decode(memoryview(payload), "planes", dtype, values.size, None).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planes_shorten_weights_and_bound_what_zeros_expand_to(dtype: str) -> None:
    weights = of_float32(np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32) * np.float32(0.02), dtype)
    payload = codec_named("planes").encode(weights, dtype, None)
    assert payload is not None
    assert len(payload) < {"float32": 0.86, "bfloat16": 0.72}[dtype] * weights.nbytes
    zeros = np.zeros_like(weights)
    payload = codec_named("planes").encode(zeros, dtype, None)
    assert payload is not None
    assert len(payload) == zeros.nbytes // MAX_EXPANSION
    assert not decode(memoryview(payload), "planes", dtype, zeros.size, None).any()


@pytest.mark.parametrize("name", ["", "zip", "blocks-3x256", "blocks-4x", "delta-4x100", "delta-4x4", "roots-8x131072"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown codec"):
        decode(memoryview(b"1234"), name, "float32", 1, None)


CODECS = ("raw", "planes", "blocks-4x16", "roots-8x16", "delta-2x16")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(CODECS), st.sampled_from(sorted(DTYPES)), st.integers(0, 2**40), st.binary(max_size=200), st.data()
)
def test_noise_is_refused_or_decodes_to_what_was_promised(
    name: str, dtype: str, count: int, noise: bytes, data: st.DataObject
) -> None:
    count = data.draw(st.sampled_from([count, count % 300]))
    base = np.zeros(count, DTYPES[dtype]) if name.startswith("delta") and count < 300 else None
    with suppress(ValueError, OSError):
        found = decode(memoryview(noise), name, dtype, count, base)
        assert found.size == count
        assert found.nbytes <= len(noise) * MAX_EXPANSION


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CODECS[1:]), st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_payload_is_refused_or_decodes_to_the_right_size(name: str, place: int, mask: int) -> None:
    values = np.abs(np.random.default_rng(3).standard_normal(500).astype(np.float32))
    base = np.zeros_like(values) if name.startswith("delta") else None
    payload = bytearray(codec_named(name).encode(values, "float32", base) or b"")
    payload[place % len(payload)] ^= mask
    with suppress(ValueError, OSError):
        assert decode(memoryview(payload), name, "float32", values.size, base).shape == values.shape


def test_a_base_of_another_shape_is_refused() -> None:
    base = np.zeros(300, np.float32)
    payload = codec_named("delta-4x256").encode(np.ones(300, np.float32), "float32", base)
    assert payload is not None
    short = np.zeros(299, np.float32)
    with pytest.raises(ValueError, match="expected a base of 300"):
        codec_named("delta-4x256").encode(np.ones(300, np.float32), "float32", short)
    longer = codec_named("delta-4x256").encode(short, "float32", short)
    assert longer is not None
    with pytest.raises(ValueError, match="expected a base of 300"):
        decode(memoryview(longer[:8] + payload[8:]), "delta-4x256", "float32", 300, short)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_may_be_read_only_and_lie_anywhere(dtype: str) -> None:
    """As views of Ray's object store and of the bytes of a file do."""
    values = of_float32(np.random.default_rng(4).standard_normal(700).astype(np.float32), dtype)
    base = of_float32(np.random.default_rng(5).standard_normal(700).astype(np.float32), dtype)
    codec = codec_named("delta-4x256")
    payload = codec.encode(values, dtype, base)
    odd = np.frombuffer(b"x" + values.tobytes() + base.tobytes(), np.uint8)[1:].view(values.dtype)
    assert not odd.flags.aligned
    assert codec.encode(odd[:700], dtype, odd[700:]) == payload
    assert payload is not None
    found = decode(memoryview(b"x" + payload)[1:], codec.name, dtype, 700, odd[700:])
    assert found.tobytes() == decode(memoryview(payload), codec.name, dtype, 700, base).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_may_lie_where_its_values_go(dtype: str) -> None:
    """As it does when a model is restored in place."""
    values = of_float32(np.random.default_rng(4).standard_normal(700).astype(np.float32), dtype)
    base = of_float32(np.random.default_rng(5).standard_normal(700).astype(np.float32), dtype)
    payload = codec_named("delta-4x256").encode(values, dtype, base)
    assert payload is not None
    expected = decode(memoryview(payload), "delta-4x256", dtype, 700, base)
    live = base.copy()
    open_payload(memoryview(payload), "delta-4x256", dtype, 700, lambda: live)(live)
    assert live.tobytes() == expected.tobytes()


ENCODE_PLANES = """
import numpy as np
from storage.byte_planes import encode_planes
for dtype in np.float32, np.float64:
    encode_planes(np.ones(9, dtype), signed=True)
"""


def encode_with_loops_kept_in(folder: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", ENCODE_PLANES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_loops_are_compiled_where_no_folder_can_be_written() -> None:
    encode_with_loops_kept_in(Path("/proc/none"))


def test_compiled_loops_are_kept_and_torn_ones_are_compiled_past(tmp_path: Path) -> None:
    encode_with_loops_kept_in(tmp_path)
    indices = list(tmp_path.rglob("*.nbi"))
    # Each in an index of its own: numba loses track of what two processes add to one at the same time.
    assert len(indices) == len(list(tmp_path.rglob("*.nbc"))) == 4
    for index in indices:
        os.truncate(index, 0)
    encode_with_loops_kept_in(tmp_path)
