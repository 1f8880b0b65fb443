"""CheckpointActor: decides what to persist, follows what becomes durable, commits restore points. Never sees a tensor.

Its event loop never waits for storage: everything blocking runs in threads.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar

import ray

from storage import keys, retention
from storage.catalog import Catalog
from storage.decision import Candidate, Decision, Facts, Node, decide
from storage.errors import CorruptObjectError, FencedError, LayerCheckError, ObjectNotFoundError, RestoreError, StoreError, TrainingError
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
    WriterReport,
)
from storage.object_store import open_object_store
from storage.options import CheckpointOptions, StorageOptions, parse_write_budget
from storage.probe import check_token, write_token
from storage.records import EpochClaim, EpochLife, Manifest, ProcessId, Record, Recovery, VersionId, VersionRef
from storage.writer_actor import ensure_writer, writer_name

P = ParamSpec("P")
T = TypeVar("T")

RETRY_S = 1.0
LOST_AFTER_S = 5.0
"""A shard that no writer holds this long after the ranks have handed it over is lost."""
DELETE_GRACE_S = 10.0
"""Readers that took a key from a record before it was un-named have this long to read it."""


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
    driver: str
    where: ProcessId
    attempts_without_progress: int
    store_outage_s: float


@dataclass
class _Group:
    """The worker group of the attempt."""

    facts: AttemptFacts
    nodes: tuple[str, ...]
    node_bytes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, facts: AttemptFacts) -> "_Group":
        nodes = tuple(dict.fromkeys(facts.node_of_rank))
        node_bytes = {
            layer: tuple(
                sum(size for size, home in zip(sizes, facts.node_of_rank, strict=True) if home == node) for node in nodes
            )
            for layer, sizes in facts.shard_bytes.items()
        }
        return cls(facts, nodes, node_bytes)

    @property
    def world_size(self) -> int:
        return len(self.facts.node_of_rank)


class CheckpointActor:
    """One per run. Restarted by Ray it claims a new epoch and rebuilds itself from the catalog and the ShardWriters."""

    def __init__(self, setup: ActorSetup) -> None:
        self._setup = setup
        self._options = setup.checkpoint
        self._bound = 0 if self._options.mode == "full" else self._options.staleness_bound_steps
        self._store = open_object_store(setup.storage, setup.run)
        self._catalog = Catalog(self._store)
        self._started: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, tuple[float, frozenset[tuple[VersionId, int]]]] = {}
        self._verdict: Verdict | None = None
        self._journal = Journal(None)
        self._ledger: Ledger | None = None
        self._records: list[Record] = []
        self._group: _Group | None = None
        self._attempt = 0
        self._plan: RestorePlan | None = None
        self._bad: set[VersionRef] = set()
        self._epoch = self._seq = self._decisions = 0
        self._tokens = 0.0
        self._latencies = [self._options.interval_steps]
        self._booked: set[tuple[VersionId, int]] = set()
        self._manifests: list[Manifest] = []
        self._news = asyncio.Event()
        self._committing = asyncio.Lock()
        self._failing_since: float | None = None
        self._unnamed: list[tuple[float, str]] = []
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
        )
        self._epoch = (await asyncio.to_thread(self._catalog.claim, claim)).epoch
        self._spawn(self._show_life())
        found = await asyncio.to_thread(self._catalog.restorable)
        self._records = found.records
        newest = found.records[0] if found.records else None
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

    def _spawn(self, coroutine: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._guarded(coroutine)))

    async def _guarded(self, coroutine: Any) -> None:
        """A background task that fails ends the run loudly instead of going silent."""
        try:
            await coroutine
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the verdict carries it to the driver's exit code
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._verdict is None:
            self._verdict = Verdict(kind=type(error).__name__, message=str(error))

    async def _show_life(self) -> None:
        beat = 0
        while True:
            beat += 1
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(self._catalog.show_life, EpochLife(epoch=self._epoch, beat=beat))
            await asyncio.sleep(BEAT_S)

    async def close(self) -> Record | None:
        """The driver is done: end the ShardWriters, show the epoch's end, return the newest record."""
        for task in (*self._tasks, *self._writers.values()):
            task.cancel()
        for node in self._writers:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(writer_name(self._setup.run_id, node), namespace="layercheck"))
        with contextlib.suppress(StoreError):
            await asyncio.to_thread(self._catalog.show_life, EpochLife(epoch=self._epoch, beat=0, ended=True))
        return self._records[0] if self._records else None

    async def verdict(self) -> Verdict | None:
        """Why the run must stop, if it must."""
        return self._verdict

    async def live(self) -> LiveStatus:
        """How the run stands this moment."""
        ages = self._records[0].ages().values() if self._records else ()
        journal = self._journal
        return LiveStatus(
            state=self._state,
            step=journal.progress.step,
            loss=journal.progress.loss,
            tokens_per_s=journal.tokens_per_s(),
            restore_point=self._ledger.committed.step if self._ledger else 0,
            max_age=max(ages, default=0),
            bytes_per_s=journal.bytes_per_s(),
        )

    # --- attempts

    async def note_failure(self, cause: str) -> None:
        """Why the worker group is about to be restarted."""
        self._cause, self._state = cause, "recovering"

    async def note_incident(self, kind: str, what: str) -> None:
        """Something that the user should know."""
        self._journal.incident(kind, what)

    async def begin_attempt(self, facts: AttemptFacts) -> RestorePlan | Verdict:
        """Let accepted uploads land (for a bounded time), then return the plan that all ranks restore from."""
        await self.start()
        self._state = "recovering" if self._attempt else "starting"
        try:
            await self._begin(facts)
        except LayerCheckError as error:
            self._give_up(error)
        return self._verdict or self._pinned_plan()

    async def restored(self, attempt: int, bad: dict[str, str]) -> RestorePlan | Verdict | None:
        """The ranks have read the plan; `bad` tells what is wrong with some layers' shards.

        Returns a plan without these versions, or None when training may go on from the present one.
        """
        if attempt != self._attempt or self._verdict is not None:
            return self._verdict or _stale_attempt(attempt, self._attempt)
        if not bad:
            self._plan, self._state = None, "training"
            return None
        try:
            async with self._committing:
                await self._fall_back(bad)
                await self._make_plan()
        except LayerCheckError as error:
            self._give_up(error)
        return self._verdict or self._pinned_plan()

    async def _begin(self, facts: AttemptFacts) -> None:
        group = _Group.of(facts)
        self._follow_writers(group)
        await self._check_writers_see_store(group)
        await self._drain()
        async with self._committing:
            await self._take_on(group)

    async def _take_on(self, group: _Group) -> None:
        """Close the attempt before and open the next one, from the committed composite."""
        if self._ledger is None:
            self._ledger = Ledger(group.facts.facts, self._bound, None)
        self._check_same_run(group.facts)
        self._ledger.begin_attempt()
        self._manifests.clear()
        self._booked.clear()
        self._group = group
        stuck, limit = self._journal.totals.attempts_without_commit, self._setup.attempts_without_progress
        if stuck >= limit:
            raise TrainingError(
                f"{stuck} attempts in a row committed nothing new after step {self._ledger.committed.step}; last cause: {self._cause}"
            )
        # First, or what the attempt before stored while this waits for the store would pass for this one's.
        self._attempt += 1
        if stuck == limit - 1 and len(self._records) > 1:
            await self._fall_back_to_previous_record("the attempts before this one committed nothing new")
        self._journal.attempt_began(self._recovery() if self._attempt > 1 else None)
        await self._commit(self._ledger.committed)
        await self._make_plan()

    def _recovery(self) -> Recovery:
        assert self._ledger is not None
        point = self._ledger.committed
        ages = [point.step - point.layers[fact.name].step for fact in self._ledger.trained]
        cause, self._cause = self._cause, "the worker group was restarted"
        return Recovery(
            attempt=self._attempt,
            cause=cause,
            restore_point=point.step,
            steps_lost=max(0, self._journal.progress.step - point.step),
            max_age=max(ages, default=0),
            mean_age=sum(ages) / max(1, len(ages)),
        )

    def _check_same_run(self, facts: AttemptFacts) -> None:
        known = self._records[0] if self._records else None
        if known is None:
            return
        if known.base.digest != facts.base.digest:
            raise TrainingError(
                f"model.path: expected the weights this run began with ({known.base.source}, digest {known.base.digest}), "
                f"got {facts.base.source}, digest {facts.base.digest}; restore them or give the run another name"
            )
        if known.facts != facts.facts:
            raise TrainingError("model: the layers or their sizes are not those that the run began with; give it another name")

    async def _drain(self) -> None:
        """Wait until no writer has anything on its way, and everything durable is committed."""
        began, deadline = time.monotonic(), time.monotonic() + self._options.drain_s
        while time.monotonic() < deadline:
            reports = [self._held.get(node) for node in self._writers]
            asked = all(held is not None and held[0] >= began and not held[1] for held in reports)
            if asked and not self._manifests and not self._committing.locked():
                return
            await asyncio.sleep(0.02)

    async def _check_writers_see_store(self, group: _Group) -> None:
        """Refuse a local path that is not the same folder on every node."""
        token = await asyncio.to_thread(write_token, self._store)
        await asyncio.to_thread(check_token, self._store, token)
        for node in group.nodes:
            writer = await self._writer(node)
            await writer.check_token.remote(token)
        await asyncio.to_thread(self._store.delete, [keys.probe(token)])

    # --- restore plans

    async def _make_plan(self) -> None:
        """Pin a plan of the committed composite; versions whose manifest cannot be read are replaced first."""
        assert self._ledger is not None and self._group is not None
        while True:
            point, bad = self._ledger.committed, {}
            refs = [(name, ref) for name, ref in point.layers.items()]
            manifests = await asyncio.gather(*(self._manifest_or_problem(ref) for _, ref in refs))
            bad = {name: problem for (name, _), problem in zip(refs, manifests, strict=True) if isinstance(problem, str)}
            if not bad:
                break
            await self._fall_back(bad)
        layers = {
            name: LayerPlan(ref=ref, manifest=manifest)
            for (name, ref), manifest in zip(refs, manifests, strict=True)
            if not isinstance(manifest, str)
        }
        names = {node: writer_name(self._setup.run_id, node) for node in self._group.nodes}
        self._plan = RestorePlan(attempt=self._attempt, step=point.step, layers=layers, writers=names)

    def _pinned_plan(self) -> RestorePlan:
        assert self._plan is not None
        return self._plan

    async def _manifest_or_problem(self, ref: VersionRef) -> Manifest | str | None:
        if ref.manifest_key is None:
            return None
        try:
            return await asyncio.to_thread(self._catalog.read_manifest, ref)
        except (CorruptObjectError, ObjectNotFoundError) as error:
            return str(error)

    async def _fall_back(self, bad: dict[str, str]) -> None:
        """Replace versions that cannot be read by the layer's previous one, or the whole map by the previous record's."""
        assert self._ledger is not None
        point = self._ledger.committed
        for name, problem in bad.items():
            self._bad.add(point.layers[name])
            self._journal.incident("unreadable version", f"{name} at step {point.layers[name].step}: {problem}")
        layers = {name: point.previous.get(name, ref) if name in bad else ref for name, ref in point.layers.items()}
        previous = {name: ref for name, ref in point.previous.items() if name not in bad}
        step = max(ref.step for ref in layers.values())
        bounded = all(step - layers[fact.name].step <= self._bound for fact in self._ledger.trained)
        if bounded and not self._bad & set(layers.values()):
            await self._commit(RestorePoint(step, layers, previous))
        else:
            await self._fall_back_to_previous_record("; ".join(bad.values()))

    async def _fall_back_to_previous_record(self, why: str) -> None:
        present = self._records[0]
        for record in self._records[1:]:
            if record.layers != present.layers and not self._bad & set(record.layers.values()):
                self._journal.incident("previous restore point", f"went back from step {present.step} to {record.step}: {why}")
                await self._commit(RestorePoint(record.step, dict(record.layers), dict(record.previous)))
                return
        raise RestoreError(f"no restore point can be read back whole: {why}; restore the object from a copy")

    # --- ticks

    async def report(self, report: Report) -> Reply:
        """Take the sums of a tick; answer with what to persist and how far the restore point is."""
        await self.start()
        if self._verdict is not None:
            return Reply(verdict=self._verdict)
        if report.attempt != self._attempt or self._ledger is None:
            return Reply(verdict=_stale_attempt(report.attempt, self._attempt))
        if self._group is None:
            if report.attempt_facts is None:
                return Reply(restore_point=self._ledger.committed.step, needs_attempt_facts=True)
            self._group = _Group.of(report.attempt_facts)
            self._follow_writers(self._group)
        self._state = "holding for storage" if report.hold else "flushing" if report.flush else "training"
        self._journal.report(report)
        if report.carried_out is not None and report.carried_out.epoch == self._epoch:
            self._ledger.carried_out(report.carried_out.decision, report.carried_out_step)
        # Rank 0 carries an order out, and says so, in the very report after the reply that held it.
        for layer in [name for name, flight in self._ledger.in_flight.items() if flight.step is None]:
            self._fail(layer, "lost order", f"{layer}: the reply with the order did not reach the workers")
        for layer in report.failed_hand_overs:
            self._fail(layer, "hand-over failed", f"{layer}: its ShardWriter could not be reached")
        self._fail_lost_shards(self._group)
        return Reply(
            order=self._decide(report, self._ledger, self._group),
            restore_point=self._ledger.committed.step,
            whole_at=self._whole_at(),
        )

    def _decide(self, report: Report, ledger: Ledger, group: _Group) -> Order | None:
        facts = self._facts(report, ledger, group)
        decision: Decision = decide(facts)
        self._tokens = decision.tokens
        if not decision.layers:
            return None
        self._decisions += 1
        sizes = {fact.name: fact.bytes for fact in ledger.trained}
        for layer in decision.layers:
            ledger.issue(self._decisions, layer, sizes[layer], group.node_bytes[layer])
        return Order(decision=self._decisions, epoch=self._epoch, attempt=self._attempt, layers=decision.layers)

    def _facts(self, report: Report, ledger: Ledger, group: _Group) -> Facts:
        options, standing = self._options, report.hold or report.flush
        step = report.step if standing else report.step + options.interval_steps
        layers = tuple(
            Candidate(
                name=fact.name,
                bytes=fact.bytes,
                step=ledger.newest_step_of(fact.name, at=step),
                drift=report.drifts[fact.name],
                impact=report.impacts[fact.name] if report.impacts is not None else None,
                in_flight=fact.name in ledger.in_flight,
                due=fact.name in ledger.due,
                node_bytes=group.node_bytes[fact.name],
            )
            for fact in ledger.trained
        )
        flying = [flight.node_bytes for flight in ledger.in_flight.values()]
        nodes = tuple(
            Node(in_flight_bytes=sum(sizes[i] for sizes in flying), limit_bytes=self._setup.in_flight_limit_bytes)
            for i in range(len(group.nodes))
        )
        return Facts(
            step=step,
            interval_steps=options.interval_steps,
            layers=layers,
            nodes=nodes,
            mode=options.mode,
            flush=report.flush,
            staleness_bound_steps=options.staleness_bound_steps,
            max_lag=options.max_lag,
            latency_steps=min(max(self._latencies), options.staleness_bound_steps // 4),
            newest_step=max((layer.step for layer in layers), default=step),
            tokens=self._tokens,
            refill_bytes=0.0 if standing else self._refill(sum(layer.bytes for layer in layers), report),
            criterion=options.criterion,
            threshold=options.threshold,
        )

    def _refill(self, full_bytes: int, report: Report) -> float:
        unit, amount = parse_write_budget(self._options.write_budget)
        if unit == "share":
            return full_bytes * amount
        return amount * (report.step_seconds or 0.0) * self._options.interval_steps

    def _whole_at(self) -> int | None:
        assert self._ledger is not None
        steps = {self._ledger.committed.layers[fact.name].step for fact in self._ledger.trained}
        return steps.pop() if len(steps) == 1 else None

    def _fail(self, layer: str, kind: str, what: str) -> None:
        assert self._ledger is not None
        self._ledger.fail(layer)
        self._journal.incident(kind, what)

    def _fail_lost_shards(self, group: _Group) -> None:
        """Versions handed over a while ago that their writers neither hold nor have stored are due again."""
        assert self._ledger is not None
        now = time.monotonic()
        for layer, flight in list(self._ledger.in_flight.items()):
            if flight.step is None:
                continue
            flight.handed_over_at = flight.handed_over_at or now
            if now - flight.handed_over_at < LOST_AFTER_S:
                continue
            held = {key for _, pending in self._held.values() for key in pending}
            version = VersionId(layer=layer, step=flight.step or 0, epoch=self._epoch, attempt=self._attempt)
            missing = self._ledger.missing_ranks(version, group.world_size)
            if any((version, rank) not in held for rank in missing):
                self._fail(layer, "lost upload", f"{layer} at step {flight.step}: its ShardWriter was restarted")

    # --- writers

    async def _writer(self, node: str) -> Any:
        setup = self._setup
        return await asyncio.to_thread(ensure_writer, setup.storage, setup.run, setup.run_id, node)

    def _follow_writers(self, group: _Group) -> None:
        for node in set(self._writers) - set(group.nodes):
            self._writers.pop(node).cancel()
            self._held.pop(node, None)
        for node in set(group.nodes) - set(self._writers):
            self._writers[node] = asyncio.get_running_loop().create_task(self._guarded(self._follow_writer(node)))

    async def _follow_writer(self, node: str) -> None:
        seen, forget = -1, []
        while True:
            asked = time.monotonic()
            try:
                writer = await self._writer(node)
                report: WriterReport = await writer.poll.remote(seen, forget)
            except ray.exceptions.RayError:
                self._held.pop(node, None)
                seen, forget = -1, []
                await asyncio.sleep(RETRY_S)
                continue
            seen = report.news
            forget = [key for key in (self._take_outcome(outcome) for outcome in report.outcomes) if key is not None]
            self._held[node] = (asked, report.pending)

    def _take_outcome(self, outcome: ShardOutcome) -> tuple[VersionId, int] | None:
        """Book an outcome; returns its key once the writer may forget it."""
        key, version, ledger = (outcome.version, outcome.rank), outcome.version, self._ledger
        if ledger is None or version.attempt != self._attempt:
            return key
        if outcome.shard is None:
            self._take_problem(outcome)
            return key
        if key not in self._booked:
            self._booked.add(key)
            self._store_works()
            self._journal.wrote(outcome.shard.bytes)
            manifest = ledger.shard_durable(version, outcome.world_size, outcome.shard)
            if manifest is not None:
                self._manifests.append(manifest)
                self._news.set()
        if ledger.committed.layers[version.layer].step < version.step:
            return None  # the writer keeps it for an actor that is restarted before the commit
        self._booked.discard(key)
        return key

    def _take_problem(self, outcome: ShardOutcome) -> None:
        what = outcome.problem or ""
        if outcome.poisoned:  # NaN stays NaN under AdamW: no later version of this layer would be any better
            self._give_up(TrainingError(f"{what}; the last restore point is intact: lower training.learning_rate"))
        else:
            self._store_fails(StoreError(what))
        self._fail(outcome.version.layer, "poisoned version" if outcome.poisoned else "failed upload", what)

    def _store_works(self) -> None:
        self._failing_since = None

    def _store_fails(self, error: StoreError) -> None:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._journal.incident("store", str(error))
        if now - self._failing_since > self._setup.store_outage_s:
            self._give_up(StoreError(f"storage has failed for {self._setup.store_outage_s:.0f} s, the run stops: {error}"))

    # --- commits

    async def _commit_forever(self) -> None:
        """At most one commit in flight; whatever has become durable meanwhile goes into the next."""
        while True:
            await self._news.wait()
            self._news.clear()
            async with self._committing:
                await self._commit_what_is_durable()

    async def _commit_what_is_durable(self) -> None:
        while self._manifests:
            batch, attempt = list(self._manifests), self._attempt
            refs = await asyncio.gather(*(self._retrying(self._catalog.write_manifest, manifest) for manifest in batch))
            if self._ledger is None or attempt != self._attempt:
                return
            del self._manifests[: len(batch)]
            for manifest, ref in zip(batch, refs, strict=True):
                self._ledger.version_durable(manifest.version.layer, ref)
        point = self._ledger.next_restore_point() if self._ledger else None
        if point is not None and self._ledger is not None:
            newest = max(ref.step for ref in point.layers.values())
            self._journal.progressed()
            await self._commit(point)
            self._latencies = [*self._latencies[-20:], max(self._options.interval_steps, self._journal.progress.step - newest)]

    async def _commit(self, point: RestorePoint, *, finished: bool = False) -> None:
        """Write the record of `point`, then let retention un-name what has become superfluous."""
        assert self._ledger is not None
        base = self._records[0].base if self._records else self._base()
        record = Record(
            epoch=self._epoch,
            seq=self._seq,
            step=point.step,
            layers=point.layers,
            previous=point.previous,
            facts=self._ledger.facts,
            base=base,
            spec_fingerprint=self._setup.spec_fingerprint,
            staleness_bound_steps=self._bound,
            totals=self._journal.totals,
            progress=self._journal.snapshot(),
            recoveries=tuple(self._journal.recoveries),
            incidents=tuple(self._journal.incidents),
            finished=finished,
        )
        self._seq += 1
        await self._retrying(self._catalog.commit, record)
        self._ledger.commit(point)
        self._records.insert(0, record)
        self._unname()

    def _base(self) -> Any:
        assert self._group is not None
        return self._group.facts.base

    async def _retrying(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking store call in a thread; while the store fails, try again until the run is given up."""
        while True:
            try:
                result = await asyncio.to_thread(call, *args, **kwargs)
            except FencedError:
                raise
            except StoreError as error:
                self._store_fails(error)
                if self._verdict is not None:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._store_works()
                return result

    async def finish(self, step: int) -> Verdict | None:
        """Training has reached its end and everything is committed: mark the run finished, sweep what nobody names."""
        assert self._ledger is not None
        if self._verdict is None and self._whole_at() != step:
            self._verdict = Verdict(kind="LayerCheckError", message=f"finish: step {step} is not committed whole; report this as a bug")
        if self._verdict is not None:
            return self._verdict
        async with self._committing:
            try:
                await self._commit(self._ledger.committed, finished=True)
                await self._sweep_everything()
            except LayerCheckError as error:
                self._give_up(error)
        self._state = "finished"
        return self._verdict

    # --- retention

    def _unname(self) -> None:
        kept = retention.retained(self._records, self._options.keep_restore_points)
        dropped = [record for record in self._records if record not in kept]
        self._records = kept
        at = time.monotonic()
        self._unnamed += [(at, keys.record(record.epoch, record.seq)) for record in dropped]
        prefixes = retention.needed_prefixes(dropped) - retention.needed_prefixes(kept)
        self._unnamed += [(at + DELETE_GRACE_S, prefix) for prefix in sorted(prefixes)]

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            ripe = [key for at, key in self._unnamed if at <= time.monotonic()]
            if not ripe or self._plan is not None:
                continue
            self._unnamed = [(at, key) for at, key in self._unnamed if key not in ripe]
            with contextlib.suppress(StoreError):  # what stays is swept when the run finishes, or by `gc`
                await asyncio.to_thread(self._delete, ripe)

    def _delete(self, ripe: list[str]) -> None:
        """Delete record keys and version prefixes, unless a newer epoch has taken over."""
        self._catalog.check_fence(self._epoch)
        objects = [key for key in ripe if not key.endswith("/")]
        for prefix in (key for key in ripe if key.endswith("/")):
            objects += [info.key for info in self._store.list(prefix)]
        self._store.delete(objects)

    async def _sweep_everything(self) -> None:
        def sweep() -> None:
            self._catalog.check_fence(self._epoch)
            listed = [info.key for info in self._store.list("")]
            self._store.delete(retention.unnamed(listed, self._records, self._options.keep_restore_points))

        self._unnamed.clear()
        await asyncio.to_thread(sweep)


def _stale_attempt(got: int, present: int) -> Verdict:
    return Verdict(kind="FencedError", message=f"attempt {got} of the worker group is over, attempt {present} has begun; this one stops")
