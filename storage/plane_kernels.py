"""The loops of byte planes, see `storage.byte_planes`, which checks what these do not."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from storage.compiled import compiled, only_read

Words = npt.NDArray[Any]
Planes = Sequence[npt.NDArray[np.uint8]]

_TILE = 1 << 12
"""Words worked on at once: they stay in the cache from plane to plane."""


def _split(words: Words, left: int, planes: Planes) -> None:
    """Rotate `words` (unsigned) by `left` bits to the left and cut them into bytes, the lowest first."""
    word = words.dtype.type
    back = (8 * len(planes) - left) % (8 * len(planes))
    rotated = np.empty(_TILE, words.dtype)
    for first in range(0, words.size, _TILE):
        tile = words[first : first + _TILE]
        for place in range(tile.size):
            rotated[place] = tile[place] << word(left) | tile[place] >> word(back)
        for plane in range(len(planes)):
            part = planes[plane][first : first + _TILE]
            for place in range(tile.size):
                part[place] = np.uint8(rotated[place] >> word(8 * plane))


def _join(planes: Planes, left: int, words: Words) -> None:
    """Inverse of `_split`: fills `words`."""
    word = words.dtype.type
    back = (8 * len(planes) - left) % (8 * len(planes))
    rotated = np.empty(_TILE, words.dtype)
    for first in range(0, words.size, _TILE):
        tile = words[first : first + _TILE]
        rotated[:] = 0
        for plane in range(len(planes)):
            part = planes[plane][first : first + _TILE]
            for place in range(tile.size):
                rotated[place] |= word(word(part[place]) << word(8 * plane))
        for place in range(tile.size):
            tile[place] = rotated[place] >> word(left) | rotated[place] << word(back)


@cache
def kernels(width: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """`_split` and `_join` for words of `width` bytes."""
    word: Any = {2: types.uint16, 4: types.uint32, 8: types.uint64}[width]
    parts, whole = types.UniTuple(types.uint8[::1], width), types.UniTuple(only_read(types.uint8), width)
    return (
        compiled(_split, types.void(only_read(word), types.int64, parts)),
        compiled(_join, types.void(whole, types.int64, word[::1])),
    )
