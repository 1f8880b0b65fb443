"""Parts: how the codecs lay out a payload. Byte arrays of known size, each compressed by zstd where that is shorter.

A payload is the stored length of each part (uint32, little-endian) and the parts, one after the other. A part as long
as its content is the content itself. Zeros may follow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]

_LENGTH = np.dtype("<u4")
_LEVEL = 1  # higher levels are slower and no shorter: what compresses here is skewed bytes, not repetition


def pack(parts: Sequence[Bytes]) -> bytes:
    """Payload of `parts` (1-D, contiguous); the same parts give the same bytes."""
    zstd = pa.Codec("zstd", compression_level=_LEVEL)
    stored = [_shorter(part, zstd.compress(part, asbytes=True)) for part in parts]
    lengths = np.array([len(part) for part in stored], _LENGTH).tobytes()
    return b"".join((lengths, *stored))


def unpack(payload: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """Parts of `sizes` bytes; read-only.

    Raises:
        ValueError, OSError: the payload holds no such parts. Nothing larger than `sizes` is allocated.
    """
    position = len(sizes) * _LENGTH.itemsize
    lengths = np.frombuffer(payload[:position], _LENGTH).tolist()
    if len(lengths) != len(sizes) or position + sum(lengths) > len(payload):
        raise ValueError(f"expected {len(sizes)} parts in a payload of {len(payload)} bytes, got lengths {lengths}")
    parts = []
    for length, size in zip(lengths, sizes, strict=True):
        stored = payload[position : position + length]
        parts.append(np.frombuffer(stored if length == size else _decompressed(stored, size), np.uint8))
        position += length
    return parts


def _shorter(part: Bytes, compressed: bytes) -> Any:
    return compressed if len(compressed) < part.size else part.data


def _decompressed(stored: memoryview, size: int) -> pa.Buffer:
    if len(stored) > size:
        raise ValueError(f"expected a part of at most {size} bytes, got {len(stored)}")
    return pa.Codec("zstd").decompress(stored, decompressed_size=size)
