"""Deciding over 200 layers, and booking and committing one version of each from 1,024 ranks.

Everything is the CheckpointActor's own code, in this process, with a store on a local disk; only the ShardWriters are
made up: they have stored everything already and tell it as the real ones do, pickled. Unpickling counts.
"""

import asyncio
import gc
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.piece import Mark, Outcome, Profile
from storage import keys
from storage.catalog import Catalog
from storage.checkpoint_actor import keep_loop_free
from storage.committer import Committer
from storage.ledger import Ledger
from storage.local_store import LocalStore
from storage.messages import AttemptFacts, Report, StoredShards, WriterQuestion, WriterReport
from storage.options import CheckpointOptions
from storage.pacer import Pacer
from storage.records import BaseVersion, ElementRange, LayerFacts, ShardRef, VersionId, VersionRef
from storage.uploads import Uploads
from storage.worker_group import WorkerGroup
from storage.writer_actor import MOST_TOLD
from storage.writer_group import WriterGroup
from tests.helpers.records import actor_setup

LAYERS, RANKS, RANKS_A_NODE = 200, 1024, 8
LAYER_BYTES = 12 * 10**8
STEP, ATTEMPT, EPOCH = 7, 1, 1
BUDGETS = ("1/5", "1/20", "1/100")
UNPICKLING = ThreadPoolExecutor(1, thread_name_prefix="unpickling")
MOST_DECISION_MS, MOST_COMMIT_S, MOST_BLOCKED_MS = 5.0, 1.0, 50.0


def run(profile: Profile) -> Outcome:
    """Measure; the marks are about medians."""
    decisions = {budget: decision_ms(budget, profile.pick(quick=20, full=200)) for budget in BUDGETS}
    commits = [commit_once() for _ in range(profile.pick(quick=2, full=5))]
    decided = max(statistics.median(times) for times in decisions.values())
    seconds = statistics.median(commit.seconds for commit in commits)
    blocked = statistics.median(commit.blocked_ms for commit in commits)
    marks = [
        Mark(f"decision for {LAYERS} layers", "<= 5 ms", f"{decided:.1f} ms", met=decided <= MOST_DECISION_MS),
        Mark(f"commit of {LAYERS} layers, {RANKS:,} ranks", "<= 1 s", f"{seconds:.2f} s", met=seconds <= MOST_COMMIT_S),
        Mark("event loop blocked meanwhile", "<= 50 ms", f"{blocked:.0f} ms", met=blocked <= MOST_BLOCKED_MS),
    ]
    values = {
        "layers": LAYERS,
        "ranks": RANKS,
        "ranks_a_node": RANKS_A_NODE,
        "decision_ms": decisions,
        "commits": [vars(commit) for commit in commits],
    }
    return Outcome(marks, values)


def names() -> list[str]:
    """Layers of a model as large as a run may have."""
    return ["embedding", *(f"block.{number:03d}" for number in range(LAYERS - 2)), "head"]


def group_facts() -> AttemptFacts:
    """What rank 0 tells of `RANKS` workers."""
    return AttemptFacts(
        node_of_rank=tuple(f"node-{rank // RANKS_A_NODE}" for rank in range(RANKS)),
        facts=tuple(LayerFacts(name=name, bytes=LAYER_BYTES) for name in names()),
        shard_bytes=dict.fromkeys(names(), (LAYER_BYTES // RANKS,) * RANKS),
        base=BaseVersion(source="made up", digest="d"),
    )


# --- the decision


def decision_ms(budget: str, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` decisions in a row, facts made up from a report included."""
    facts, made = group_facts(), []
    group, ledger = WorkerGroup.of(facts), Ledger(facts.facts, 50, None)
    pacer = Pacer(CheckpointOptions(write_budget=budget, staleness_bound_steps=400), 10**12, 1.0)
    for step in range(1, repeats + 1):
        sums = np.array([[1e-6 * (step + place % 17), 1.0, 1e-6 * (step + place % 17)] for place in range(LAYERS)])
        report = Report(attempt=1, step=step, sums=sums)
        began = time.perf_counter()
        _, chosen = pacer.decide(report, ledger, group)
        made.append(1000 * (time.perf_counter() - began))
        for name in chosen:
            ledger.version_durable(name, VersionRef(step=step + 1, manifest_key="key", bytes=LAYER_BYTES))
    return made


# --- bookkeeping and commit


@dataclass(frozen=True)
class Commit:
    """One version of every layer, from the first report of a ShardWriter to the record."""

    seconds: float
    cpu_seconds: float
    blocked_ms: float
    """Longest time for which the event loop ran nothing else."""
    blocked_cpu_ms: float
    """CPU time of its thread in the longest of these times: without what others on this machine took."""


class MadeUpWriter:
    """Tells that its node's shards of all layers are stored, in the portions that a ShardWriter tells them in."""

    def __init__(self, node: int) -> None:
        self._replies: dict[int, bytes] = {}
        seen = 0
        for told in portions(node):
            last = seen + sum(len(stored.entries) for stored in told)
            self._replies[seen] = pickle.dumps(self._report(last, told))
            seen = last
        self.poll = SimpleNamespace(remote=self._poll)  # called as an actor is

    @staticmethod
    def _report(last: int, told: tuple[StoredShards, ...] = ()) -> WriterReport:
        return WriterReport(life="life", last=last, stored=told, failed=(), pending=None)

    async def _poll(self, question: WriterQuestion) -> WriterReport:
        reply = self._replies.get(question.seen)
        if reply is None:
            await asyncio.sleep(question.wait_s)
            return self._report(question.seen)
        # As Ray does it: in one thread beside the event loop, which gets the result.
        report: WriterReport = await asyncio.get_running_loop().run_in_executor(UNPICKLING, pickle.loads, reply)
        return report


def portions(node: int) -> Iterator[tuple[StoredShards, ...]]:
    """What a node's ShardWriter tells in each report."""
    ranks, layers_each = range(RANKS_A_NODE * node, RANKS_A_NODE * (node + 1)), MOST_TOLD // RANKS_A_NODE
    layers = names()
    for first in range(0, LAYERS, layers_each):
        told = []
        for name in layers[first : first + layers_each]:
            version = VersionId(layer=name, step=STEP, epoch=EPOCH, attempt=ATTEMPT)
            told.append(
                StoredShards(
                    version,
                    RANKS,
                    {rank: shard_of(version, rank).to_bytes() for rank in ranks},
                    dict.fromkeys(ranks, LAYER_BYTES // RANKS),
                )
            )
        yield tuple(told)


def shard_of(version: VersionId, rank: int) -> ShardRef:
    """A shard that holds the end of one tensor and the beginning of the next."""
    prefix = f"model.layers.{version.layer}"
    return ShardRef(
        key=keys.shard(**version._asdict(), rank=rank, world_size=RANKS),
        rank=rank,
        bytes=LAYER_BYTES // RANKS,
        digest=f"{rank:032x}",
        ranges=(
            ElementRange(tensor=f"{prefix}.mlp.up_proj.weight", first=70_000 * rank, count=70_000),
            ElementRange(tensor=f"{prefix}.mlp.down_proj.weight", first=0, count=30_000),
        ),
    )


class MadeUpGroup(WriterGroup):
    """Listens to made-up ShardWriters."""

    writers: dict[str, MadeUpWriter]

    async def _writer(self, node: str) -> Any:
        return self.writers[node]


def commit_once() -> Commit:
    """Book and commit one version of every layer."""
    writers = {f"node-{node}": MadeUpWriter(node) for node in range(RANKS // RANKS_A_NODE)}
    gc.collect()
    interval = sys.getswitchinterval()
    keep_loop_free()
    try:
        with tempfile.TemporaryDirectory(prefix="layercheck-bench-") as folder:
            return asyncio.run(_commit(Path(folder), writers))
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()


async def _commit(folder: Path, writers: dict[str, MadeUpWriter]) -> Commit:
    setup, problems = actor_setup(folder, in_flight_limit_bytes=10**12), list[Exception]()
    commits = Committer(setup, Catalog(LocalStore(folder)), lambda _: None)
    commits.begin_attempt(group_facts())
    uploads = Uploads(commits, lambda *_: None, problems.append)
    uploads.begin_attempt(ATTEMPT, EPOCH)
    for name in names():
        (folder / keys.version(name, STEP, EPOCH, ATTEMPT)).mkdir(parents=True)  # its shards are there
        commits.ledger.issue(1, name, (), STEP)
    commits.ledger.carried_out(1, STEP)
    group = MadeUpGroup(setup, uploads, problems.append)
    group.writers = writers
    gaps = list[tuple[float, float]]()
    beside = [asyncio.ensure_future(work) for work in (commits.run_forever(), _watch(gaps))]
    await asyncio.sleep(0.05)
    gaps.clear()
    began, cpu_began = time.perf_counter(), time.process_time()
    group.follow(writers)
    while commits.whole_at() != STEP:
        if problems:
            raise problems[0]
        await asyncio.wait(beside, timeout=0.001)
        for task in beside:
            if task.done():
                task.result()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    walls, cpus = zip(*gaps, strict=True)
    return Commit(seconds, cpu_seconds, 1000 * max(walls), 1000 * max(cpus))


async def _watch(gaps: list[tuple[float, float]]) -> None:
    while True:
        began, cpu_began = time.perf_counter(), time.thread_time()
        await asyncio.sleep(0)
        gaps.append((time.perf_counter() - began, time.thread_time() - cpu_began))
        await asyncio.sleep(0.001)
