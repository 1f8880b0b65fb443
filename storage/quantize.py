"""Block quantization of floats: every block of elements has bins of its own width.

`SIGNED`: x ~ q * bin with whole q in [-(2^(bits-1) - 1), 2^(bits-1) - 1], so that 0 stays 0 and |error| <= bin / 2.
With 2 bits q is a sign or 0, and |error| <= the block's largest magnitude.
`ROOT`, for values that are never negative (Adam's second moment): sqrt(x) ~ q * bin with q in [0, 2^bits - 1], and half
a bin in place of q = 0. Also there |error of the root| <= bin / 2; but nothing beside an outlier decodes to 0, by whose
root Adam would divide. But for signs, a block's bin is its largest magnitude (or root) over the largest q, but at least
the smallest normal float32; a block of zeros decodes to zeros, its floor squared being less than any float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LARGEST_BLOCK = 1 << 16

_WORDS: Mapping[int, "np.dtype[Any]"] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
"""Types by width: bfloat16, as numpy carries it, and the bits of float32."""


class Scale(Enum):
    """What is cut into bins of equal width."""

    SIGNED = "signed"
    ROOT = "root"


@dataclass(frozen=True)
class Grid:
    """How one tensor is quantized: `bits` (2, 4 or 8) an element, blocks of `block` elements (a power of two)."""

    scale: Scale
    bits: int
    block: int

    def blocks(self, count: int) -> int:
        """Number of blocks that `count` elements take; the last one may be shorter."""
        return -(-count // self.block)

    def code_bytes(self, count: int) -> int:
        """Size of the codes of `count` elements, whole blocks."""
        return self.blocks(count) * self.block * self.bits // 8


def quantize(grid: Grid, values: Array, base: Array | None) -> tuple[Floats, Bytes] | None:
    """Quantize `values`, or their difference from `base`: 1-D arrays of float32, or of bfloat16 as uint16.

    Returns:
        Bins (one a block) and codes (`Grid.code_bytes`); None if something has no place on the grid: infinities, NaN,
        magnitudes from 2^126, and what is negative where the scale is `ROOT`.
    """
    words = _words(values)
    bins, codes = np.empty(grid.blocks(words.size), np.float32), np.empty(grid.code_bytes(words.size), np.uint8)
    quantize_words, _ = loops(words.itemsize)
    fits = quantize_words(words, *_base_words(base, words), *_arguments(grid), bins, codes)
    return (bins, codes) if fits else None


def dequantize(grid: Grid, bins: Floats, codes: Bytes, base: Array | None, values: Array) -> None:
    """Inverse of `quantize`, up to its error: fills `values`.

    Raises:
        ValueError: sizes do not fit together.
    """
    words = _words(values)
    expected = (grid.blocks(words.size), grid.code_bytes(words.size))
    if (bins.size, codes.size) != expected:
        raise ValueError(f"expected {expected} bins and bytes of codes, got {(bins.size, codes.size)}")
    _, dequantize_words = loops(words.itemsize)
    dequantize_words(bins, codes, *_arguments(grid), *_base_words(base, words), words)


def loops(width: int) -> Any:
    """The loops for elements of `width` bytes; the first call takes the seconds of compiling them."""
    from storage.quantize_kernels import kernels  # noqa: PLC0415 - numba, see `storage.compiled`

    return kernels(width)


def _arguments(grid: Grid) -> tuple[bool, int, int]:
    return grid.scale is Scale.ROOT, grid.bits, grid.block


def _base_words(base: Array | None, words: Array) -> tuple[Array, int]:
    """Words of the base, none without one, and the shift that makes float32 of words."""
    found = words[:0] if base is None else _words(base)
    if base is not None and (found.dtype, found.size) != (words.dtype, words.size):
        raise ValueError(f"expected a base of {words.size} x {words.itemsize} bytes, got {base.size} x {base.itemsize}")
    return found, 8 * (4 - words.itemsize)


def _words(values: Array) -> Array:
    return np.ascontiguousarray(values).view(_WORDS[values.itemsize])
