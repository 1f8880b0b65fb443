"""Byte planes: exact. The first bytes of all elements, then the second ones, and so on, each plane compressed.

The exponents of weights and moments are alike, their mantissas are noise: planes keep the two apart. The sign is moved
behind the mantissa, so that the exponent fills a plane of its own.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from storage.parts import pack, unpack

Array = npt.NDArray[np.generic]

_WORDS: Mapping[int, "np.dtype[np.unsignedinteger]"] = {
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


def encode_planes(values: Array, *, signed: bool) -> bytes:
    """Payload of `values` (1-D, contiguous); `signed` if the highest bit of its elements is a sign."""
    width = values.dtype.itemsize
    if signed:
        values = _rotated(values.view(_WORDS[width]), left=1)
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, width).T)
    return pack(list(planes))


def decode_planes(payload: memoryview, dtype: "np.dtype[np.generic]", count: int, *, signed: bool) -> Array:
    """Inverse of `encode_planes`: `count` elements of type `dtype`.

    Raises:
        ValueError, OSError: as `storage.parts.unpack`.
    """
    width = dtype.itemsize
    elements = np.empty((count, width), np.uint8)
    for place, plane in enumerate(unpack(payload, [count] * width)):
        elements[:, place] = plane
    words = elements.reshape(-1)
    return (_rotated(words.view(_WORDS[width]), left=8 * width - 1) if signed else words).view(dtype)


def _rotated(words: npt.NDArray[np.unsignedinteger], *, left: int) -> npt.NDArray[np.unsignedinteger]:
    bits = 8 * words.dtype.itemsize
    rotated = words << words.dtype.type(left)
    rotated |= words >> words.dtype.type(bits - left)
    return rotated
