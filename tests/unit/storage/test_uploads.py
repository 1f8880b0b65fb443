"""Uploads: a shard is lost when its writer, asked after it had accepted it, no longer holds it. No clock decides."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from storage.catalog import Catalog
from storage.committer import Committer
from storage.local_store import LocalStore
from storage.messages import AttemptFacts, Order, Report, ShardOutcome
from storage.records import BaseVersion, Manifest, VersionId
from storage.uploads import Uploads
from storage.writer_group import ShardKey
from tests.helpers.records import LAYER_BYTES, actor_setup, facts, shard

ATTEMPT, EPOCH, STEP, WORLD = 2, 3, 5, 2
VERSION = VersionId(layer="a", step=STEP, epoch=EPOCH, attempt=ATTEMPT)
ALL = {(VERSION, 0), (VERSION, 1)}


@dataclass
class Heard:
    """What the writers have said: facts, as `WriterGroup` has them."""

    moment: int = 0
    last: int = 0
    held: set[ShardKey] = field(default_factory=set)

    def all_heard_since(self, moment: int) -> bool:
        return self.last > moment

    def pending(self) -> set[ShardKey]:
        return self.held

    def say(self, held: set[ShardKey]) -> None:
        """Every writer answers a question that was asked just now."""
        self.moment += 1
        self.last, self.held = self.moment, held


class Run:
    def __init__(self, folder: Path) -> None:
        self.commits = Committer(actor_setup(folder), Catalog(LocalStore(folder)), lambda _: None)
        group = AttemptFacts(
            node_of_rank=("n",) * WORLD, facts=facts("a", "b"), shard_bytes={}, base=BaseVersion(source="m", digest="d")
        )
        self.commits.begin_attempt(group)
        self.errors: list[Exception] = []
        self.stored: list[Manifest] = []
        self.uploads = Uploads(self.commits, self.stored.append, self.errors.append)
        self.uploads.begin_attempt(ATTEMPT, EPOCH)
        self.writers = Heard()
        self.ledger = self.commits.ledger

    def hand_over(self) -> None:
        """The layer is decided, and the ranks say that they have carried it out."""
        self.ledger.issue(1, "a", (100,), STEP)
        self.report(carried_out=Order(decision=1, epoch=EPOCH, attempt=ATTEMPT, layers=("a",)), unacknowledged=("a",))

    def report(self, **changes) -> None:
        sums = Report(attempt=ATTEMPT, step=STEP, sums=np.zeros((0, 3)), carried_out_step=STEP, **changes)
        self.uploads.take_report(sums, EPOCH, self.writers, WORLD)

    def outcome(self, rank: int, *, problem: str | None = None, **changes) -> ShardKey | None:
        version = VERSION.model_copy(update=changes)
        stored = None if problem else shard(version, rank, WORLD)
        told = ShardOutcome(version=version, world_size=WORLD, rank=rank, shard=stored, problem=problem)
        return self.uploads.take(told)

    @property
    def kinds(self) -> list[str]:
        return [incident.kind for incident in self.commits.journal.incidents]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    async def made() -> Run:
        return Run(tmp_path)

    return asyncio.run(made())


def test_a_hand_over_that_takes_ever_so_long_is_not_lost(run: Run) -> None:
    run.hand_over()
    for _ in range(100):
        run.writers.say(set())  # the writer is asked, has not seen it yet
        run.report(unacknowledged=("a",))
    assert "a" in run.ledger.in_flight


def test_an_upload_that_takes_ever_so_long_is_not_lost(run: Run) -> None:
    run.hand_over()
    for _ in range(100):
        run.report()
        run.writers.say(ALL)
    assert "a" in run.ledger.in_flight
    assert run.kinds == []


def test_a_shard_that_no_writer_holds_any_more_is_lost(run: Run) -> None:
    run.hand_over()
    run.writers.say(ALL)
    run.report()
    run.writers.held = {(VERSION, 0)}
    run.report()
    assert "a" in run.ledger.in_flight, "what was said before does not count: it may have been accepted since"
    run.writers.say({(VERSION, 0)})
    run.report()
    assert run.kinds == ["lost upload"]
    assert run.ledger.due == {"a"}


def test_a_stored_shard_is_not_missed(run: Run) -> None:
    run.hand_over()
    run.outcome(0)
    run.report()
    run.writers.say({(VERSION, 1)})
    run.report()
    assert "a" in run.ledger.in_flight
    run.outcome(1)
    run.writers.say(set())
    run.report()
    assert run.ledger.in_flight["a"].stored
    assert [(manifest.version, manifest.bytes) for manifest in run.stored] == [(VERSION, LAYER_BYTES)]
    assert run.kinds == []


def test_an_order_that_is_not_confirmed_is_lost(run: Run) -> None:
    run.ledger.issue(1, "a", (100,), STEP)
    run.report()
    assert run.kinds == ["lost order"]


@pytest.mark.parametrize("change", [{"attempt": 1}, {"attempt": 3}, {"epoch": 2}])
def test_outcomes_of_another_history_are_forgotten(run: Run, change: dict[str, int]) -> None:
    run.hand_over()
    other = VERSION.model_copy(update=change)
    assert [run.outcome(rank, **change) for rank in range(WORLD)] == [(other, 0), (other, 1)]
    assert run.outcome(0, problem="503", **change) == (other, 0)
    assert not run.ledger.in_flight["a"].stored
    assert run.kinds == []


def test_the_late_failure_of_an_older_version_is_told_and_fails_nothing_newer(run: Run) -> None:
    run.hand_over()
    run.outcome(0, problem="503", step=STEP - 1)
    assert "a" in run.ledger.in_flight
    run.outcome(1, problem="503")
    assert run.ledger.due == {"a"}
