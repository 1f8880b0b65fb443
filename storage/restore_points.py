"""The run's retained restore points: committed by this epoch, un-named and swept by retention."""

import asyncio
import time

from storage import keys, retention
from storage.catalog import Catalog, Restorable
from storage.leftovers import Known, Leftovers, delete_leftovers, find_leftovers
from storage.records import Record
from storage.retention import Rule
from storage.store_health import StoreHealth

SWEEP_S = 1.0
DELETE_GRACE_S = 10.0
"""Readers that took a key from a record before it was un-named have this long to read it."""


class RestorePoints:
    """Newest first. A record is un-named first; the objects only it needed go after a grace."""

    def __init__(self, catalog: Catalog, rule: Rule, epoch: int, found: Restorable, health: StoreHealth) -> None:
        """`found`: what earlier epochs committed. Records beyond `rule` are un-named by the first commit."""
        self._catalog, self._rule, self._epoch, self._health = catalog, rule, epoch, health
        self._kept = [retention.Kept(record, ("recent",)) for record in found.records]
        self._unreadable = list(found.unreadable)
        self._unnamed: list[tuple[float, str]] = []
        self._looked_in_attempt: int | None = None
        self._suspects: tuple[float, Leftovers] | None = None

    @property
    def records(self) -> list[Record]:
        """Newest first."""
        return [point.record for point in self._kept]

    @property
    def newest(self) -> Record | None:
        """The record a restart would use."""
        return self._kept[0].record if self._kept else None

    @property
    def newest_coherent_step(self) -> int:
        """Step of the newest restore point whose layers are all of one step; 0 if there is none."""
        return max((record.step for record in self.records if retention.is_coherent(record)), default=0)

    async def commit(self, record: Record) -> None:
        """Write `record`.

        Raises:
            FencedError: a newer epoch has been claimed.
            StoreError: the store has failed for too long.
        """
        await self._health.retrying(self._catalog.commit, record)
        before, everything = retention.needed_prefixes(self._kept), [record, *self.records]
        self._kept = retention.retained(everything, self._rule)
        held = retention.held_by_damage(self._unreadable, self._kept, self._rule)
        dropped = [keys.record(old.epoch, old.seq) for old in everything if old not in self.records]
        dropped += [key for key in self._unreadable if key not in held]
        self._unreadable = held
        at = time.monotonic()
        self._unnamed += [(at, key) for key in dropped]
        prefixes = before - retention.needed_prefixes(self._kept)
        self._unnamed += [(at + DELETE_GRACE_S, prefix) for prefix in sorted(prefixes)]

    async def sweep_ripe(self) -> None:
        """Delete what was un-named long enough ago, and, once an attempt, what earlier ones left.

        Raises:
            FencedError: a newer epoch has been claimed.
            StoreError: something stays; it is swept when the run finishes, or by `gc`.
        """
        now = time.monotonic()
        ripe = [key for at, key in self._unnamed if at <= now and not (key.endswith("/") and self._unreadable)]
        self._unnamed = [(at, key) for at, key in self._unnamed if key not in ripe]
        if ripe:
            await asyncio.to_thread(self._delete, ripe)
        await self._sweep_leftovers()

    async def sweep_everything(self) -> None:
        """Delete everything that no retained restore point needs, whoever left it.

        Raises:
            FencedError, StoreError: as `sweep_ripe`.
        """
        self._unnamed.clear()
        await asyncio.to_thread(self._delete_leftovers, await asyncio.to_thread(self._leftovers))

    async def _sweep_leftovers(self) -> None:
        """Look twice: what is left over both times, a grace apart, is nobody's.

        Its readers, and writers whose upload had just begun, have had the grace. No clock but our own is asked.
        """
        newest = self.newest
        if newest is None or newest.epoch != self._epoch:  # an epoch sweeps after a commit of its own
            return
        if self._looked_in_attempt != newest.totals.attempts:
            self._looked_in_attempt = newest.totals.attempts
            self._suspects = (time.monotonic(), await asyncio.to_thread(self._leftovers))
        elif self._suspects is not None and self._suspects[0] + DELETE_GRACE_S <= time.monotonic():
            (_, seen), self._suspects = self._suspects, None
            if seen:
                await asyncio.to_thread(self._delete_leftovers, seen & await asyncio.to_thread(self._leftovers))

    def _leftovers(self) -> Leftovers:
        return find_leftovers(
            self._catalog.store, lambda: Known(self.records, self._unreadable, self._rule, self._epoch)
        )

    def _delete_leftovers(self, leftovers: Leftovers) -> None:
        self._catalog.check_fence(self._epoch)
        delete_leftovers(self._catalog.store, leftovers)

    def _delete(self, ripe: list[str]) -> None:
        """Delete records, and everything below version prefixes (which end in `/`)."""
        self._catalog.check_fence(self._epoch)
        store = self._catalog.store
        versions = [info.key for key in ripe if key.endswith("/") for info in store.list(key)]
        store.delete([*(key for key in ripe if not key.endswith("/")), *versions])
