"""Counting of non-finite values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.finite import count_nonfinite
from storage.shard_format import DTYPES, ShardTensor


def _tensor(dtype: str, values: "np.ndarray[tuple[int], np.dtype[np.generic]]") -> ShardTensor:
    return ShardTensor("w", "param", dtype, 0, len(values), values)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("size", [0, 1, 3, 1 << 18, (1 << 18) + 1, (1 << 20) + 7])
def test_bad_values_are_counted_wherever_they_are(dtype: str, size: int) -> None:
    values = np.full(size, np.finfo(DTYPES[dtype]).max, DTYPES[dtype])
    values[1::7] = np.finfo(DTYPES[dtype]).smallest_subnormal
    assert count_nonfinite(_tensor(dtype, values)) == 0
    places = [place for place in (0, size - 1, 1 << 18) if 0 <= place < size]
    values[places] = [np.nan, np.inf, -np.inf][: len(places)]
    assert count_nonfinite(_tensor(dtype, values)) == len(set(places))


def test_every_bfloat16_bit_pattern() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    as_float32 = (bits.astype(np.uint32) << 16).view(np.float32)
    assert count_nonfinite(_tensor("bfloat16", bits)) == np.count_nonzero(~np.isfinite(as_float32)) > 0


def test_every_float16_bit_pattern() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert count_nonfinite(_tensor("float16", values)) == np.count_nonzero(~np.isfinite(values)) > 0


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8", "bool"])
def test_integers_are_always_finite(dtype: str) -> None:
    assert count_nonfinite(_tensor(dtype, np.full(9, 255).astype(DTYPES[dtype]))) == 0


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True)))
def test_agrees_with_python(values: list[float]) -> None:
    expected = sum(not np.isfinite(value) for value in values)
    assert count_nonfinite(_tensor("float32", np.array(values, np.float32))) == expected
