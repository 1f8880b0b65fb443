"""The main job on S3, codec `delta`: a worker killed from outside, what the command line tells, a finished run."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.cli import main
from app.status import RunStatus
from storage.catalog import Catalog
from storage.history import read_history
from storage.object_store import ObjectStore, open_object_store
from tests.helpers.runs import Runs, kill, run_whole, running, state_of, wait_for_step
from tests.helpers.s3_server import S3Server, moto_server
from workers.model import build_model
from workers.state import model_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # start-ups of worker groups take most of it


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as started:
        yield started


def train_worker() -> psutil.Process:
    """One of the processes that train at this moment."""
    family = psutil.Process().children(recursive=True)
    return [process for process in family if "RayTrainWorker" in " ".join(process.cmdline())][-1]


def test_a_killed_worker_on_s3(
    runs: Runs, server: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = server.new_bucket()
    url = f"s3://{bucket}/runs"
    s3 = {"endpoint": server.endpoint, "region": "us-east-1", "access_key": "test", "secret_key": "testsecret"}
    steps = 30
    spec = runs.spec("on-s3", storage={"url": url, "s3": s3}, training={"steps": steps}, checkpoint={"codec": "delta"})
    store = open_object_store(spec.storage, "on-s3")
    with running(spec) as job:
        wait_for_step(store, 10, job)
        kill(train_worker())
    outcome = job.result()
    assert outcome.verdict is None
    assert outcome.status is not None
    (recovery,) = outcome.status.recoveries
    assert recovery.restore_point >= 10
    assert recovery.steps_lost <= spec.checkpoint.max_lag
    assert recovery.max_age <= spec.checkpoint.staleness_bound_steps
    assert recovery.phases is not None
    assert recovery.phases.total == pytest.approx(recovery.seconds)
    assert all(seconds > 0 for _, seconds in recovery.phases), recovery.phases
    check_history(store, outcome.status)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    where = [f"{url}/on-s3", "--endpoint", server.endpoint, "--region", "us-east-1"]

    def tell(*arguments: str) -> dict:
        capsys.readouterr()  # what Ray has printed
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    status = tell("status", *where)
    assert status["recoveries"][0]["phases"] == recovery.phases.model_dump()
    assert (status["step"], status["restore_point"], status["max_age"], status["finished"]) == (steps, steps, 0, True)
    assert status["ticks"] >= steps
    assert status["reduction"] == status["ticks"] * status["full_checkpoint_bytes"] / status["bytes_written"]
    checked = tell("verify", *where)
    assert checked["problems"] == []
    assert checked["objects"] >= 2 * len(status["layers"])
    assert tell("gc", *where, "--dry-run")["keys"] == []
    tell("export", *where, str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    newest = Catalog(store).newest_record()
    assert newest is not None
    stored = state_of(store, newest, model_base(build_model(spec.model, spec.training.seed)))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().flatten(), torch.from_numpy(stored[name, "param"])), name
    contents = {info.key: store.read(info.key) for info in store.list("")}
    assert [key for key, content in contents.items() if b"testsecret" in content] == []

    assert run_whole(spec).had_finished
    assert {info.key: store.read(info.key) for info in store.list("")} == contents


def check_history(store: ObjectStore, status: RunStatus) -> None:
    """Both attempts are told, every order led to a version, and their bytes are those written."""
    history = read_history(store)
    assert history.problems == []
    first, second = ([tick for tick in history.ticks if tick.attempt == attempt] for attempt in (1, 2))
    assert [tick.step for tick in first] == sorted(tick.step for tick in first)
    (recovery,) = status.recoveries
    assert first[-1].step >= recovery.restore_point >= second[0].step - 1
    assert (history.ticks[-1].step, history.ticks[-1].flush) == (status.step, True)
    assert {layer.name for layer in status.layers} == set(history.ticks[0].sums)
    assert all(history.ticks[-1].sums[layer.name].drift >= 0 for layer in status.layers)
    assert all(tick.seconds > 0 and tick.restore_point <= tick.step for tick in history.ticks)
    stored = sum(version.bytes for tick in history.ticks for version in tick.durable)
    assert 0 <= status.bytes_written - stored <= 0.1 * status.bytes_written, "shards of versions never made whole"
    ordered = {(name, tick.attempt) for tick in history.ticks for name in tick.chosen}
    assert {(version.layer, tick.attempt) for tick in history.ticks for version in tick.durable} <= ordered
