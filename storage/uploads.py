"""Uploads: follows the layer versions in flight, from the ranks' hand-over until all their shards are stored."""

from collections.abc import Callable

from storage.assembly import Assembly
from storage.committer import Committer
from storage.errors import TrainingError
from storage.messages import FailedShard, Order, Report, WriterReport
from storage.records import VersionId
from storage.writer_group import WriterGroup


class Uploads:
    """Books what the ShardWriters say, and makes a layer due again whose version will not become durable.

    No clock decides that a shard is lost: its rank knows that the writer has accepted it, and the writer, asked after
    that, neither holds it nor has an outcome of it. Nobody asks while training goes on and every writer is the one it
    was when the layer was ordered: a writer that lives loses nothing. Ranks that stand still wait for what is in
    flight, so that has to be true of all of it.
    """

    def __init__(
        self, commits: Committer, stored: Callable[[Assembly], None], give_up: Callable[[Exception], None]
    ) -> None:
        """`stored` hears of each version of which all shards are stored."""
        self._commits, self._stored, self._give_up = commits, stored, give_up
        self._attempt = self._first_epoch = 0

    def resume_attempt(self, attempt: int) -> None:
        """`attempt` goes on; which epoch it began in is not known any more."""
        self._attempt, self._first_epoch = attempt, 0

    def begin_attempt(self, attempt: int, epoch: int) -> None:
        """From now on nothing counts that another attempt, or an epoch before `epoch`, has handed over."""
        self._attempt, self._first_epoch = attempt, epoch

    def take(self, report: WriterReport) -> None:
        """Book what a ShardWriter tells."""
        ours = [stored for stored in report.stored if not self._is_of_another_history(stored.version)]
        if ours:
            self._commits.health.works()
            self._commits.journal.wrote(sum(sum(stored.sizes.values()) for stored in ours))
        for stored in ours:
            assembly = self._commits.ledger.shards_durable(
                stored.version, stored.world_size, stored.entries, stored.sizes
            )
            if assembly is not None:
                self._stored(assembly)
                self._commits.stored(assembly)
        for failed in report.failed:
            self._take_failed(failed)

    def _take_failed(self, failed: FailedShard) -> None:
        version, problem = failed.version, failed.problem
        if self._is_of_another_history(version):
            return
        kind = "poisoned version" if failed.poisoned else "failed upload"
        self._fail(version.layer, kind, problem, step=version.step)
        if failed.poisoned:  # NaN stays NaN under AdamW: no later version of this layer would be any better
            self._give_up(TrainingError(f"{problem}; the last restore point is intact: lower training.learning_rate"))
        else:
            self._commits.health.fails(problem)

    def as_of(self) -> object:
        """Another object when more versions may be over than before."""
        return self._commits.points.newest

    def is_over(self, version: VersionId) -> bool:
        """Whether the writers may forget what is stored of `version`; until then they keep it for an actor to come."""
        return self._is_of_another_history(version) or self._commits.ledger.is_over(version)

    def _is_of_another_history(self, version: VersionId) -> bool:
        return version.attempt != self._attempt or version.epoch < self._first_epoch

    def ordered(self, order: Order, writers: WriterGroup) -> None:
        """The ranks will hear of `order` now."""
        for layer in order.layers:
            self._commits.ledger.in_flight[layer].ordered_at = writers.moment

    def take_report(self, report: Report, epoch: int, writers: WriterGroup, world_size: int) -> None:
        """What the ranks say of the orders and hand-overs under way."""
        ledger = self._commits.ledger
        if report.carried_out is not None and report.carried_out.epoch == epoch:
            ledger.carried_out(report.carried_out.decision, report.carried_out_step)
        # Rank 0 carries an order out, and says so, in the very report after the reply that held it.
        for layer in [name for name, flight in ledger.in_flight.items() if flight.step is None]:
            self._fail(layer, "lost order", f"{layer}: the reply with the order did not reach the workers")
        for layer in report.failed_hand_overs:
            self._fail(layer, "hand-over failed", f"{layer}: its ShardWriter could not be reached")
        self._look_for_lost(report, epoch, writers, world_size)

    def _look_for_lost(self, report: Report, epoch: int, writers: WriterGroup, world_size: int) -> None:
        ledger, standing = self._commits.ledger, report.hold or report.flush
        doubtful = {
            layer: flight
            for layer, flight in ledger.in_flight.items()
            if not flight.stored and (standing or flight.ordered_at <= writers.changed_at)
        }
        writers.in_doubt = bool(doubtful)
        for layer, flight in doubtful.items():
            if flight.step is None or layer in report.unacknowledged:
                continue
            if flight.accepted_at is None:
                flight.accepted_at = writers.moment
            elif writers.all_heard_since(flight.accepted_at):
                version = VersionId(layer=layer, step=flight.step, epoch=epoch, attempt=self._attempt)
                if not ledger.missing_ranks(version, world_size) <= writers.pending_ranks(version):
                    what = f"{layer} at step {flight.step}: its ShardWriter no longer holds it"
                    self._fail(layer, "lost upload", what)

    def _fail(self, layer: str, kind: str, what: str, *, step: int | None = None) -> None:
        self._commits.ledger.fail(layer, step)
        self._commits.journal.incident(kind, what)
