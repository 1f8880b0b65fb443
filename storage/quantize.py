"""Block quantization of float32 arrays: every block of elements has bins of its own width.

`SIGNED`: x ~ q * bin with whole q in [-(2^(bits-1) - 1), 2^(bits-1) - 1], so that 0 stays 0 and |error| <= bin / 2.
With 2 bits q is a sign or 0, and |error| <= the block's largest magnitude; see `_signs`.
`ROOT`, for values that are never negative (Adam's second moment): sqrt(x) ~ q * bin with q in [0, 2^bits - 1], and half
a bin in place of q = 0. Also there |error of the root| <= bin / 2; but nothing beside an outlier decodes to 0, by whose
root Adam would divide. But for signs, a block's bin is its largest magnitude (or root) over the largest q, but at least
the smallest normal float32; a block of zeros decodes to zeros, its floor squared being less than any float32.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

TILE = 1 << 16
"""Elements worked on at once, so that they stay in the cache. A whole number of blocks of any size allowed."""

_LEAST_BIN = np.finfo(np.float32).tiny
_SIGN_FROM = np.float32(0.61)
"""Signs begin at this many root mean squares: of a normal distribution that keeps most (Max, 1960)."""
# Added to a float32 below 2^22 in magnitude this leaves it rounded to a whole number, as the low bits of the mantissa.
_TO_WHOLE = np.float32(3 << 22)


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

    @property
    def largest(self) -> int:
        """Largest q."""
        return (1 << self.bits) - 1 if self.scale is Scale.ROOT else (1 << (self.bits - 1)) - 1

    def blocks(self, count: int) -> int:
        """Number of blocks that `count` elements take; the last one may be shorter."""
        return -(-count // self.block)

    def code_bytes(self, count: int) -> int:
        """Size of the codes of `count` elements, whole blocks."""
        return self.blocks(count) * self.block * self.bits // 8


def quantize(grid: Grid, values: Floats, bins: Floats, codes: Bytes) -> None:
    """Quantize `values` (a whole number of blocks, at most `TILE`) into `bins` (1 a block) and `codes`.

    A bin is not finite exactly if the block holds something that has no place on the grid. `values` is overwritten.
    """
    table, packed = values.reshape(-1, grid.block), codes.reshape(bins.size, -1)
    if grid.scale is Scale.SIGNED and grid.bits == 2:
        whole, tops = _signs(table)
        np.maximum(tops, _LEAST_BIN, out=bins)
        _pack_bits(whole, grid.bits, packed)
        return
    tops = np.sqrt(table, out=table).max(axis=1) if grid.scale is Scale.ROOT else np.abs(table).max(axis=1)
    np.maximum(tops * np.float32(1 / grid.largest), _LEAST_BIN, out=bins)
    table *= (1 / bins)[:, None]
    table += _TO_WHOLE if grid.scale is Scale.ROOT else _TO_WHOLE + np.float32(grid.largest)
    _pack_bits(table.view(np.uint32).astype(np.uint8), grid.bits, packed)


def _signs(table: Floats) -> tuple[Bytes, Floats]:
    """Each block of `table` as signs and zeros (0, 1, 2 for -1, 0, 1) times one magnitude; returns both.

    The largest magnitude as the bin would round nearly all to 0. The one taken keeps the inner product of the block
    with what it decodes to: what is lost is noise, and does not shorten a move or a momentum.
    """
    sizes = np.abs(table)
    tops = sizes.max(axis=1)
    sizes *= (1 / np.maximum(tops, _LEAST_BIN))[:, None]  # the squares of what is tiny or huge have no place in float32
    squares = np.einsum("ij,ij->i", sizes, sizes)
    is_kept = sizes > (_SIGN_FROM * np.sqrt(squares / np.float32(table.shape[1])))[:, None]
    sizes *= is_kept
    magnitudes: Floats = tops * np.minimum(squares / np.maximum(sizes.sum(axis=1), _LEAST_BIN), 1)
    whole = is_kept.view(np.uint8) + np.uint8(1)
    whole -= (is_kept & np.signbit(table)).view(np.uint8) << np.uint8(1)
    return whole, magnitudes


def dequantize(grid: Grid, bins: Floats, codes: Bytes, values: Floats) -> None:
    """Inverse of `quantize`, up to its error: fills `values` (a whole number of blocks)."""
    table = values.reshape(-1, grid.block)
    _unpack_bits(codes.reshape(table.shape[0], -1), grid.bits, table)
    if grid.scale is Scale.ROOT:
        np.maximum(table, np.float32(0.5), out=table)
        table *= bins[:, None]
        table *= table
    else:
        table -= np.float32(grid.largest)
        table *= bins[:, None]


def _pack_bits(whole: Bytes, bits: int, packed: Bytes) -> None:
    """Low `bits` of each element of a block; byte i of a block of w bytes holds elements i, i + w, i + 2w, ..."""
    width = packed.shape[1]
    packed[...] = whole[:, :width]
    for place in range(1, 8 // bits):
        packed |= whole[:, place * width : (place + 1) * width] << np.uint8(place * bits)


def _unpack_bits(packed: Bytes, bits: int, table: Floats) -> None:
    width = packed.shape[1]
    mask = np.uint8((1 << bits) - 1)
    for place in range(8 // bits):
        table[:, place * width : (place + 1) * width] = packed >> np.uint8(place * bits) & mask
