"""Trouble with the store: a folder that cannot be written for a while, a failing S3 server, damaged objects."""

import contextlib
import random
import shutil
import time
import uuid
from pathlib import Path
from typing import Protocol

from storage.catalog import Catalog
from storage.local_store import TEMPORARY
from storage.object_store import ObjectStore
from storage.records import Record
from tests.helpers.s3_proxy import Fault, S3Proxy

FAULTS: tuple[Fault, ...] = ("busy", "broken", "reset", "lost_reply", "hang", "cut")


class Outages(Protocol):
    """A way to make a store fail for a while."""

    def strike(self, run: str, rng: random.Random, seconds: float) -> str:
        """Fail for `seconds`; returns the kind of outage, or an empty string when nobody met it."""
        ...


class LocalOutages:
    """A local store whose folder for unfinished files is a file: like a full disk, nothing can be written."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def strike(self, run: str, rng: random.Random, seconds: float) -> str:
        """See `Outages.strike`."""
        folder, aside = self._root / run / TEMPORARY, self._root / f"{run}-aside"
        while not folder.is_file():  # writers make the folder anew
            with contextlib.suppress(OSError):
                folder.rename(aside / uuid.uuid4().hex)
            aside.mkdir(exist_ok=True)
            with contextlib.suppress(OSError):
                folder.write_text("in the way")
        time.sleep(seconds)
        folder.unlink()
        shutil.rmtree(aside)
        return "outage unwritable"


class S3Outages:
    """An S3 server behind a real proxy, which misbehaves in a way that is chosen while it runs."""

    def __init__(self, proxy: S3Proxy) -> None:
        self._proxy = proxy

    def strike(self, run: str, rng: random.Random, seconds: float) -> str:
        """See `Outages.strike`."""
        before, fault = self._proxy.fired.total(), rng.choice(FAULTS)
        self._proxy.begin(fault)
        time.sleep(seconds)
        self._proxy.end()
        return f"outage {fault}" if self._proxy.fired.total() > before else ""


def damage(store: ObjectStore, record: Record, rng: random.Random) -> str:
    """Damage a stored object of the newest restore point that the protocol promises to survive.

    That is: the version before of its layer is young enough. Returns what was done, or an empty string.
    """
    bound, catalog = record.staleness_bound_steps, Catalog(store)
    candidates = [
        ref
        for name, ref in sorted(record.layers.items())
        if ref.manifest_key and name in record.previous and record.step - record.previous[name].step <= bound
    ]
    if not candidates:
        return ""
    key = rng.choice(catalog.read_manifest(rng.choice(candidates)).shards).key
    data = bytearray(store.read(key))
    how = rng.choice(("truncated", "flipped", "deleted"))
    if how == "deleted":
        store.delete([key])
    elif how == "truncated":
        store.put(key, bytes(data[: rng.randrange(len(data))]))
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        store.put(key, bytes(data))
    return f"object {how}"
