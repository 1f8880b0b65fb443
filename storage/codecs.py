"""Codecs: how a chunk of elements becomes the payload of a row, and back. A row names its codec.

| name | payload | error |
|---|---|---|
| `raw` | the elements | none |
| `planes` | byte planes, compressed | none |
| `blocks-<bits>x<block>` | signed block quantization | half a bin |
| `roots-<bits>x<block>` | block quantization of the square root | half a bin of the root |
| `delta-<bits>x<block>` | signed block quantization of the difference from the base version | half a bin |

To these errors comes the rounding of float32 arithmetic and to the element's type: at most 2^-22 (float32) or 2^-8
(bfloat16) of the largest of the element, its base, what it decodes to, and the smallest normal number. Blocks start
at a chunk's first element, and a chunk stands alone but for the base version's values of the same elements, whose
digest a `delta` payload begins with.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from storage.byte_planes import encode_planes, open_planes
from storage.parts import pack, unpack
from storage.quantize import LARGEST_BLOCK, Floats, Grid, Scale, dequantize, loops, quantize
from storage.shard_format import CODEC_RAW, DTYPES, MAX_EXPANSION, ShardTensor

Array = npt.NDArray[np.generic]

Base = Callable[[str, int, int], Array]
"""The base version: name of a parameter, first element, count -> these elements of the flattened parameter.

It raises ValueError or KeyError if it knows no such parameter.
"""

Fill = Callable[[Array], None]
"""Puts the elements of a payload into a writable, contiguous array of their number and type; nothing can fail then."""

FLOATS = ("float32", "bfloat16")
"""Types that can be quantized."""

_QUANTIZED = re.compile(r"(blocks|roots|delta)-([248])x([1-9][0-9]{0,5})")
_SIGNED_TYPES = ("float64", "float32", "float16", "bfloat16")


def base_of(tensors: Iterable[ShardTensor]) -> Base:
    """Base version from slices of parameters: it knows their elements only."""
    slices = {tensor.name: tensor for tensor in tensors}

    def elements(name: str, first: int, count: int) -> Array:
        start = first - slices[name].first
        return slices[name].data[start : start + count]

    return elements


class Codec(Protocol):
    """One way to encode chunks; the same input gives the same bytes."""

    @property
    def name(self) -> str:
        """What rows call it."""

    @property
    def needs_base(self) -> bool:
        """Whether it encodes the difference from the base version."""

    def encode(self, values: Array, dtype: str, base: Array | None) -> bytes | None:
        """Payload of `values` (1-D, contiguous, of type `DTYPES[dtype]`), or None if the codec has no place for them.

        `base` has the same shape and type; it is given exactly if `needs_base`.
        """

    def open(self, payload: memoryview, dtype: str, count: int, base: Callable[[], Array] | None) -> Fill:
        """Check that `payload` holds `count` elements, uncompress it, and return what decodes them.

        `base` gives the base's elements: it is asked at once and again by what is returned, whose target may be the
        very memory that holds the base.

        Raises:
            ValueError, OSError: it does not hold them, or was encoded against another base.
        """


@lru_cache
def codec_named(name: str) -> Codec:
    """The codec of that name, other than `raw`.

    Raises:
        ValueError: there is none.
    """
    if name == Planes.name:
        return Planes()
    match = _QUANTIZED.fullmatch(name)
    block = int(match[3]) if match else 0
    if match is None or block & (block - 1) or not 8 <= block <= LARGEST_BLOCK:
        raise ValueError(f"unknown codec {name!r:.40}")
    grid = Grid(Scale.ROOT if match[1] == "roots" else Scale.SIGNED, int(match[2]), block)
    return Quantized(name, grid, needs_base=match[1] == "delta")


def open_payload(payload: memoryview, codec: str, dtype: str, count: int, base: Callable[[], Array] | None) -> Fill:
    """As `Codec.open`, for any row.

    Raises:
        ValueError, OSError: as `Codec.open`; or the elements would be more than `MAX_EXPANSION` times the payload.
    """
    if codec == CODEC_RAW:
        return partial(_copy, _raw(payload, dtype, count))
    size = count * DTYPES[dtype].itemsize
    if size > len(payload) * MAX_EXPANSION:
        raise ValueError(f"expected at most {len(payload) * MAX_EXPANSION} bytes of elements, got {size}")
    return codec_named(codec).open(payload, dtype, count, base)


def decode(payload: memoryview, codec: str, dtype: str, count: int, base: Array | None) -> Array:
    """Elements of a row; those of a `raw` one are a view of the payload, perhaps not aligned.

    Raises:
        ValueError, OSError: as `open_payload`.
    """
    if codec == CODEC_RAW:
        return _raw(payload, dtype, count)
    fill = open_payload(payload, codec, dtype, count, None if base is None else lambda: base)
    found = np.empty(count, DTYPES[dtype])
    fill(found)
    return found


def _raw(payload: memoryview, dtype: str, count: int) -> Array:
    size = count * DTYPES[dtype].itemsize
    if len(payload) != size:
        raise ValueError(f"expected {size} bytes of elements, got {len(payload)}")
    return np.frombuffer(payload, DTYPES[dtype])


def _copy(values: Array, target: Array) -> None:
    np.copyto(target.view(np.uint8), values.view(np.uint8))  # as bytes: what is not aligned would go by elements


def _least_bytes(values: Array) -> int:
    """Smallest payload that may stand for `values`: so no file can promise more than `MAX_EXPANSION` times its size."""
    return -(-values.nbytes // MAX_EXPANSION)


class Planes:
    """Byte planes: exact, for every type."""

    name = "planes"
    needs_base = False

    def encode(self, values: Array, dtype: str, base: Array | None) -> bytes | None:
        """See `Codec`."""
        return encode_planes(values, signed=dtype in _SIGNED_TYPES).ljust(_least_bytes(values), b"\0")

    def open(self, payload: memoryview, dtype: str, count: int, base: Callable[[], Array] | None) -> Fill:
        """See `Codec`."""
        return open_planes(payload, DTYPES[dtype].itemsize, count, signed=dtype in _SIGNED_TYPES)


@dataclass(frozen=True)
class Quantized:
    """Block quantization of the elements, or of their difference from the base version."""

    name: str
    grid: Grid
    needs_base: bool

    def encode(self, values: Array, dtype: str, base: Array | None) -> bytes | None:
        """See `Codec`. There is no place for other types than `FLOATS`, nor for values at the end of their range."""
        quantized = quantize(self.grid, values, base) if dtype in FLOATS else None
        if quantized is None:
            return None
        bins, codes = quantized
        return (_base_digest(base) + pack([_planes(bins), codes])).ljust(_least_bytes(values), b"\0")

    def open(self, payload: memoryview, dtype: str, count: int, base: Callable[[], Array] | None) -> Fill:
        """See `Codec`."""
        if dtype not in FLOATS:
            raise ValueError(f"{self.name}: expected one of {', '.join(FLOATS)}, got {dtype}")
        expected = _base_digest(base() if base else None)
        if bytes(payload[: len(expected)]) != expected:
            raise ValueError(
                f"{self.name}: encoded against another base version than this model's; "
                "restore the weights that the run began with"
            )
        loops(DTYPES[dtype].itemsize)  # now, as it may take seconds or fail
        grid = self.grid
        planes, codes = unpack(payload[len(expected) :], [4 * grid.blocks(count), grid.code_bytes(count)])

        def fill(target: Array) -> None:
            bins = np.ascontiguousarray(planes.reshape(4, -1).T).view(np.float32).ravel()
            dequantize(grid, bins, codes, base() if base else None, target)

        return fill


def _planes(bins: Floats) -> npt.NDArray[np.uint8]:
    """Byte planes, one after the other."""
    return np.ascontiguousarray(bins.view(np.uint8).reshape(-1, 4).T).ravel()


def _base_digest(base: Array | None) -> bytes:
    """XXH3-64 of the base's elements; empty without a base."""
    return b"" if base is None else xxhash.xxh3_64_digest(np.ascontiguousarray(base).view(np.uint8).data)
