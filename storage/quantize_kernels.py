"""The loops of block quantization, see `storage.quantize`, which checks what these do not.

Elements come as words: float32 as uint32; bfloat16 as uint16, the upper half of a float32, with a `shift` of 16.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from storage.compiled import compiled, inlined, only_read

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

_LEAST_BIN = np.finfo(np.float32).tiny
_SIGN_FROM = np.float32(0.61)
"""Signs begin at this many root mean squares: of a normal distribution that keeps most (Max, 1960)."""
_TO_WHOLE = np.float32(3 << 22)
"""Added to a float32 below 2^22 in magnitude it leaves that rounded to a whole number, as the mantissa's low bits."""
_TOO_LARGE = np.float32(2.0**126).view(np.uint32)
"""Beyond it arithmetic on the grid might overflow. As bits it is less than infinity and NaN, more than any smaller."""
_NO_SIGN = np.uint32(0x7FFFFFFF)
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)


@inlined
def _widen(words: Words, shift: int, bit_patterns: Words) -> None:
    """Elements as float32, exactly."""
    for place in range(words.size):
        bit_patterns[place] = np.uint32(words[place]) << np.uint32(shift)


@inlined
def _narrow(bit_patterns: Words, shift: int, words: Words) -> None:
    """Floats as elements, rounded to the nearest (ties to even)."""
    for place in range(words.size):
        pattern = bit_patterns[place]
        if shift:
            pattern = (pattern + ((pattern >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
        words[place] = pattern


@inlined
def _top(bit_patterns: Words, mask: np.uint32) -> np.uint32:
    """Largest of the masked bit patterns: the order of floats that are not negative."""
    top = np.uint32(0)
    for place in range(bit_patterns.size):
        top = max(top, np.uint32(bit_patterns[place] & mask))
    return np.uint32(top)


@inlined
def _to_whole(values: Floats, top: np.float32, is_root: bool, largest: np.float32, whole: Bytes) -> np.float32:
    """A block, or its roots, as whole numbers (`whole`: from 0 on) of bins; returns the bin. Overwrites `values`."""
    offset = _TO_WHOLE if is_root else _TO_WHOLE + largest
    if is_root:
        top = np.sqrt(top)
        for place in range(values.size):
            values[place] = np.sqrt(values[place])
    bin = max(top * (_ONE / largest), _LEAST_BIN)
    inverse = _ONE / bin
    for place in range(values.size):
        values[place] = values[place] * inverse + offset
    bit_patterns = values.view(np.uint32)
    for place in range(values.size):
        whole[place] = np.uint8(bit_patterns[place])
    return bin


@inlined
def _sum(terms: Floats) -> np.float32:
    """Sum of a power of two of terms, in an order that is the same on every processor; overwrites them."""
    half = terms.size // 2
    while half:
        for place in range(half):
            terms[place] += terms[half + place]
        half //= 2
    return np.float32(terms[0])


@inlined
def _to_signs(values: Floats, top: np.float32, sizes: Floats, whole: Bytes) -> np.float32:
    """A block as signs and zeros (`whole`: 0, 1, 2 for -1, 0, 1) times one magnitude, which is returned.

    `top`, the largest magnitude, would round nearly all to 0. The one taken keeps the inner product of the block with
    what it decodes to: what is lost is noise, and does not shorten a move or a momentum.
    """
    inverse = _ONE / max(top, _LEAST_BIN)  # the squares of what is tiny or huge have no place in float32
    for place in range(values.size):
        sizes[place] = np.square(values[place] * inverse)
    squares = _sum(sizes)
    limit = _SIGN_FROM * np.sqrt(squares / np.float32(values.size))
    for place in range(values.size):
        size = abs(values[place]) * inverse
        is_kept = size > limit
        sizes[place] = size if is_kept else _ZERO
        whole[place] = np.uint8(1) + np.uint8(is_kept) - (np.uint8(is_kept & (values[place] < 0)) << np.uint8(1))
    return max(top * min(squares / max(_sum(sizes), _LEAST_BIN), _ONE), _LEAST_BIN)


@inlined
def _pack_bits(whole: Bytes, bits: int, packed: Bytes) -> None:
    """Low `bits` of each element of a block; byte i of a block of w bytes holds elements i, i + w, i + 2w, ..."""
    packed[:] = whole[: packed.size]
    for part in range(1, 8 // bits):
        for place in range(packed.size):
            packed[place] |= whole[part * packed.size + place] << np.uint8(part * bits)


@inlined
def _unpack_bits(packed: Bytes, bits: int, values: Floats) -> None:
    mask = np.uint8((1 << bits) - 1)
    for part in range(8 // bits):
        for place in range(packed.size):
            values[part * packed.size + place] = np.float32((packed[place] >> np.uint8(part * bits)) & mask)


def _quantize(
    words: Words, base: Words, shift: int, is_root: bool, bits: int, block: int, bins: Floats, codes: Bytes
) -> bool:
    """Quantize `words`, or their difference from `base` unless that is empty, into `bins` (1 a block) and `codes`.

    Returns:
        False, with nothing of use in `bins` and `codes`, if something has no place on the grid.
    """
    bit_patterns = np.empty(block, np.uint32)
    values, scratch, whole = bit_patterns.view(np.float32), np.empty(block, np.float32), np.empty(block, np.uint8)
    largest = np.float32((1 << bits) - 1 if is_root else (1 << (bits - 1)) - 1)
    width = block * bits // 8
    for index in range(bins.size):
        first, end = index * block, min((index + 1) * block, words.size)
        used = end - first
        _widen(words[first:end], shift, bit_patterns)
        bit_patterns[used:] = 0
        if base.size:
            if _top(bit_patterns, _NO_SIGN) >= _TOO_LARGE:
                return False
            _widen(base[first:end], shift, scratch.view(np.uint32))
            for place in range(used):
                values[place] -= scratch[place]
        elif is_root:
            for place in range(used):
                values[place] += _ZERO  # -0 becomes 0; as bits, what is negative is larger than any number
        bits_of_top = _top(bit_patterns, np.uint32(0xFFFFFFFF) if is_root else _NO_SIGN)
        if bits_of_top >= _TOO_LARGE:
            return False
        top = np.uint32(bits_of_top).view(np.float32)
        if bits == 2 and not is_root:
            bins[index] = _to_signs(values, top, scratch, whole)
        else:
            bins[index] = _to_whole(values, top, is_root, largest, whole)
        _pack_bits(whole, bits, codes[index * width : (index + 1) * width])
    return True


def _dequantize(
    bins: Floats, codes: Bytes, is_root: bool, bits: int, block: int, base: Words, shift: int, words: Words
) -> None:
    """Inverse of `_quantize`, up to its error: fills `words`."""
    bit_patterns = np.empty(block, np.uint32)
    values, scratch = bit_patterns.view(np.float32), np.empty(block, np.float32)
    largest = np.float32((1 << (bits - 1)) - 1)
    width = block * bits // 8
    for index in range(bins.size):
        first, end = index * block, min((index + 1) * block, words.size)
        used = end - first
        _unpack_bits(codes[index * width : (index + 1) * width], bits, values)
        for place in range(block):
            if is_root:
                root = max(values[place], _HALF) * bins[index]
                values[place] = root * root
            else:
                values[place] = (values[place] - largest) * bins[index]
        if base.size:
            _widen(base[first:end], shift, scratch.view(np.uint32))
            for place in range(used):
                values[place] += scratch[place]
        _narrow(bit_patterns, shift, words[first:end])


_GRID = (types.boolean, types.int64, types.int64)  # is_root, bits, block


@cache
def kernels(width: int) -> tuple[Callable[..., bool], Callable[..., None]]:
    """`_quantize` and `_dequantize` for elements of `width` bytes."""
    word: Any = {2: types.uint16, 4: types.uint32}[width]
    source = (only_read(word), types.int64)  # with its shift
    return (
        compiled(_quantize, types.boolean(only_read(word), *source, *_GRID, types.float32[::1], types.uint8[::1])),
        compiled(_dequantize, types.void(only_read(types.float32), only_read(types.uint8), *_GRID, *source, word[::1])),
    )
