"""Processes of the protocol killed or stopped mid-run: training goes on, the catalog stays consistent."""

import signal
import time
from itertools import pairwise

import pytest

from app.gc import collect
from app.verify import verify_run
from storage.catalog import Catalog
from storage.object_store import ObjectStore
from storage.records import Record
from tests.helpers.runs import Runs, actor_process, kill, running, wait_for_step, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # start-ups of Ray take most of it

LONG = {"steps": 120}


def check_consistent(store: ObjectStore) -> Record:
    """Every retained restore point reads back, nothing unnamed is left, no bound was broken."""
    found = verify_run(store)
    assert found.problems == []
    assert found.objects > 0
    assert collect(store, dry_run=True).keys == ()
    records = Catalog(store).restorable().records
    assert all(max(record.ages().values()) <= record.staleness_bound_steps for record in records)
    assert records[0].finished
    return records[0]


def test_checkpoint_actor_killed(runs: Runs) -> None:
    name = "actor-killed"
    store = runs.store(name)
    with running(runs.spec(name, training=LONG)) as job:
        wait_for_step(store, 5, job)
        kill(actor_process("CheckpointActor"))
        wait_until("the next epoch", lambda: Catalog(store).newest_claim().epoch == 2, future=job)
        assert not job.done()
    outcome = job.result()
    assert outcome.verdict is None
    record = check_consistent(store)
    assert record.epoch == 2
    assert (record.totals.attempts, record.recoveries) == (1, ()), "training was restarted"
    assert record.step == LONG["steps"]


@pytest.mark.parametrize("mode", ["adaptive", "full"])
def test_shard_writer_killed(runs: Runs, mode: str) -> None:
    name = f"writer-killed-{mode}"
    store = runs.store(name)
    with running(runs.spec(name, training=LONG, checkpoint={"mode": mode})) as job:
        wait_for_step(store, 5, job)
        writer = actor_process("ShardWriter")
        writer.send_signal(signal.SIGSTOP)  # so that shards are on their way when it dies
        time.sleep(0.5)
        kill(writer)
    assert job.result().verdict is None
    record = check_consistent(store)
    assert {i.kind for i in record.incidents} & {"lost upload", "hand-over failed"}, record.incidents
    assert (record.epoch, record.totals.attempts) == (1, 1)
    assert record.step == LONG["steps"]


def test_a_slow_store_holds_training_at_max_lag(runs: Runs) -> None:
    name, max_lag = "slow-store", 4
    store = runs.store(name)
    with running(runs.spec(name, training=LONG, checkpoint={"max_lag": max_lag, "keep_restore_points": 200})) as job:
        wait_for_step(store, 5, job)
        writer = actor_process("ShardWriter")
        writer.send_signal(signal.SIGSTOP)
        try:
            time.sleep(4)
            stuck_at = runs.newest(name).step
            time.sleep(2)
            assert not job.done()
            assert runs.newest(name).step == stuck_at < LONG["steps"], "nothing was held"
        finally:
            writer.send_signal(signal.SIGCONT)
    assert job.result().verdict is None
    record = check_consistent(store)
    assert record.totals.attempts == 1
    assert record.totals.held_seconds > 3
    steps = sorted({point.step for point in Catalog(store).restorable().records})
    assert max(after - before for before, after in pairwise(steps)) <= max_lag, "it held too late"
    assert record.step == LONG["steps"]
