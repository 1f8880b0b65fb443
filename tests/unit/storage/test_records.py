"""Documents of the catalog: sealed, and what was written by format version 1 stays readable."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import CorruptObjectError
from storage.records import EpochClaim, EpochLife, Fence, Manifest, Record, Sealed, Stored, digest_of
from tests.helpers.records import golden_documents

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS: list[type[Sealed]] = [Record, Manifest, EpochClaim, EpochLife, Fence]


@pytest.mark.parametrize("kind", KINDS)
def test_golden_v1_is_still_read(kind: type[Sealed]) -> None:
    name = f"{kind.__name__}_v1.json"
    assert kind.from_bytes(name, (GOLDEN / name).read_bytes()) == golden_documents()[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_sealed(kind: type[Sealed]) -> None:
    document = golden_documents()[kind]
    data = bytearray(document.to_bytes())
    assert kind.from_bytes("key", bytes(data)) == document
    for position in range(len(data)):
        bit = 1 << position % 8
        data[position] ^= bit
        with pytest.raises(CorruptObjectError, match="key: expected digest"):
            kind.from_bytes("key", bytes(data))
        data[position] ^= bit


@given(st.binary(max_size=200), st.booleans())
def test_noise_is_no_document(noise: bytes, sealed: bool) -> None:
    data = b'{"digest":"%s",' % digest_of(b"{" + noise).encode() + noise if sealed else noise
    for kind in KINDS:
        with pytest.raises(CorruptObjectError, match="key: "):
            kind.from_bytes("key", data)


@pytest.mark.parametrize(
    ("kind", "old", "new", "problem"),
    [
        (Record, '"embedding":{"step":0', '"head":{"step":0', "expected a version of every layer"),
        (Record, '"block.0":{"step":7', '"block.0":{"step":9223372036854775807', "no layer newer than"),
        (Record, '"step":7,', '"step":9223372036854775808,', "less than 9223372036854775808"),
        (Record, '"mean_age":0.5', '"mean_age":NaN', "finite number"),
        (Manifest, '"rank":1', '"rank":0', "one shard of each of 2 ranks"),
        (Manifest, '"world_size":2', '"world_size":4611686018427387904', "one shard of each"),
        (EpochClaim, '"steps":1', '"steps":Infinity', "not JSON compliant"),
        (EpochLife, '"beat":77', '"beat":' + "[" * 100_000, "recursion limit"),
        (EpochLife, '"beat":77', '"beat":77,"' + "x" * 100_000 + '":1', "xxx"),
    ],
)
def test_a_sealed_document_that_makes_no_sense_is_refused_in_one_short_line(
    kind: type[Sealed], old: str, new: str, problem: str
) -> None:
    text = Stored.to_bytes(golden_documents()[kind]).decode()
    assert old in text
    text = text.replace(old, new)
    with pytest.raises(CorruptObjectError, match=problem) as caught:
        kind.from_bytes("key", b'{"digest":"%s",%s' % (digest_of(text.encode()).encode(), text[1:].encode()))
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
