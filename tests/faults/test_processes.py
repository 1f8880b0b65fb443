"""One run, three faults: a NaN gradient to skip, a ShardWriter that stops, and one that dies with shards queued."""

import signal
import time
from itertools import pairwise

import numpy as np
import pytest

from storage.catalog import Catalog
from tests.helpers.runs import (
    NAN_AT_5,
    Runs,
    actor_process,
    check_consistent,
    kill,
    running,
    wait_for_step,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # start-ups of Ray take most of it

STEPS, MAX_LAG = 150, 4


def test_a_nan_skipped_and_a_shard_writer_stopped_continued_and_killed_with_shards_queued(runs: Runs) -> None:
    name = "writer-stopped"
    store = runs.store(name)
    checkpoint = {"max_lag": MAX_LAG, "keep_restore_points": 200}
    training = {"steps": STEPS, "on_nonfinite": "skip"}
    with running(runs.spec(name, training=training, checkpoint=checkpoint, fault_injection=[NAN_AT_5])) as job:
        wait_for_step(store, 6, job)
        writer = actor_process("ShardWriter")
        writer.send_signal(signal.SIGSTOP)
        try:
            time.sleep(4)
            stuck_at = runs.newest(name).step
            time.sleep(2)
            assert not job.done()
            assert runs.newest(name).step == stuck_at < STEPS, "nothing was held"
        finally:
            writer.send_signal(signal.SIGCONT)
        wait_until("training goes on", lambda: runs.newest(name).step > stuck_at + MAX_LAG, future=job)
        writer.send_signal(signal.SIGSTOP)  # so that shards are on their way when it dies
        time.sleep(0.5)
        kill(writer)
    assert job.result().verdict is None
    record = check_consistent(store)
    assert record.totals.held_seconds > 3
    kinds = {incident.kind for incident in record.incidents}
    assert kinds & {"lost upload", "hand-over failed"}, record.incidents
    assert "skipped step" in kinds
    assert np.isfinite(record.progress.loss)
    assert (record.epoch, record.totals.attempts) == (1, 1)
    steps = sorted({point.step for point in Catalog(store).restorable().records})
    assert max(after - before for before, after in pairwise(steps)) <= MAX_LAG, "it held too late"
    assert record.step == STEPS
