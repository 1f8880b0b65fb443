"""CheckpointActor: decides what to persist, follows what becomes durable, commits restore points. Never sees a tensor.

Its event loop never waits for storage: everything blocking runs in threads.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from storage import keys
from storage.catalog import Catalog
from storage.errors import (
    CorruptObjectError,
    LayerCheckError,
    ObjectNotFoundError,
    RestoreError,
    StoreError,
    TrainingError,
)
from storage.fault_points import FaultOptions, FaultPoints, Point
from storage.journal import Journal
from storage.ledger import Ledger, RestorePoint
from storage.liveness import BEAT_S
from storage.messages import (
    AttemptFacts,
    LayerPlan,
    LiveStatus,
    Order,
    Reply,
    Report,
    RestorePlan,
    ShardOutcome,
    Verdict,
)
from storage.object_store import open_object_store
from storage.options import CheckpointOptions, StorageOptions
from storage.pacer import Pacer
from storage.probe import write_token
from storage.records import EpochClaim, EpochLife, Manifest, ProcessId, Record, Recovery, VersionId, VersionRef
from storage.restore_plan import older, without
from storage.restore_points import SWEEP_S, RestorePoints
from storage.store_health import StoreHealth
from storage.worker_group import WorkerGroup
from storage.writer_group import ShardKey, WriterGroup

STANDING_S = 0.2
"""Longest wait for a restore point before ranks that stand still are answered."""

LOST_AFTER_S = 5.0
"""A shard that no writer holds this long after the ranks have handed it over is lost."""


@dataclass(frozen=True, kw_only=True)
class ActorSetup:
    """What the driver gives the CheckpointActor."""

    storage: StorageOptions
    run: str
    run_id: str
    checkpoint: CheckpointOptions
    in_flight_limit_bytes: int
    spec: dict[str, Any]
    spec_fingerprint: str
    data_fingerprint: str
    driver: str
    where: ProcessId
    attempts_without_progress: int
    store_outage_s: float
    faults: tuple[FaultOptions, ...]


class CheckpointActor:
    """One per run. Restarted by Ray it claims a new epoch and rebuilds itself from the catalog and the ShardWriters."""

    def __init__(self, setup: ActorSetup) -> None:
        self._setup, self._options = setup, setup.checkpoint
        self._bound = 0 if self._options.mode == "full" else self._options.staleness_bound_steps
        self._store = open_object_store(setup.storage, setup.run)
        self._catalog = Catalog(self._store)
        self._faults = FaultPoints(setup.faults, "actor", self._store)
        self._journal = Journal(None)
        self._health = StoreHealth(setup.store_outage_s, lambda kind, what: self._journal.incident(kind, what))
        self._writers = WriterGroup(
            setup.storage, setup.run, setup.run_id, setup.faults, self._take_outcome, self._give_up
        )
        self._pacer = Pacer(self._options, setup.in_flight_limit_bytes)
        self._points = RestorePoints(self._catalog, self._options.keep_restore_points, 0, [], self._health)
        self._ledger: Ledger
        self._group: WorkerGroup | None = None
        self._coming: WorkerGroup | None = None
        self._started: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._committing = asyncio.Lock()
        self._news = asyncio.Event()
        self._committed = asyncio.Event()
        self._manifests: list[Manifest] = []
        self._booked: set[ShardKey] = set()
        self._unreadable: set[VersionRef] = set()
        self._plan: RestorePlan | None = None
        self._verdict: Verdict | None = None
        self._epoch = self._seq = self._attempt = self._starts = 0
        self._cause = "the job was submitted again"
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
        self._epoch = (await self._health.retrying(self._catalog.claim, claim)).epoch
        self._spawn(self._show_life())
        found = await self._health.retrying(self._catalog.restorable)
        keep = self._options.keep_restore_points
        self._points = RestorePoints(self._catalog, keep, self._epoch, found.records, self._health)
        newest = self._points.newest
        self._journal = Journal(newest)
        for problem in found.problems:
            self._journal.incident("corrupt record", problem)
        if newest is not None:
            self._attempt = newest.totals.attempts
            self._ledger = Ledger(newest.facts, self._bound, newest)
            # The first record of this epoch outranks whatever a stale epoch may still commit.
            await self._commit(self._ledger.committed)
        self._spawn(self._commit_forever())
        self._spawn(self._sweep_forever())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - the verdict carries it to the driver's exit code
                self._give_up(error)

        self._tasks.append(asyncio.get_running_loop().create_task(guarded()))

    def _give_up(self, error: Exception) -> None:
        if self._verdict is None:
            self._verdict = Verdict(kind=type(error).__name__, message=str(error))

    async def _strike(self, point: Point, step: int) -> None:
        if self._faults:
            await asyncio.to_thread(self._faults.strike, point, step=step, attempt=self._attempt)

    async def _show_life(self) -> None:
        beat = 0
        while True:
            beat += 1
            with contextlib.suppress(StoreError):  # who cannot be heard is taken for dead, and fenced
                await asyncio.to_thread(self._catalog.show_life, EpochLife(epoch=self._epoch, beat=beat))
            await asyncio.sleep(BEAT_S)

    async def close(self) -> None:
        """The driver is done: end the ShardWriters and show the epoch's end."""
        for task in self._tasks:
            task.cancel()
        self._writers.kill()
        with contextlib.suppress(StoreError):
            await asyncio.to_thread(self._catalog.show_life, EpochLife(epoch=self._epoch, beat=0, ended=True))

    async def verdict(self) -> Verdict | None:
        """Why the run must stop, if it must."""
        return self._verdict

    async def live(self) -> LiveStatus:
        """How the run stands this moment."""
        newest, journal = self._points.newest, self._journal
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
        self._cause, self._state = cause, "recovering"

    async def note_incident(self, kind: str, what: str) -> None:
        """Something that the user should know."""
        await self._is_usable()
        self._journal.incident(kind, what)

    # --- attempts

    async def group_starts(self) -> Verdict | None:
        """A worker group is there and has yet to load its model: ends a run whose groups never get beyond that."""
        if await self._is_usable():
            if self._starts >= self._setup.attempts_without_progress:
                self._give_up(
                    TrainingError(
                        f"{self._starts} worker groups in a row failed before their attempt began; last cause: "
                        f"{self._cause}; mend it and run the same command again"
                    )
                )
            self._starts += 1
        return self._verdict

    async def begin_attempt(self, facts: AttemptFacts) -> RestorePlan | Verdict:
        """Let accepted uploads land (for a bounded time), then return the plan that all ranks restore from."""
        if not await self._is_usable():
            return self._present_verdict()
        self._state = "recovering" if self._attempt else "starting"
        group = self._coming = WorkerGroup.of(facts)
        try:
            self._writers.follow(group.nodes)
            await self._check_writers_see_store()
            await self._writers.drain(
                lambda: not self._manifests and not self._committing.locked(), self._options.drain_s
            )
            async with self._committing:
                if group is not self._coming:  # its ranks died while it waited here, and others have come since
                    return Verdict(kind="FencedError", message="a newer worker group has come; this one stops")
                await self._take_on(group)
                await self._strike("begin_attempt", self._ledger.committed.step)
                return await self._pin_plan()
        except LayerCheckError as error:
            self._give_up(error)
        return self._present_verdict()

    def _present_verdict(self) -> Verdict:
        assert self._verdict is not None
        return self._verdict

    async def restored(self, attempt: int, bad: dict[str, str]) -> RestorePlan | Verdict | None:
        """The ranks have read the plan; `bad` tells what is wrong with some layers' shards.

        Returns a plan without these versions, or None when training may go on from the present one.
        """
        if not await self._is_usable():
            return self._verdict
        if attempt != self._attempt:
            return _stale_attempt(attempt, self._attempt)
        if not bad:
            self._plan, self._state = None, "training"
            return None
        try:
            async with self._committing:
                await self._fall_back(bad)
                return await self._pin_plan()
        except LayerCheckError as error:
            self._give_up(error)
        return self._verdict

    async def _check_writers_see_store(self) -> None:
        """Refuse a local path that is not the same folder on every node."""
        token = await self._health.retrying(write_token, self._store)
        try:
            await self._writers.check_token(token)
        finally:
            await self._health.retrying(self._store.delete, [keys.probe(token)])

    async def _take_on(self, group: WorkerGroup) -> None:
        """Close the attempt before and open the next one, from the committed composite."""
        newest = self._points.newest
        if newest is None:
            self._ledger = Ledger(group.facts.facts, self._bound, None)
        else:
            _check_same_run(newest, group.facts)
        self._ledger.begin_attempt()
        self._manifests.clear()
        self._booked.clear()
        self._group = group
        self._starts = 0
        self._attempt += 1  # before anything is awaited: from here on, nothing of the attempt before is booked
        await self._check_progress()
        self._journal.attempt_began(self._recovery() if self._attempt > 1 else None)
        await self._commit(self._ledger.committed)

    async def _check_progress(self) -> None:
        """End a run that only fails; on the last try, go back one restore point first."""
        stuck, limit = self._journal.totals.attempts_without_commit, self._setup.attempts_without_progress
        step = self._ledger.committed.step
        if stuck >= limit:
            raise TrainingError(
                f"{stuck} attempts in a row committed nothing new after step {step}; last cause: {self._cause}; "
                "mend it and run the same command again"
            )
        if stuck and stuck == limit - 1:
            point = older(self._points.records, self._ledger.committed.layers, self._unreadable)
            if point is not None:
                self._journal.incident(
                    "previous restore point", f"step {point.step} instead of {step}: {stuck} attempts failed there"
                )
                await self._commit(point)

    def _recovery(self) -> Recovery:
        point = self._ledger.committed
        ages = [point.step - point.layers[fact.name].step for fact in self._ledger.trained]
        cause, self._cause = self._cause, "the worker group was restarted"
        return Recovery(
            attempt=self._attempt,
            cause=cause,
            restore_point=point.step,
            steps_lost=max(0, self._journal.progress.step - point.step),
            max_age=max(ages),
            mean_age=sum(ages) / len(ages),
        )

    # --- restore plans

    async def _pin_plan(self) -> RestorePlan:
        """Plan of the committed composite; versions whose manifest cannot be read are replaced first.

        While there is a plan nothing is swept.
        """
        while True:
            point = self._ledger.committed
            found = await asyncio.gather(*(self._manifest_or_problem(ref) for ref in point.layers.values()))
            manifests = dict(zip(point.layers, found, strict=True))
            bad = {name: problem for name, problem in manifests.items() if isinstance(problem, str)}
            if not bad:
                break
            await self._fall_back(bad)
        layers = {
            name: LayerPlan(ref=point.layers[name], manifest=manifest)
            for name, manifest in manifests.items()
            if not isinstance(manifest, str)
        }
        self._plan = RestorePlan(attempt=self._attempt, step=point.step, layers=layers, writers=self._writers.names)
        return self._plan

    async def _manifest_or_problem(self, ref: VersionRef) -> Manifest | str | None:
        if ref.manifest_key is None:
            return None
        try:
            return await self._health.retrying(self._catalog.read_manifest, ref)
        except (CorruptObjectError, ObjectNotFoundError) as error:
            return str(error)

    async def _fall_back(self, bad: dict[str, str]) -> None:
        """Commit a restore point without the versions in `bad` (layer -> what is wrong).

        Raises:
            RestoreError: there is none.
        """
        point = self._ledger.committed
        for name, problem in bad.items():
            self._unreadable.add(point.layers[name])
            self._journal.incident("unreadable version", f"{name} at step {point.layers[name].step}: {problem}")
        replacement = without(point, bad, self._unreadable, self._ledger.trained, self._bound)
        replacement = replacement or older(self._points.records, point.layers, self._unreadable)
        if replacement is None:
            problems = "; ".join(bad.values())
            raise RestoreError(
                f"no restore point can be read back whole; bring the object back from a copy: {problems}"
            )
        await self._commit(replacement)

    # --- ticks

    async def report(self, report: Report) -> Reply:
        """Take the sums of a tick; answer with what to persist and how far the restore point is."""
        if not await self._is_usable():
            return Reply(verdict=self._verdict)
        if report.attempt != self._attempt:
            return Reply(verdict=_stale_attempt(report.attempt, self._attempt))
        self._journal.report(report)  # even without the group's facts: nobody tells it twice
        if self._group is None:
            if report.attempt_facts is None:
                return Reply(restore_point=self._ledger.committed.step, needs_attempt_facts=True)
            self._group = WorkerGroup.of(report.attempt_facts)
            self._writers.follow(self._group.nodes)
        await self._strike("report", report.step)
        self._state = "holding for storage" if report.hold else "flushing" if report.flush else "training"
        if report.carried_out is not None and report.carried_out.epoch == self._epoch:
            self._ledger.carried_out(report.carried_out.decision, report.carried_out_step)
        # Rank 0 carries an order out, and says so, in the very report after the reply that held it.
        for layer in [name for name, flight in self._ledger.in_flight.items() if flight.step is None]:
            self._fail(layer, "lost order", f"{layer}: the reply with the order did not reach the workers")
        for layer in report.failed_hand_overs:
            self._fail(layer, "hand-over failed", f"{layer}: its ShardWriter could not be reached")
        self._fail_lost_shards(self._group)
        number, layers = self._pacer.decide(report, self._ledger, self._group)
        order = Order(decision=number, epoch=self._epoch, attempt=self._attempt, layers=layers) if layers else None
        if order is None and (report.hold or report.flush):
            await self._next_commit()
        if (
            report.hold
            and report.step + self._options.interval_steps - self._ledger.committed.step <= self._options.max_lag
        ):
            self._state = "training"
        return Reply(order=order, restore_point=self._ledger.committed.step, whole_at=self._whole_at())

    async def _next_commit(self) -> None:
        """Wait a moment for a restore point: ranks that stand still would only ask again at once."""
        self._committed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._committed.wait(), STANDING_S)

    def _whole_at(self) -> int | None:
        steps = {self._ledger.committed.layers[fact.name].step for fact in self._ledger.trained}
        return steps.pop() if len(steps) == 1 else None

    def _fail(self, layer: str, kind: str, what: str) -> None:
        self._ledger.fail(layer)
        self._journal.incident(kind, what)

    def _fail_lost_shards(self, group: WorkerGroup) -> None:
        """Versions that were handed over a while ago, and that no writer holds or has stored, are due again."""
        pending = self._writers.pending()
        for layer, flight in list(self._ledger.in_flight.items()):
            if flight.step is None or flight.stored:
                continue
            flight.seen_at = flight.seen_at or time.monotonic()
            version = VersionId(layer=layer, step=flight.step, epoch=self._epoch, attempt=self._attempt)
            missing = {(version, rank) for rank in self._ledger.missing_ranks(version, group.world_size)}
            if missing <= pending:
                flight.seen_at = time.monotonic()
            elif time.monotonic() - flight.seen_at > LOST_AFTER_S:
                self._fail(layer, "lost upload", f"{layer} at step {flight.step}: its ShardWriter no longer holds it")

    # --- what becomes durable

    def _take_outcome(self, outcome: ShardOutcome) -> ShardKey | None:
        key, version = (outcome.version, outcome.rank), outcome.version
        if version.attempt != self._attempt:
            return key
        if outcome.shard is None:
            self._take_problem(outcome.version.layer, str(outcome.problem), poisoned=outcome.poisoned)
            return key
        if key not in self._booked:
            self._booked.add(key)
            self._health.works()
            self._journal.wrote(outcome.shard.bytes)
            manifest = self._ledger.shard_durable(version, outcome.world_size, outcome.shard)
            if manifest is not None:
                self._manifests.append(manifest)
                self._news.set()
        if self._ledger.committed.layers[version.layer].step < version.step:
            return None  # the writer keeps it for an actor that is restarted before the commit
        self._booked.discard(key)
        return key

    def _take_problem(self, layer: str, problem: str, *, poisoned: bool) -> None:
        self._fail(layer, "poisoned version" if poisoned else "failed upload", problem)
        if poisoned:  # NaN stays NaN under AdamW: no later version of this layer would be any better
            self._give_up(TrainingError(f"{problem}; the last restore point is intact: lower training.learning_rate"))
        else:
            self._health.fails(problem)

    async def _commit_forever(self) -> None:
        """At most one commit in flight; whatever has become durable meanwhile goes into the next."""
        while True:
            await self._news.wait()
            self._news.clear()
            async with self._committing:
                await self._commit_what_is_durable()

    async def _commit_what_is_durable(self) -> None:
        while self._manifests:
            batch, self._manifests = self._manifests, []
            writing = (self._health.retrying(self._catalog.write_manifest, manifest) for manifest in batch)
            for manifest, ref in zip(batch, await asyncio.gather(*writing), strict=True):
                self._ledger.version_durable(manifest.version.layer, ref)
        point = self._ledger.next_restore_point()
        if point is not None:
            self._journal.progressed()
            await self._commit(point)
            self._pacer.committed(self._journal.progress.step - max(ref.step for ref in point.layers.values()))

    async def _commit(self, point: RestorePoint, *, finished: bool = False) -> None:
        """Write the record of `point`. Callers hold `_committing`, or nothing else runs yet."""
        newest = self._points.newest
        assert newest is not None or self._group is not None
        record = Record(
            epoch=self._epoch,
            seq=self._seq,
            step=point.step,
            layers=point.layers,
            previous=point.previous,
            facts=self._ledger.facts,
            base=newest.base if newest else self._group.facts.base,  # type: ignore[union-attr]
            spec_fingerprint=self._setup.spec_fingerprint,
            staleness_bound_steps=self._bound,
            totals=self._journal.totals,
            progress=self._journal.snapshot(),
            recoveries=tuple(self._journal.recoveries),
            incidents=tuple(self._journal.incidents),
            finished=finished,
        )
        self._seq += 1
        await self._strike("before_commit", point.step)
        await self._points.commit(record)
        await self._strike("after_commit", point.step)
        self._ledger.commit(point)
        self._committed.set()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._plan is None:
                with contextlib.suppress(StoreError):
                    await self._points.sweep_ripe()

    async def finish(self, step: int) -> Verdict | None:
        """Training has reached its end and everything is committed: mark the run finished, sweep what nobody names."""
        if await self._is_usable() and self._whole_at() != step:
            self._give_up(
                LayerCheckError(
                    f"finish: expected step {step} committed whole, got {self._whole_at()}; please report this"
                )
            )
        if self._verdict is None:
            try:
                async with self._committing:
                    await self._commit(self._ledger.committed, finished=True)
                    await self._strike("finish", step)
                    with contextlib.suppress(StoreError):  # what stays is deleted by `gc`
                        await self._points.sweep_everything()
                self._state = "finished"
            except LayerCheckError as error:
                self._give_up(error)
        return self._verdict


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


def _stale_attempt(got: int, present: int) -> Verdict:
    what = f"attempt {got} of the worker group is over, attempt {present} has begun; this one stops"
    return Verdict(kind="FencedError", message=what)
