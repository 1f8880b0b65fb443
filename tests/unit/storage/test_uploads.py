"""Uploads: a shard is lost when its writer, asked after it had accepted it, no longer holds it. No clock decides."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from storage.assembly import Assembly
from storage.catalog import Catalog
from storage.committer import Committer
from storage.local_store import LocalStore
from storage.messages import AttemptFacts, FailedShard, Order, Report, StoredShards, WriterReport
from storage.records import BaseVersion, VersionId
from storage.uploads import Uploads
from tests.helpers.calls import count_calls
from tests.helpers.records import LAYER_BYTES, actor_setup, facts, told_of

ATTEMPT, EPOCH, STEP, WORLD = 2, 3, 5, 2
VERSION = VersionId(layer="a", step=STEP, epoch=EPOCH, attempt=ATTEMPT)
ORDER = Order(decision=1, epoch=EPOCH, attempt=ATTEMPT, layers=("a",))
ALL = {0, 1}


@dataclass
class Heard:
    """What the writers have said: facts, as `WriterGroup` has them."""

    moment: int = 0
    last: int = 0
    changed_at: int = 0
    in_doubt: bool = False
    held: set[int] = field(default_factory=set)
    """Ranks whose shards of `VERSION` are on their way."""

    def all_heard_since(self, moment: int) -> bool:
        return self.last > moment

    def pending_ranks(self, version: VersionId) -> set[int]:
        assert self.in_doubt, "the writers are not asked"
        return self.held if version == VERSION else set()

    def say(self, held: set[int]) -> None:
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
        self.complete: list[Assembly] = []
        self.uploads = Uploads(self.commits, self.complete.append, self.errors.append)
        self.uploads.begin_attempt(ATTEMPT, EPOCH)
        self.writers = Heard()
        self.ledger = self.commits.ledger

    def hand_over(self, *, restarted: bool = True) -> None:
        """The layer is decided, a writer is restarted, and the ranks say that they have carried the order out."""
        self.writers.moment += 1
        self.ledger.issue(1, "a", (100,), STEP)
        self.uploads.ordered(ORDER, self.writers)
        if restarted:
            self.writers.changed_at = self.writers.moment
        self.report(carried_out=ORDER, unacknowledged=("a",))

    def report(self, **changes) -> None:
        sums = Report(attempt=ATTEMPT, step=STEP, sums=np.zeros((0, 3)), carried_out_step=STEP, **changes)
        self.uploads.take_report(sums, EPOCH, self.writers, WORLD)

    def stored(self, *ranks: int, **changes: int) -> bool:
        """The shards of `ranks` are stored; returns whether their writer may forget it."""
        version = VERSION._replace(**changes)
        entries, sizes = told_of(version, ranks, WORLD)
        self.told(StoredShards(version, WORLD, entries, sizes))
        return self.uploads.is_over(version)

    def failed(self, **changes: int) -> None:
        """A shard could not be stored."""
        version = VERSION._replace(**changes)
        self.told(failed=FailedShard(version=version, problem="503"))

    def told(self, stored: StoredShards | None = None, failed: FailedShard | None = None) -> None:
        parts = {"stored": (stored,) if stored else (), "failed": (failed,) if failed else ()}
        self.uploads.take(WriterReport(life="life", last=1, pending=None, **parts))

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
    run.writers.held = {0}
    run.report()
    assert "a" in run.ledger.in_flight, "what was said before does not count: it may have been accepted since"
    run.writers.say({0})
    run.report()
    assert run.kinds == ["lost upload"]
    assert run.ledger.due == {"a"}


def test_while_every_writer_lives_nobody_asks_what_they_hold(run: Run) -> None:
    """They hold 200,000 shards when 1,024 ranks have handed 200 layers over."""
    run.hand_over(restarted=False)
    for _ in range(100):
        run.report()
        run.writers.say(set())
    assert not run.writers.in_doubt
    assert "a" in run.ledger.in_flight
    run.writers.changed_at = run.writers.moment
    run.report()
    assert run.writers.in_doubt
    run.writers.say(set())
    run.report()
    assert run.kinds == ["lost upload"]
    run.report()
    assert not run.writers.in_doubt


@pytest.mark.parametrize("standing", ["hold", "flush"])
def test_ranks_that_stand_still_do_not_wait_for_what_no_writer_holds(run: Run, standing: str) -> None:
    run.hand_over(restarted=False)
    run.report(**{standing: True})
    assert run.writers.in_doubt
    run.writers.say(ALL)
    run.report(**{standing: True})
    assert run.kinds == []
    run.writers.say(set())
    run.report(**{standing: True})
    assert run.kinds == ["lost upload"]
    assert run.ledger.due == {"a"}


def test_a_stored_shard_is_not_missed(run: Run) -> None:
    run.hand_over()
    assert not run.stored(0)
    run.report()
    run.writers.say({1})
    run.report()
    assert "a" in run.ledger.in_flight
    assert not run.stored(1), "an actor that is restarted before the commit would ask for it"
    run.writers.say(set())
    run.report()
    assert run.ledger.in_flight["a"].stored
    assert [(assembly.version, assembly.bytes) for assembly in run.complete] == [(VERSION, LAYER_BYTES)]
    assert run.kinds == []
    assert run.commits.journal.totals.bytes_written == LAYER_BYTES


def test_what_booking_costs_does_not_grow_with_the_shards(run: Run) -> None:
    """Objects and calls for each shard made booking what 1,024 ranks store of 200 layers take a minute."""

    def calls(layer: str, ranks: range) -> int:
        version = VERSION._replace(layer=layer)
        entries, sizes = told_of(version, ranks, WORLD * len(ranks))
        stored = StoredShards(version, WORLD * len(ranks), entries, sizes)
        counted = count_calls(lambda: run.told(stored))
        assert counted["shards_durable"] == 1
        return counted.total()

    assert calls("a", range(1)) == calls("b", range(1024))


def test_an_order_that_is_not_confirmed_is_lost(run: Run) -> None:
    run.ledger.issue(1, "a", (100,), STEP)
    run.report()
    assert run.kinds == ["lost order"]


@pytest.mark.parametrize("change", [{"attempt": 1}, {"attempt": 3}, {"epoch": 2}])
def test_outcomes_of_another_history_are_forgotten(run: Run, change: dict[str, int]) -> None:
    run.hand_over()
    assert run.stored(0, 1, **change)
    run.failed(**change)
    assert not run.ledger.in_flight["a"].stored
    assert run.kinds == []


def test_the_late_failure_of_an_older_version_is_told_and_fails_nothing_newer(run: Run) -> None:
    run.hand_over()
    run.failed(step=STEP - 1)
    assert "a" in run.ledger.in_flight
    run.failed()
    assert run.ledger.due == {"a"}
