"""Attempts: the lives of the worker group, each from one pinned plan, begun when what was accepted has landed."""

import asyncio

from storage import keys
from storage.actor_setup import ActorSetup
from storage.committer import Committer
from storage.errors import TrainingError
from storage.messages import AttemptFacts, RestorePlan, Verdict
from storage.object_store import ObjectStore
from storage.planner import RestorePlanner
from storage.probe import write_token
from storage.store_health import RETRY_S
from storage.uploads import Uploads
from storage.worker_group import WorkerGroup
from storage.writer_group import WriterGroup


class Attempts:
    """The present attempt and its worker group; begins the next one."""

    def __init__(
        self,
        setup: ActorSetup,
        store: ObjectStore,
        commits: Committer,
        planner: RestorePlanner,
        uploads: Uploads,
        writers: WriterGroup,
    ) -> None:
        self._setup, self._store, self._commits, self._planner = setup, store, commits, planner
        self._uploads, self._writers = uploads, writers
        self.number = 0
        self.group: WorkerGroup | None = None
        """None when the actor was restarted and has not been told yet who trains."""
        self.cause = "the job was submitted again"
        """Why the next attempt, if there is one, begins."""
        self._coming: WorkerGroup | None = None
        self._plan: RestorePlan | None = None
        self._epoch = self._starts = 0

    def open(self, epoch: int, attempt: int, *, goes_on: bool) -> None:
        """`epoch` takes the run on at `attempt`, which goes on if only the CheckpointActor was restarted."""
        self._epoch, self.number = epoch, attempt
        self._uploads.resume_attempt(attempt)
        if goes_on:
            self.cause = "the CheckpointActor was restarted"

    @property
    def is_restoring(self) -> bool:
        """Whether ranks read a plan, which pins what it names."""
        return self._plan is not None

    def group_starts(self) -> None:
        """A worker group is there and has yet to load its model.

        Raises:
            TrainingError: too many groups in a row got no further.
        """
        if self._starts >= self._setup.attempts_without_progress:
            raise TrainingError(
                f"{self._starts} worker groups in a row failed before their attempt began; last cause: {self.cause}; "
                "mend it and run the same command again"
            )
        self._starts += 1

    def joined(self, facts: AttemptFacts) -> WorkerGroup:
        """The group whose attempt goes on has told a restarted actor who it is."""
        self.group = WorkerGroup.of(facts)
        self._writers.follow(self.group.nodes)
        return self.group

    async def begin(self, facts: AttemptFacts) -> RestorePlan | Verdict:
        """Let accepted uploads land (for a bounded time), then return the plan that all ranks restore from.

        Raises:
            LayerCheckError: the run must stop.
        """
        group = self._coming = WorkerGroup.of(facts)
        await self._writers.inherit()
        self._writers.follow(group.nodes)
        await self._check_writers_see_store()
        await self._writers.drain(self._commits.is_settled, self._setup.checkpoint.drain_s)
        async with self._commits.lock:
            if group is not self._coming:  # its ranks died while it waited here, and others have come since
                return Verdict(kind="FencedError", message="a newer worker group has come; this one stops")
            await self._take_on(group)
            await self._commits.strike("begin_attempt", self._commits.ledger.committed.step)
            self._plan = await self._planner.plan(self.number, self._writers.names)
            return self._plan

    async def _check_writers_see_store(self) -> None:
        """Refuse a local path that is not the same folder on every node."""
        token = await self._commits.health.retrying(write_token, self._store)
        try:
            await self._writers.check_token(token)
        finally:
            await self._commits.health.retrying(self._store.delete, [keys.probe(token)])

    async def _take_on(self, group: WorkerGroup) -> None:
        """Close the attempt before and open the next one, from the committed composite."""
        self._commits.begin_attempt(group.facts)
        self.group = group
        self._starts = 0
        self.number += 1  # before anything is awaited: from here on, nothing of the attempt before is booked
        self._uploads.begin_attempt(self.number, self._epoch)
        await self._planner.check_progress(self.cause)
        recovery = self._planner.recovery(self.number, self.cause) if self.number > 1 else None
        self.cause = "the worker group was restarted"
        self._commits.journal.attempt_began(self._commits.ledger.committed.step, recovery)
        await self._commits.commit(self._commits.ledger.committed)
        self._writers.end_left_behind()  # a stale epoch does not get here: they may be of the epoch that fenced it

    async def restored(self, bad: dict[str, str], outage: str | None) -> RestorePlan | None:
        """The ranks have read the plan: see `CheckpointActor.restored`.

        Raises:
            LayerCheckError: the run must stop.
        """
        if bad:
            async with self._commits.lock:
                await self._planner.fall_back(bad)
                self._plan = await self._planner.plan(self.number, self._writers.names)
        elif outage is not None:
            self._commits.health.fails(outage)
            await asyncio.sleep(RETRY_S)
        else:
            self._commits.health.works()
            self._plan = None
        return self._plan
