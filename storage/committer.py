"""Committer: turns layer versions whose shards are stored into restore points, one commit at a time."""

import asyncio
from collections.abc import Callable

from storage.actor_setup import ActorSetup
from storage.assembly import Assembly
from storage.catalog import Catalog, Restorable
from storage.errors import TrainingError
from storage.fault_points import FaultPoints, Point
from storage.journal import Journal
from storage.ledger import Ledger, RestorePoint
from storage.messages import AttemptFacts
from storage.records import Record
from storage.restore_points import RestorePoints
from storage.retention import Rule
from storage.store_health import StoreHealth


class Committer:
    """The run's restore points, and what may become the next one."""

    def __init__(self, setup: ActorSetup, catalog: Catalog, progressed: Callable[[int], None]) -> None:
        """`progressed` hears after each restore point how many steps it was committed after its newest snapshot."""
        self._setup, self._catalog, self._progressed = setup, catalog, progressed
        self.journal = Journal(None)
        self.health = StoreHealth(setup.store_outage_s, lambda kind, what: self.journal.incident(kind, what))
        self._rule = Rule.of(setup.checkpoint)
        self.points = RestorePoints(catalog, self._rule, 0, Restorable([]), self.health)
        self.ledger: Ledger
        self.lock = asyncio.Lock()
        """Held by whoever commits."""
        self.committed = asyncio.Event()
        """Set by every commit; whoever waits for the next one clears it."""
        self._faults = FaultPoints(setup.faults, "actor", catalog.store)
        self._epoch = self._seq = 0
        self._group_facts: AttemptFacts | None = None
        self._stored: list[Assembly] = []
        self._news = asyncio.Event()

    async def open(self, epoch: int) -> Record | None:
        """Rebuild from the catalog, on behalf of `epoch`; returns the newest record.

        Raises:
            FencedError, StoreError: the run cannot be taken on.
        """
        self._epoch = epoch
        await self.health.retrying(self._catalog.fence_older, epoch)
        found = await self.health.retrying(self._catalog.restorable)
        self.points = RestorePoints(self._catalog, self._rule, epoch, found, self.health)
        newest = self.points.newest
        self.journal = Journal(newest)
        for problem in found.problems:
            self.journal.incident("corrupt record", problem)
        if newest is not None:
            self.ledger = Ledger(newest.facts, self._setup.staleness_bound_steps, newest)
            self.ledger.coherent_step = self.points.newest_coherent_step
            await self.commit(self.ledger.committed)
        return newest

    def begin_attempt(self, facts: AttemptFacts) -> None:
        """A worker group goes on from the committed restore point; what is not committed belongs to the past.

        Raises:
            TrainingError: its model is not the one the run began with.
        """
        self._group_facts = facts
        newest = self.points.newest
        if newest is None:
            self.ledger = Ledger(facts.facts, self._setup.staleness_bound_steps, None)
        else:
            _check_same_run(newest, facts)
        self.ledger.begin_attempt()
        self._stored.clear()

    def is_settled(self) -> bool:
        """Whether nothing is stored that is still to be committed."""
        return not self._stored and not self.lock.locked()

    def whole_at(self) -> int | None:
        """Step at which every trained layer is committed, if they are all of one step."""
        steps = {self.ledger.committed.layers[fact.name].step for fact in self.ledger.trained}
        return steps.pop() if len(steps) == 1 else None

    def stored(self, version: Assembly) -> None:
        """All shards of a version are stored."""
        self._stored.append(version)
        self._news.set()

    async def run_forever(self) -> None:
        """At most one commit in flight; whatever has been stored meanwhile goes into the next."""
        while True:
            await self._news.wait()
            self._news.clear()
            async with self.lock:
                await self._commit_what_is_stored()

    async def _commit_what_is_stored(self) -> None:
        while self._stored:
            await self.health.retrying(self._catalog.check_fence, self._epoch)  # a stale epoch writes nothing at all
            batch, self._stored = self._stored, []
            writing = (self.health.retrying(self._catalog.write_manifest, assembly) for assembly in batch)
            for assembly, ref in zip(batch, await asyncio.gather(*writing), strict=True):
                self.ledger.version_durable(assembly.version.layer, ref)
        point = self.ledger.next_restore_point()
        if point is not None:
            self.journal.progressed()
            await self.commit(point)
            self._progressed(self.journal.progress.step - max(ref.step for ref in point.layers.values()))

    async def strike(self, point: Point, step: int) -> None:
        """Fire the fault addressed to this point of the CheckpointActor, if there is one."""
        if self._faults:
            await asyncio.to_thread(self._faults.strike, point, step=step, attempt=self.journal.totals.attempts)

    async def commit(self, point: RestorePoint, *, finished: bool = False) -> None:
        """Write the record of `point`. Callers hold `lock`, or nothing else runs yet.

        Raises:
            FencedError: a newer epoch has been claimed.
            StoreError: the store has failed for too long.
        """
        newest = self.points.newest
        assert newest is not None or self._group_facts is not None
        record = Record(
            epoch=self._epoch,
            seq=self._seq,
            step=point.step,
            layers=point.layers,
            previous=point.previous,
            facts=self.ledger.facts,
            base=newest.base if newest else self._group_facts.base,  # type: ignore[union-attr]
            spec_fingerprint=self._setup.spec_fingerprint,
            staleness_bound_steps=self._setup.staleness_bound_steps,
            totals=self.journal.totals,
            progress=self.journal.snapshot(),
            recoveries=tuple(self.journal.recoveries),
            incidents=tuple(self.journal.incidents),
            finished=finished,
        )
        await self.strike("before_commit", point.step)
        await self.points.commit(record)
        await self.strike("after_commit", point.step)
        self._seq += 1  # only now: a gap would let this epoch commit past its fence
        self.ledger.commit(point)
        self.committed.set()


def _check_same_run(record: Record, facts: AttemptFacts) -> None:
    if record.base.digest != facts.base.digest:
        raise TrainingError(
            f"model.path: expected the weights this run began with ({record.base.source}, {record.base.digest}), "
            f"got {facts.base.source}, {facts.base.digest}; restore them, or give the run another name"
        )
    if record.facts != facts.facts:
        raise TrainingError(
            "model: its layers or their sizes are not those the run began with; give the run another name"
        )
