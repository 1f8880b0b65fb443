"""Counts values that must never be stored over good ones (invariant 6)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from storage.shard_format import ShardTensor

_CHUNK = 1 << 18  # elements; what is computed of a chunk stays in the cache

# A value is NaN or infinite exactly if all bits of its exponent are ones (IEEE 754; bfloat16 is the upper half of
# float32). numpy has no bfloat16, and its isfinite is four times slower than this for float16.
_EXPONENTS = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}


def count_nonfinite(tensor: ShardTensor) -> int:
    """Number of NaN and infinite values in `tensor`; 0 for types that have none."""
    exponent = _EXPONENTS.get(tensor.dtype)
    data = tensor.data if exponent is None else tensor.data.view(np.uint16)
    if exponent is None and data.dtype.kind != "f":
        return 0
    return sum(_count(data[first : first + _CHUNK], exponent) for first in range(0, tensor.count, _CHUNK))


def _count(chunk: npt.NDArray[Any], exponent: np.uint16 | None) -> int:
    if exponent is not None:
        return int(np.count_nonzero((chunk & exponent) == exponent))
    return int(chunk.size - np.count_nonzero(np.isfinite(chunk)))
