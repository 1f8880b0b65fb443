"""Non-finite numbers: a run stops or skips as its spec says, and nothing non-finite is stored over something good."""

import uuid

import numpy as np
import pytest
import ray

from app.verify import verify_run
from storage import keys
from storage.encoding import RAW
from storage.errors import ObjectNotFoundError
from storage.messages import ShardOrder, WriterQuestion, WriterReport
from storage.shard_format import ShardMeta, ShardTensor
from storage.writer_actor import ensure_writer, writer_name
from tests.helpers.runs import NAN_AT_5, Runs, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # start-ups of Ray take most of it


def test_a_nan_gradient_ends_the_run_with_its_last_restore_point_intact(runs: Runs) -> None:
    outcome = run(runs.spec("nan-fail", scaling={"workers": 1}, fault_injection=[NAN_AT_5]))
    assert outcome.verdict is not None
    assert outcome.verdict.kind == "TrainingError"
    assert outcome.verdict.message.startswith("step 5: expected a finite loss and gradient norm, got a norm of nan")
    record = runs.newest("nan-fail")
    assert 0 < record.step < 5
    assert not record.finished
    assert record.totals.attempts == 1  # a fatal verdict is not retried
    assert verify_run(runs.store("nan-fail")).problems == []


@pytest.mark.parametrize("kind", ["param", "exp_avg"])
def test_a_writer_refuses_a_layer_that_holds_nan(runs: Runs, kind: str) -> None:
    spec, node = runs.spec(f"poison-{kind}"), ray.get_runtime_context().get_node_id()
    writer = ensure_writer(spec.storage, spec.name, writer_name(uuid.uuid4().hex, "driver", node), node)
    values = np.ones(1000, dtype=np.float32)
    values[317] = np.nan
    version = {"layer": "block-00", "step": 3, "epoch": 1, "attempt": 1}
    meta = ShardMeta(run=spec.name, optimizer_step=3, rank=0, world_size=1, **version)
    order = ShardOrder(meta=meta, ranges=(), encoding=RAW)
    try:
        ray.get(writer.accept.remote(order, [ShardTensor("w", kind, "float32", 0, values.size, values)], ()))
        first: WriterReport = ray.get(writer.poll.remote(WriterQuestion(epoch=1, wait_s=0.0)))
        question = WriterQuestion(epoch=1, life=first.life, wait_s=60.0, tell_pending=True)
        report: WriterReport = ray.get(writer.poll.remote(question))
        assert (report.stored, report.pending) == ((), {})
        (failed,) = report.failed
        assert failed.poisoned
        assert (
            failed.problem
            == f"block-00 at step 3: 1 non-finite value(s) in {kind} of w; not stored over a good version"
        )
        with pytest.raises(ObjectNotFoundError):
            runs.store(spec.name).size(keys.shard(**version, rank=0, world_size=1))
    finally:
        ray.kill(writer)
