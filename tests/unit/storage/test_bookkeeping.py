"""From what ShardWriters tell to a restore point: what is told twice, too late, or by a writer of another life."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from storage import writer_group
from storage.attempts import Attempts
from storage.catalog import Catalog
from storage.committer import Committer
from storage.errors import FencedError, ObjectNotFoundError
from storage.messages import AttemptFacts, Order, Report
from storage.object_store import open_object_store
from storage.planner import RestorePlanner
from storage.records import BaseVersion
from storage.shard_format import ShardMeta
from storage.uploads import Uploads
from storage.writer_actor import ShardWriter
from tests.helpers.records import actor_setup, claim, facts
from tests.helpers.writers import Called, LocalGroup, accept_shard, eventually

LAYERS = ("a", "b")


@dataclass(frozen=True)
class Node:
    """Where a ShardWriter lives; the next life of it begins with nothing."""

    called: Called
    folder: Path

    @classmethod
    def started(cls, folder: Path) -> "Node":
        setup = actor_setup(folder)
        return cls(Called(ShardWriter(setup.storage, setup.run, ())), folder)

    def restart_writer(self) -> None:
        setup = actor_setup(self.folder)
        self.called.actor = ShardWriter(setup.storage, setup.run, ())

    async def accept_all(self, step: int, rank: int, world_size: int, *, attempt: int, epoch: int) -> None:
        """The rank's shards of all layers."""
        for layer in LAYERS:
            await self.accept(layer, step, rank, world_size, attempt=attempt, epoch=epoch)

    async def accept(self, layer: str, step: int, rank: int, world_size: int, *, attempt: int, epoch: int) -> None:
        meta = ShardMeta(
            run="run",
            layer=layer,
            step=step,
            optimizer_step=step,
            epoch=epoch,
            attempt=attempt,
            rank=rank,
            world_size=world_size,
        )
        await accept_shard(self.called.actor, meta, np.full(8, step, "<f4"), first=8 * rank)


def group_facts(world_size: int) -> AttemptFacts:
    """A worker group on the one node."""
    base, homes = BaseVersion(source="m", digest="d"), ("node",) * world_size
    return AttemptFacts(node_of_rank=homes, facts=facts(*LAYERS), shard_bytes={}, base=base)


class Books:
    """A CheckpointActor's books: it has claimed an epoch, and listens to the writer of `node`."""

    def __init__(self, node: Node) -> None:
        setup = actor_setup(node.folder)
        self.catalog = Catalog(open_object_store(setup.storage, setup.run))
        self.epoch = self.catalog.claim(claim()).epoch
        self.commits = Committer(setup, self.catalog, lambda _: None)
        self.problems: list[Exception] = []
        self.uploads = Uploads(self.commits, lambda _: None, self.problems.append)
        self.group = LocalGroup(setup, self.uploads, self.problems.append)
        self.group.called = {"node": node.called}
        self.group.open(self.epoch)
        self._tasks: list[asyncio.Future[None]] = []

    async def open(self, attempt: int) -> None:
        """Attempt `attempt` goes on."""
        await self.commits.open(self.epoch)
        self.uploads.resume_attempt(attempt)
        self._listen()

    async def begin(self, attempt: int, world_size: int) -> None:
        """Attempt `attempt` begins."""
        if not self._tasks:
            await self.commits.open(self.epoch)
        self.commits.begin_attempt(group_facts(world_size))
        self.uploads.begin_attempt(attempt, self.epoch)
        self.commits.journal.attempt_began(self.commits.ledger.committed.step, None)
        await self.commits.commit(self.commits.ledger.committed)
        self._listen()

    def _listen(self) -> None:
        if not self._tasks:
            self.group.follow(["node"])
            self._tasks.append(asyncio.ensure_future(self.commits.run_forever()))

    def order(self, step: int, attempt: int) -> Order:
        """All layers are ordered at `step`, and the ranks say that they have handed them over."""
        order = Order(decision=step, epoch=self.epoch, attempt=attempt, layers=LAYERS)
        for layer in LAYERS:
            self.commits.ledger.issue(step, layer, (1,), step)
        self.uploads.ordered(order, self.group)
        return order

    def report(self, order: Order, world_size: int) -> None:
        """The ranks say that they have carried `order` out, and that the writers have accepted everything."""
        sums = Report(
            attempt=order.attempt,
            step=order.decision,
            sums=np.zeros((0, 3)),
            carried_out=order,
            carried_out_step=order.decision,
        )
        self.uploads.take_report(sums, self.epoch, self.group, world_size)

    async def settled(self) -> None:
        """Everything on its way is stored, told and committed."""
        await self.group.drain(lambda: self.commits.is_settled(), 60)

    def whole_at(self) -> int | None:
        return self.commits.whole_at()

    async def die(self) -> None:
        """Killed: nothing of it goes on."""
        self.group.silence()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def play(body: Callable[[Node], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        await body(Node.started(folder))

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.fixture(autouse=True)
def polls_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_group, "POLL_S", 0.02)
    monkeypatch.setattr(writer_group, "RESTART_WAIT_S", 0.01)


def test_an_actor_restarted_before_the_commit_hears_everything_again_and_commits_it(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        first = Books(node)
        await first.begin(1, 2)
        first.order(5, 1)
        await node.accept_all(5, 0, 2, attempt=1, epoch=1)
        await first.settled()
        assert first.whole_at() == 0
        assert first.commits.journal.totals.bytes_written > 0
        await first.die()

        second = Books(node)
        await second.open(1)
        await node.accept_all(5, 1, 2, attempt=1, epoch=1)
        await second.settled()
        assert second.whole_at() == 5
        record = second.catalog.restorable().records[0]
        assert {(ref.step, ref.epoch) for ref in record.layers.values()} == {(5, 1)}
        assert second.problems == []
        await second.die()

    play(body, tmp_path)


def test_what_a_writer_held_when_it_was_restarted_between_two_polls_is_due_again(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        books = Books(node)
        await books.begin(1, 1)
        order = books.order(5, 1)
        await node.accept("a", 5, 0, 1, attempt=1, epoch=1)
        await eventually(lambda: books.commits.ledger.committed.layers["a"].step == 5)
        node.restart_writer()  # `b` was accepted by the life that ends here, and was neither stored nor told
        while not books.commits.ledger.due:
            books.report(order, 1)
            assert books.commits.ledger.in_flight.keys() <= {"b"}
            await asyncio.sleep(0.02)
        assert books.commits.ledger.due == {"b"}
        assert [incident.kind for incident in books.commits.journal.incidents] == ["lost upload"]
        again = books.order(6, 1)
        await node.accept_all(6, 0, 1, attempt=1, epoch=1)
        books.report(again, 1)
        await books.settled()
        assert books.whole_at() == 6
        assert len(books.commits.journal.incidents) == 1
        await books.die()

    play(body, tmp_path)


def test_a_smaller_world_s_attempt_is_not_completed_by_what_the_larger_one_left(tmp_path: Path) -> None:
    """Outcomes of attempt 1, told after attempt 2 has begun, are of no version of attempt 2, and are forgotten."""

    async def body(node: Node) -> None:
        books = Books(node)
        await books.begin(1, 3)
        books.order(5, 1)
        for rank in range(2):
            await node.accept("a", 5, rank, 3, attempt=1, epoch=1)
        await books.settled()
        await books.begin(2, 1)
        await node.accept("a", 5, 2, 3, attempt=1, epoch=1)  # a rank of attempt 1 had it under way
        books.order(5, 2)
        await node.accept("b", 5, 0, 1, attempt=2, epoch=1)
        await books.settled()
        assert books.commits.ledger.committed.layers["a"].step == 0
        written = books.commits.journal.totals.bytes_written
        await node.accept("a", 5, 0, 1, attempt=2, epoch=1)
        await books.settled()
        assert books.whole_at() == 5
        assert {ref.attempt for ref in books.catalog.restorable().records[0].layers.values()} == {2}
        await eventually(lambda: not node.called.actor._outcomes)
        assert books.commits.journal.totals.bytes_written > written
        await books.die()

    play(body, tmp_path)


def test_what_a_lost_node_s_writer_held_is_never_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nobody(name: str) -> None:
        raise ValueError(name)

    monkeypatch.setattr(writer_group, "find_writer", find_nobody)

    async def body(node: Node) -> None:
        books, lost = Books(node), Node.started(tmp_path)
        books.group.called["lost"] = lost.called
        await books.begin(1, 2)
        books.group.follow(["node", "lost"])
        books.order(5, 1)
        await node.accept_all(5, 0, 2, attempt=1, epoch=1)
        await lost.accept("a", 5, 1, 2, attempt=1, epoch=1)
        await eventually(lambda: books.commits.ledger.committed.layers["a"].step == 5)
        lost.called.die()
        await eventually(lambda: not books.group.all_heard_since(books.group.moment))
        books.group.follow(["node"])  # the ranks that are left
        await books.settled()
        await books.begin(2, 1)
        assert {name: ref.step for name, ref in books.commits.ledger.committed.layers.items()} == {"a": 5, "b": 0}
        books.order(6, 2)
        await node.accept_all(6, 0, 1, attempt=2, epoch=1)
        await books.settled()
        assert books.whole_at() == 6
        assert books.problems == []
        await books.die()

    play(body, tmp_path)


def test_a_stale_driver_whose_group_comes_back_ends_no_writers(tmp_path: Path) -> None:
    """The writers of drivers other than its own may be those of the one that has taken over."""

    async def body(node: Node) -> None:
        stale = Books(node)
        await stale.begin(1, 1)
        newer = Books(node)
        await newer.commits.open(newer.epoch)
        setup, store = actor_setup(node.folder), stale.catalog.store
        planner = RestorePlanner(stale.commits, stale.catalog, setup.attempts_without_progress)
        attempts = Attempts(setup, store, stale.commits, planner, stale.uploads, stale.group)
        attempts.open(stale.epoch, 1, goes_on=True)
        with pytest.raises(FencedError):
            await attempts.begin(group_facts(1))
        assert not stale.group.ended_left_behind
        await stale.die()

    play(body, tmp_path)


def test_a_fenced_epoch_writes_no_manifest_of_what_it_is_told(tmp_path: Path) -> None:
    async def body(node: Node) -> None:
        books = Books(node)
        await books.begin(1, 1)
        books.order(5, 1)
        newer = Books(node)
        await newer.commits.open(newer.epoch)
        await node.accept_all(5, 0, 1, attempt=1, epoch=1)
        with pytest.raises(FencedError):
            await books._tasks[0]
        with pytest.raises(ObjectNotFoundError):
            books.catalog.store.size("layers/a/5/1.1/manifest.json")
        await newer.begin(2, 1)
        newer.order(5, 2)
        await node.accept_all(5, 0, 1, attempt=2, epoch=newer.epoch)
        await newer.settled()
        assert {(ref.epoch, ref.attempt) for ref in newer.catalog.restorable().records[0].layers.values()} == {(2, 2)}
        await newer.die()

    play(body, tmp_path)
