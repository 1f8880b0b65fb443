"""Damage, random and aimed: to bytes, to the text of JSON, and to what JSON says."""

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

_INTEGERS = (0, 1, -1, 7, 127, 255, 2**15, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**63))
_DEEP = "deep nesting goes here"


def damaged(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """`data` after one to three mutations; `others` are what may be spliced in."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(_BYTES)(rng, bytearray(data), rng.choice(others))
    return data


def _flip(rng: Random, data: bytearray, _: bytes) -> bytes:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _byte(rng: Random, data: bytearray, _: bytes) -> bytes:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _truncate(rng: Random, data: bytearray, _: bytes) -> bytes:
    return bytes(data[: rng.randrange(len(data) + 1)])


def _extend(rng: Random, data: bytearray, _: bytes) -> bytes:
    return bytes(data) + rng.randbytes(rng.randrange(1, 64))


def _span(rng: Random, data: bytes | bytearray) -> slice:
    first = rng.randrange(len(data) + 1)
    return slice(first, min(len(data), first + rng.choice((1, 4, 8, 24, 64, 512))))


def _cut(rng: Random, data: bytearray, _: bytes) -> bytes:
    del data[_span(rng, data)]
    return bytes(data)


def _double(rng: Random, data: bytearray, _: bytes) -> bytes:
    span = _span(rng, data)
    return bytes(data[: span.stop] + data[span] + data[span.stop :])


def _zero(rng: Random, data: bytearray, _: bytes) -> bytes:
    span = _span(rng, data)
    data[span] = bytes(span.stop - span.start)
    return bytes(data)


def _copy_within(rng: Random, data: bytearray, _: bytes) -> bytes:
    return _graft(rng, data, bytes(data))


def _splice(rng: Random, data: bytearray, other: bytes) -> bytes:
    return bytes(data[: rng.randrange(len(data) + 1)]) + other[rng.randrange(len(other) + 1) :]


def _graft(rng: Random, data: bytearray, other: bytes) -> bytes:
    span = _span(rng, other)
    at = rng.randrange(len(data) + 1)
    data[at : at + span.stop - span.start] = other[span]
    return bytes(data)


def _integer(rng: Random, data: bytearray, _: bytes) -> bytes:
    """A length, offset or count of Arrow's flatbuffers becomes another one: they lie at multiples of four."""
    form = rng.choice(("<h", "<i", "<i", "<q", "<q", "<q"))
    size = struct.calcsize(form)
    if len(data) < size:
        return bytes(data)
    at = rng.randrange(0, len(data) - size + 1, min(size, 4))
    (old,) = struct.unpack_from(form, data, at)
    value = rng.choice((*_INTEGERS, old + 1, old - 1, old * 2, -old)) & (1 << 8 * size) - 1
    data[at : at + size] = value.to_bytes(size, "little")
    return bytes(data)


_BYTES: tuple[Callable[[Random, bytearray, bytes], bytes], ...] = (
    _flip,
    _flip,
    _byte,
    _truncate,
    _extend,
    _cut,
    _double,
    _zero,
    _copy_within,
    _splice,
    _graft,
    _integer,
    _integer,
    _integer,
    _integer,
)


def distorted(rng: Random, document: bytes) -> bytes:
    """A JSON document that still is JSON, mostly, and says something else."""
    value = json.loads(document)
    for _ in range(rng.choice((1, 1, 2))):
        value = _distort(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    depth = rng.choice((150, 300, 200_000))
    text = text.replace(f'"{_DEEP}"'.encode(), b"[" * depth + b"]" * rng.choice((0, depth)))
    if rng.random() < 0.1 and text.startswith(b"{") and len(text) > 2:  # the same key twice
        key, _, _ = text[1:].partition(b":")
        text = b"{" + key + b":" + json.dumps(_hostile(rng, 1)).encode() + b"," + text[1:]
    return text


def _distort(rng: Random, value: Any) -> Any:
    """Walk down a random way, and change what is there."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inner or rng.random() < 0.1:
        return _hostile(rng, value)
    key = rng.choice(inner)
    what = rng.random()
    if what < 0.08:
        del value[key]
    elif what < 0.16 and isinstance(value, list):
        value.insert(rng.randrange(len(value) + 1), value[key])
    elif what < 0.16:
        value[rng.choice(("x", "", key + " ", "format_version"))] = value[key]
    elif what < 0.24 and isinstance(value, list):
        rng.shuffle(value)
    elif what < 0.24:
        value[key] = value[rng.choice(inner)]
    else:
        value[key] = _distort(rng, value[key])
    return value


def _hostile(rng: Random, old: Any) -> Any:
    if isinstance(old, int) and rng.random() < 0.5:
        return old + rng.choice((-1, 1, 2**31, 2**62))
    return rng.choice(
        (
            *_INTEGERS,
            2**64,
            10**4299,
            -(10**4000),
            0.5,
            1e300,
            float("nan"),
            float("inf"),
            None,
            True,
            [],
            {},
            [old] * 3,
            {"x": old},
            "",
            "x" * 100_000,
            "two\nlines",
            "\ud800",
            "../../etc",
            "[red]",
            _DEEP,
        )
    )
