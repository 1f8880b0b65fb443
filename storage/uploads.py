"""Uploads: follows the layer versions in flight, from the ranks' hand-over until all their shards are stored."""

from collections.abc import Callable

from storage.committer import Committer
from storage.errors import TrainingError
from storage.messages import Report, ShardOutcome
from storage.records import Manifest, VersionId
from storage.writer_group import ShardKey, WriterGroup


class Uploads:
    """Books what the ShardWriters say, and makes a layer due again whose version will not become durable.

    No clock decides that a shard is lost: its rank knows that the writer has accepted it, and the writer, asked after
    that, neither holds it nor has an outcome of it.
    """

    def __init__(
        self, commits: Committer, stored: Callable[[Manifest], None], give_up: Callable[[Exception], None]
    ) -> None:
        """`stored` hears of each version of which all shards are stored."""
        self._commits, self._stored, self._give_up = commits, stored, give_up
        self._booked: set[ShardKey] = set()
        self._attempt = self._first_epoch = 0

    def resume_attempt(self, attempt: int) -> None:
        """`attempt` goes on; which epoch it began in is not known any more."""
        self._attempt, self._first_epoch = attempt, 0

    def begin_attempt(self, attempt: int, epoch: int) -> None:
        """From now on nothing counts that another attempt, or an epoch before `epoch`, has handed over."""
        self._attempt, self._first_epoch = attempt, epoch
        self._booked.clear()

    def take(self, outcome: ShardOutcome) -> ShardKey | None:
        """Book an outcome; returns its key once the writer may forget it."""
        key, version = (outcome.version, outcome.rank), outcome.version
        if version.attempt != self._attempt or version.epoch < self._first_epoch:
            return key
        if outcome.shard is None:
            self._take_problem(version, str(outcome.problem), poisoned=outcome.poisoned)
            return key
        if key not in self._booked:
            self._booked.add(key)
            self._commits.health.works()
            self._commits.journal.wrote(outcome.shard.bytes)
            manifest = self._commits.ledger.shard_durable(version, outcome.world_size, outcome.shard)
            if manifest is not None:
                self._stored(manifest)
                self._commits.stored(manifest)
        if self._commits.ledger.committed.layers[version.layer].step < version.step:
            return None  # the writer keeps it for an actor that is restarted before the commit
        self._booked.discard(key)
        return key

    def _take_problem(self, version: VersionId, problem: str, *, poisoned: bool) -> None:
        self._fail(version.layer, "poisoned version" if poisoned else "failed upload", problem, step=version.step)
        if poisoned:  # NaN stays NaN under AdamW: no later version of this layer would be any better
            self._give_up(TrainingError(f"{problem}; the last restore point is intact: lower training.learning_rate"))
        else:
            self._commits.health.fails(problem)

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
        for layer, flight in list(ledger.in_flight.items()):
            if flight.step is None or flight.stored or layer in report.unacknowledged:
                continue
            if flight.accepted_at is None:
                flight.accepted_at = writers.moment
            elif writers.all_heard_since(flight.accepted_at):
                version = VersionId(layer=layer, step=flight.step, epoch=epoch, attempt=self._attempt)
                missing = {(version, rank) for rank in ledger.missing_ranks(version, world_size)}
                if not missing <= writers.pending():
                    what = f"{layer} at step {flight.step}: its ShardWriter no longer holds it"
                    self._fail(layer, "lost upload", what)

    def _fail(self, layer: str, kind: str, what: str, *, step: int | None = None) -> None:
        self._commits.ledger.fail(layer, step)
        self._commits.journal.incident(kind, what)
