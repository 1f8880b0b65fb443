"""Byte planes: exact. The first bytes of all elements, then the second ones, and so on, each plane compressed.

The exponents of weights and moments are alike, their mantissas are noise: planes keep the two apart. The sign is moved
behind the mantissa, so that the exponent fills a plane of its own.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from storage.parts import pack, unpack

Array = npt.NDArray[np.generic]


def encode_planes(values: Array, *, signed: bool) -> bytes:
    """Payload of `values` (1-D, contiguous); `signed` if the highest bit of its elements is a sign."""
    if values.itemsize == 1:
        return pack([values.view(np.uint8)])
    split, _ = _kernels(values.itemsize)
    planes = np.empty((values.itemsize, values.size), np.uint8)
    split(values.view(f"<u{values.itemsize}"), int(signed), tuple(planes))
    return pack(list(planes))


def decode_planes(payload: memoryview, dtype: "np.dtype[np.generic]", count: int, *, signed: bool) -> Array:
    """Inverse of `encode_planes`: `count` elements of type `dtype`.

    Raises:
        ValueError, OSError: as `storage.parts.unpack`.
    """
    planes = unpack(payload, [count] * dtype.itemsize)
    if dtype.itemsize == 1:
        return planes[0].view(dtype).copy()
    _, join = _kernels(dtype.itemsize)
    words = np.empty(count, f"<u{dtype.itemsize}")
    join(tuple(planes), int(signed), words)
    return words.view(dtype)


def _kernels(width: int) -> Any:
    from storage.plane_kernels import kernels  # noqa: PLC0415 - numba, see `storage.compiled`

    return kernels(width)
