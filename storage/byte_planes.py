"""Byte planes: exact. The first bytes of all elements, then the second ones, and so on, each plane compressed.

The exponents of weights and moments are alike, their mantissas are noise: planes keep the two apart. The sign is moved
behind the mantissa, so that the exponent fills a plane of its own.
"""

from collections.abc import Callable
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


def open_planes(payload: memoryview, width: int, count: int, *, signed: bool) -> Callable[[Array], None]:
    """Inverse of `encode_planes`: returns what fills an array of `count` elements of `width` bytes.

    Raises:
        ValueError, OSError: as `storage.parts.unpack`.
    """
    planes = unpack(payload, [count] * width)
    if width == 1:
        return lambda target: np.copyto(target.view(np.uint8), planes[0])
    _, join = _kernels(width)
    return lambda target: join(tuple(planes), int(signed), target.view(f"<u{width}"))


def _kernels(width: int) -> Any:
    from storage.plane_kernels import kernels  # noqa: PLC0415 - numba, see `storage.compiled`

    return kernels(width)
