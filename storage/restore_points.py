"""The run's retained restore points: committed by this epoch, un-named and swept by retention."""

import asyncio
import time

from storage import keys, retention
from storage.catalog import Catalog
from storage.records import Record
from storage.store_health import StoreHealth

SWEEP_S = 1.0
DELETE_GRACE_S = 10.0
"""Readers that took a key from a record before it was un-named have this long to read it."""


class RestorePoints:
    """Newest first. A record is un-named first; the objects only it needed go after a grace."""

    def __init__(self, catalog: Catalog, keep: int, epoch: int, records: list[Record], health: StoreHealth) -> None:
        self.records = records
        self._catalog, self._keep, self._epoch, self._health = catalog, keep, epoch, health
        self._unnamed: list[tuple[float, str]] = []

    @property
    def newest(self) -> Record | None:
        """The record a restart would use."""
        return self.records[0] if self.records else None

    async def commit(self, record: Record) -> None:
        """Write `record`.

        Raises:
            FencedError: a newer epoch has been claimed.
            StoreError: the store has failed for too long.
        """
        await self._health.retrying(self._catalog.commit, record)
        everything = [record, *self.records]
        self.records = retention.retained(everything, self._keep)
        dropped = [old for old in everything if old not in self.records]
        at = time.monotonic()
        self._unnamed += [(at, keys.record(old.epoch, old.seq)) for old in dropped]
        prefixes = retention.needed_prefixes(dropped) - retention.needed_prefixes(self.records)
        self._unnamed += [(at + DELETE_GRACE_S, prefix) for prefix in sorted(prefixes)]

    async def sweep_ripe(self) -> None:
        """Delete what was un-named long enough ago.

        Raises:
            FencedError: a newer epoch has been claimed.
            StoreError: something stays; it is swept when the run finishes, or by `gc`.
        """
        ripe = [key for at, key in self._unnamed if at <= time.monotonic()]
        self._unnamed = [(at, key) for at, key in self._unnamed if key not in ripe]
        if ripe:
            await asyncio.to_thread(self._delete, ripe)

    async def sweep_everything(self) -> None:
        """Delete every object that no retained restore point needs, whoever left it.

        Raises:
            FencedError, StoreError: as `sweep_ripe`.
        """
        self._unnamed.clear()
        await asyncio.to_thread(self._delete_unnamed)

    def _delete(self, ripe: list[str]) -> None:
        """Delete records, and everything below version prefixes (which end in `/`)."""
        self._catalog.check_fence(self._epoch)
        store = self._catalog.store
        versions = [info.key for key in ripe if key.endswith("/") for info in store.list(key)]
        store.delete([*(key for key in ripe if not key.endswith("/")), *versions])

    def _delete_unnamed(self) -> None:
        self._catalog.check_fence(self._epoch)
        store = self._catalog.store
        store.delete(retention.unnamed([info.key for info in store.list("")], self.records, self._keep))
