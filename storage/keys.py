"""Keys of everything a run stores, relative to `<storage>/<run>`."""

import re
from typing import NamedTuple

EPOCHS = "catalog/epochs/"
RECORDS = "catalog/records/"
LAYERS = "layers/"
PROBES = "catalog/probes/"
FAULTS = "catalog/faults/"
HISTORY = "catalog/history/"

_VERSION = re.compile(rf"{LAYERS}(.+)/(\d{{10}})/(\d{{8}})\.(\d{{6}})/[^/]+")
_CATALOG = re.compile(r"catalog/(?:epochs|life|records|history)/(\d{8})\b")


def epoch_claim(epoch: int) -> str:
    """Object whose exclusive creation claims `epoch`."""
    return f"{EPOCHS}{epoch:08d}.json"


def epoch_life(epoch: int) -> str:
    """Object that `epoch` overwrites as long as it lives."""
    return f"catalog/life/{epoch:08d}.json"


def epoch_of(claim_key: str) -> int:
    """Epoch number of a key made by `epoch_claim`."""
    return int(claim_key.removeprefix(EPOCHS).removesuffix(".json"))


def records_of(epoch: int) -> str:
    """Prefix of the records of `epoch`."""
    return f"{RECORDS}{epoch:08d}/"


def record(epoch: int, seq: int) -> str:
    """Record number `seq` of `epoch`; keys sort as (epoch, seq) does."""
    return f"{records_of(epoch)}{seq:010d}.json"


def seq_of(record_key: str) -> int:
    """Sequence number of a key made by `record`."""
    return int(record_key.rpartition("/")[2].removesuffix(".json"))


def probe(token: str) -> str:
    """Object that start-up probes create, read and delete."""
    return f"{PROBES}{token}"


def fault(address: str) -> str:
    """Evidence that an injected fault has fired."""
    return f"{FAULTS}{address}.json"


def history_of(epoch: int) -> str:
    """Prefix of what `epoch` has recorded."""
    return f"{HISTORY}{epoch:08d}/"


def history(epoch: int, seq: int) -> str:
    """Segment number `seq` of what `epoch` has recorded; keys sort as (epoch, seq) does."""
    return f"{history_of(epoch)}{seq:010d}.arrow"


def version(layer: str, step: int, epoch: int, attempt: int) -> str:
    """Prefix of one layer version."""
    return f"{LAYERS}{layer}/{step:010d}/{epoch:08d}.{attempt:06d}/"


def shard(layer: str, step: int, epoch: int, attempt: int, rank: int, world_size: int) -> str:
    """Shard of one rank."""
    return f"{version(layer, step, epoch, attempt)}{rank:05d}of{world_size:05d}.arrow"


def manifest(layer: str, step: int, epoch: int, attempt: int) -> str:
    """Manifest of a layer version, written last."""
    return f"{version(layer, step, epoch, attempt)}manifest.json"


class VersionKey(NamedTuple):
    """What the key of a layer version's object says of it."""

    layer: str
    step: int
    epoch: int
    attempt: int


def version_of(key: str) -> VersionKey | None:
    """Layer version that the object at `key` belongs to; None if it is no object of one."""
    found = _VERSION.fullmatch(key)
    return VersionKey(found[1], int(found[2]), int(found[3]), int(found[4])) if found else None


def epoch_in_catalog(key: str) -> int | None:
    """Epoch that wrote the claim, life, record or history at `key`; None if it is none of these."""
    found = _CATALOG.match(key)
    return int(found[1]) if found else None
