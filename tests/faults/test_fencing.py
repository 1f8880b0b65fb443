"""Fencing: an epoch that wakes up after a newer one took the run over commits nothing, deletes nothing, and stops."""

import signal
from collections.abc import Iterator

import psutil
import pytest

from app.gc import collect
from app.verify import verify_run
from storage import keys
from storage.catalog import Catalog
from storage.object_store import ObjectStore, open_object_store
from storage.records import digest_of
from storage.retention import Rule, retained
from tests.helpers.runs import (
    Runs,
    actor_process,
    driver_process,
    kill,
    run,
    session_address,
    wait_for_step,
    wait_until,
)
from tests.helpers.s3_server import S3Server, moto_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # start-ups of Ray take most of it

ALONE = {"workers": 1}


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


def contents(store: ObjectStore) -> dict[str, str]:
    """Every object of the run, with the digest of its content."""
    listed = (info.key for info in store.list(""))
    return {key: digest_of(store.read(key)) for key in listed}


@pytest.mark.parametrize("where", ["local", "s3"])
def test_a_driver_and_its_actor_that_wake_up_after_a_takeover(
    runs: Runs, request: pytest.FixtureRequest, where: str
) -> None:
    """Stopped at whatever instant, even between a fence check and the creation it was for.

    What was between them, or on its way, still gets there: a beat, a segment of history, a manifest. It is the stale
    epoch's own, no restore point names it, and the next clean-up takes what is not history.
    """
    name, storage = f"fenced-{where}", {"url": str(runs.folder / "runs")}
    if where == "s3":
        server: S3Server = request.getfixturevalue("moto")
        s3 = {"endpoint": server.endpoint, "access_key": "test", "secret_key": "testsecret", "region": "us-east-1"}
        storage = {"url": f"s3://{server.new_bucket()}/runs", "s3": s3}
    sections = {
        "storage": storage,
        "training": {"steps": 30, "eval_every_steps": 6},
        "scaling": ALONE,
        "checkpoint": {"milestone_every_steps": 10, "keep_best": 1},
    }
    spec = runs.spec(name, **sections)
    store = open_object_store(spec.storage, name)
    with driver_process(runs.spec_file(name, **sections), address=session_address()) as first:
        wait_for_step(store, 3, first)
        stopped = [psutil.Process(first.process.pid), actor_process("CheckpointActor")]
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        try:
            outcome = run(spec, takeover=True)
            assert outcome.verdict is None, outcome.verdict
            before = contents(store)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        code, last = first.wait()
    assert (code, last.split(":")[:2]) == (1, ["error", " FencedError"]), last
    assert "epoch 2 of this run was claimed" in last
    collect(store, dry_run=False)
    after, own = contents(store), (keys.epoch_life(1), keys.history_of(1))
    for key in before | after:
        assert key.startswith(own) or before.get(key) == after.get(key), f"the stale epoch wrote or deleted {key}"
    record = Catalog(store).newest_record()
    assert record is not None
    assert (record.epoch, record.finished, record.step) == (2, True, 30)
    assert record.recoveries[0].cause == "the job was submitted again"
    kept = retained(Catalog(store).restorable().records, Rule.of(spec.checkpoint))
    assert [point.record.step // 10 for point in kept if "milestone" in point.kinds] == [3, 2, 1]
    assert len([point for point in kept if "best" in point.kinds]) == 1
    assert verify_run(store).problems == []


def test_a_driver_killed_and_its_job_submitted_again(runs: Runs) -> None:
    """What its ShardWriter had accepted lands; the actor died before it could commit any of it."""
    name, step = "resubmitted", 6
    sections = {
        "training": {"steps": 16},
        "scaling": ALONE,
        "checkpoint": {"drain_s": 60},
        "fault_injection": [{"who": "actor", "step": step, "point": "before_commit"}],
    }
    store = runs.store(name)
    with driver_process(runs.spec_file(name, **sections), address=session_address()) as first:
        wait_until("the fault", lambda: store.list(keys.FAULTS) != [], future=first)
        kill(psutil.Process(first.process.pid))
    left = Catalog(store).newest_record()
    assert left is not None
    assert left.step < step
    outcome = run(runs.spec(name, **sections))
    assert outcome.verdict is None, outcome.verdict
    record = runs.newest(name)
    [recovery] = record.recoveries
    assert recovery.cause == "the job was submitted again"
    assert recovery.restore_point >= step, "what was accepted did not land"
    assert record.finished
    assert record.epoch >= 2
    assert verify_run(store).problems == []
