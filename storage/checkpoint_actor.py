"""CheckpointActor: decides what to persist, follows what becomes durable, commits restore points. Never sees a tensor.

Its event loop never waits for storage: everything blocking runs in threads.
"""

import asyncio
import contextlib
import gc
import sys
import uuid
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

import ray

from storage.actor_setup import ActorSetup
from storage.assembly import Assembly
from storage.attempts import Attempts
from storage.catalog import Catalog
from storage.committer import Committer
from storage.errors import FencedError, LayerCheckError, StoreError, TrainingError
from storage.liveness import BEAT_S
from storage.messages import AttemptFacts, LiveStatus, Order, Reply, Report, RestorePlan, Verdict
from storage.object_store import open_object_store
from storage.pacer import Pacer
from storage.planner import RestorePlanner
from storage.preemption import nodes_given_notice
from storage.recorder import Recorder
from storage.records import EpochClaim, EpochLife
from storage.restore_points import SWEEP_S
from storage.uploads import Uploads
from storage.writer_group import WriterGroup

NOTICE_S = 1.0
"""Time between two questions whether a node will be taken away."""

SWITCH_S = 0.0005
"""Time after which a thread makes room for another: the event loop may have to wait for all that talk to the store."""

STANDING_S = 0.2
"""Longest wait for a restore point before ranks that stand still are answered."""


def keep_loop_free() -> None:
    """Keep whatever else this process does from holding its event loop up."""
    gc.freeze()  # what is imported stays: to look through it for garbage would stop every thread for 0.1 s
    sys.setswitchinterval(SWITCH_S)


class CheckpointActor:
    """One per run. Restarted by Ray it claims a new epoch and rebuilds itself from the catalog and the ShardWriters."""

    def __init__(self, setup: ActorSetup) -> None:
        keep_loop_free()
        self._setup, self._options = setup, setup.checkpoint
        self._store = open_object_store(setup.storage, setup.run)
        self._catalog = Catalog(self._store)
        self._pacer = Pacer(self._options, setup.in_flight_limit_bytes, setup.encoded_share)
        self._commits = Committer(setup, self._catalog, self._pacer.committed)
        planner = RestorePlanner(self._commits, self._catalog, setup.attempts_without_progress)
        self._recorder = Recorder(self._catalog, self._commits.health)
        self._uploads = Uploads(self._commits, self._take_stored, self._give_up)
        self._writers = WriterGroup(setup, self._uploads, self._give_up)
        self._attempts = Attempts(setup, self._store, self._commits, planner, self._uploads, self._writers)
        self._started: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._verdict: Verdict | None = None
        self._epoch = 0
        self._state = "starting"

    # --- life

    async def start(self) -> int:
        """Claim an epoch and rebuild from the catalog; returns the epoch.

        Raises:
            FencedError, StoreError, CorruptObjectError: the run cannot be taken on.
        """
        if self._started is None:
            self._started = asyncio.get_running_loop().create_task(self._start())
        await self._started
        return self._epoch

    async def _is_usable(self) -> bool:
        """Start if need be; False when there is a verdict, because then there may be nothing else."""
        try:
            await self.start()
        except LayerCheckError as error:  # after a restart: the driver has seen its own call of `start` succeed
            self._give_up(error)
        return self._verdict is None

    async def _start(self) -> None:
        setup = self._setup
        claim = EpochClaim(
            epoch=0,
            nonce=uuid.uuid4().hex,
            driver=setup.driver,
            where=setup.where,
            claimed_at=datetime.now(UTC).isoformat(timespec="seconds"),
            spec=setup.spec,
            spec_fingerprint=setup.spec_fingerprint,
            data_fingerprint=setup.data_fingerprint,
        )
        self._epoch = (await self._commits.health.retrying(self._catalog.claim, claim)).epoch
        self._recorder.open(self._epoch)
        self._writers.open(self._epoch)
        self._spawn(self._show_life())
        newest = await self._commits.open(self._epoch)
        goes_on = ray.get_runtime_context().was_current_actor_reconstructed
        self._attempts.open(self._epoch, newest.totals.attempts if newest else 0, goes_on=goes_on)
        await self._writers.inherit()  # asked from now on, they do not end before the workers are there
        self._spawn(self._commits.run_forever())
        self._spawn(self._recorder.run_forever())
        self._spawn(self._sweep_forever())
        self._spawn(self._watch_for_notices())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the verdict carries it to the driver's exit code
                self._give_up(error)

        self._tasks.append(asyncio.get_running_loop().create_task(guarded()))

    def _take_stored(self, assembly: Assembly) -> None:
        self._pacer.encoded(assembly.version.layer, assembly.bytes)
        self._recorder.stored(assembly)

    def _give_up(self, error: Exception) -> None:
        if self._verdict is None:
            self._verdict = Verdict(kind=type(error).__name__, message=str(error))

    async def _show_life(self) -> None:
        """Beat; a stale epoch learns here at the latest that it is fenced, and shows no life any more."""
        beat = 0
        while True:
            beat += 1
            with contextlib.suppress(StoreError):  # who cannot be heard is taken for dead, and fenced
                await asyncio.to_thread(self._catalog.show_life, EpochLife(epoch=self._epoch, beat=beat))
            await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        """The driver is done: end its ShardWriters and show the epoch's end."""
        for task in self._tasks:
            task.cancel()
        self._writers.kill()
        with contextlib.suppress(StoreError, FencedError):
            await asyncio.to_thread(self._catalog.show_life, EpochLife(epoch=self._epoch, beat=0, ended=True))
        with contextlib.suppress(StoreError, FencedError):
            await self._recorder.close()

    async def verdict(self) -> Verdict | None:
        """Why the run must stop, if it must."""
        return self._verdict

    async def live(self) -> LiveStatus:
        """How the run stands this moment."""
        newest, journal = self._commits.points.newest, self._commits.journal
        return LiveStatus(
            state=self._state,
            step=journal.progress.step,
            loss=journal.progress.loss,
            tokens_per_s=journal.tokens_per_s(),
            restore_point=newest.step if newest else 0,
            max_age=max(newest.ages().values(), default=0) if newest else 0,
            bytes_per_s=journal.bytes_per_s(),
        )

    async def note_failure(self, cause: str) -> None:
        """Why the worker group is about to be restarted."""
        await self._is_usable()
        self._commits.journal.failed()
        self._attempts.cause, self._state = cause, "recovering"

    async def note_incident(self, kind: str, what: str) -> None:
        """Something that the user should know."""
        await self._is_usable()
        self._commits.journal.incident(kind, what)

    # --- attempts

    async def group_starts(self) -> Verdict | None:
        """A worker group is there and has yet to load its model: ends a run whose groups never get beyond that."""
        if await self._is_usable():
            try:
                self._attempts.group_starts()
            except TrainingError as error:
                self._give_up(error)
        return self._verdict

    async def begin_attempt(self, facts: AttemptFacts) -> RestorePlan | Verdict:
        """Let accepted uploads land (for a bounded time), then return the plan that all ranks restore from."""
        if not await self._is_usable():
            return self._present_verdict()
        self._state = "recovering" if self._attempts.number else "starting"
        try:
            return await self._attempts.begin(facts)
        except LayerCheckError as error:
            self._give_up(error)
        return self._present_verdict()

    def _present_verdict(self) -> Verdict:
        assert self._verdict is not None
        return self._verdict

    async def restored(self, attempt: int, bad: dict[str, str], outage: str | None) -> RestorePlan | Verdict | None:
        """The ranks have read the plan; `bad` tells what is wrong with some layers' shards.

        `outage`: the store did not let a rank read what may well be there.

        Returns a plan without these versions, or the same plan to go on reading after an outage, or None when training
        may go on from the present one.
        """
        if not await self._is_usable():
            return self._verdict
        if attempt != self._attempts.number:
            return _stale_attempt(attempt, self._attempts.number)
        try:
            plan = await self._attempts.restored(bad, outage)
        except LayerCheckError as error:
            self._give_up(error)
            return self._verdict
        if plan is None:
            self._state = "training"
        return plan

    # --- ticks

    async def reached(self, attempt: int, step: int) -> None:
        """Training has done `step`, at which there is nothing else to report."""
        if await self._is_usable() and attempt == self._attempts.number:
            self._commits.journal.reached(step)

    async def report(self, report: Report) -> Reply:
        """Take the sums of a tick; answer with what to persist and how far the restore point is."""
        if not await self._is_usable():
            return Reply(verdict=self._verdict)
        if report.attempt != self._attempts.number:
            return Reply(verdict=_stale_attempt(report.attempt, self._attempts.number))
        self._commits.journal.report(report)  # even without the group's facts
        group = self._attempts.group
        if group is None:
            if report.attempt_facts is None:
                return Reply(restore_point=self._commits.ledger.committed.step, needs_attempt_facts=True)
            group = self._attempts.joined(report.attempt_facts)
        await self._commits.strike("report", report.step)
        self._state = "holding for storage" if report.hold else "flushing" if report.flush else "training"
        self._uploads.take_report(report, self._epoch, self._writers, group.world_size)
        ledger = self._commits.ledger
        number, layers = self._pacer.decide(report, ledger, group)
        order = None
        if layers:
            spread_s = self._pacer.spread_s(report, ledger.committed.step)
            order = Order(decision=number, epoch=self._epoch, attempt=report.attempt, layers=layers, spread_s=spread_s)
        self._recorder.tick(report, ledger.trained, ledger.committed.step, layers)
        if order is not None:
            self._uploads.ordered(order, self._writers)
        elif report.hold or report.flush:
            await self._next_commit()
        lag = report.step + self._options.interval_steps - ledger.committed.step
        if report.hold and lag <= self._options.max_lag:
            self._state = "training"
        return Reply(order=order, restore_point=ledger.committed.step, whole_at=self._commits.whole_at())

    async def _next_commit(self) -> None:
        """Wait a moment for a restore point: ranks that stand still would only ask again at once."""
        self._writers.nudge()
        self._commits.committed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._commits.committed.wait(), STANDING_S)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if not self._attempts.is_restoring:
                with contextlib.suppress(StoreError):
                    await self._commits.points.sweep_ripe()

    async def _watch_for_notices(self) -> None:
        """From a preemption notice until its group is gone, persist as much as fits, the most valuable layers first."""
        told: set[str] = set()
        while True:
            await asyncio.sleep(NOTICE_S)
            with contextlib.suppress(ray.exceptions.RayError):  # asked again in a moment
                given = await asyncio.to_thread(nodes_given_notice)
                here = given.intersection(self._attempts.group.nodes if self._attempts.group else ())
                self._pacer.hurry = bool(here)
                if here - told:
                    self._writers.nudge()
                for node in here - told:
                    what = f"node {node} will be taken away: layers are persisted beyond the budget from now on"
                    self._commits.journal.incident("preemption notice", what)
                told |= here

    async def finish(self, step: int) -> Verdict | None:
        """Training has reached its end and everything is committed: mark the run finished, sweep what nobody names."""
        if await self._is_usable() and self._commits.whole_at() != step:
            self._give_up(
                LayerCheckError(
                    f"finish: expected step {step} committed whole, got {self._commits.whole_at()}; please report this"
                )
            )
        if self._verdict is None:
            try:
                async with self._commits.lock:
                    await self._commits.commit(self._commits.ledger.committed, finished=True)
                    await self._commits.strike("finish", step)
                    # What was given up may still be on its way: it must not land after the sweep.
                    await self._writers.drain(lambda: True, self._options.drain_s)
                    with contextlib.suppress(StoreError):  # what stays is deleted by `gc`
                        await self._commits.points.sweep_everything()
                self._state = "finished"
            except LayerCheckError as error:
                self._give_up(error)
        return self._verdict


def _stale_attempt(got: int, present: int) -> Verdict:
    what = f"attempt {got} of the worker group is over, attempt {present} has begun; this one stops"
    return Verdict(kind="FencedError", message=what)
