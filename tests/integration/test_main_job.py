"""The main job on S3, codec `delta`: a worker killed from outside, what the commands tell, a finished run, a plan."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.cli import main
from app.job_spec import JobSpec
from app.plan import plan_run
from app.status import RunStatus
from storage.catalog import Catalog
from storage.history import read_history
from storage.object_store import ObjectStore, open_object_store
from tests.helpers.runs import Runs, kill, run_whole, running, state_of, wait_for_step
from tests.helpers.s3_server import S3Server, moto_server
from workers.model import build_model
from workers.state import model_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # start-ups of Ray take most of it

STEPS = 30


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as started:
        yield started


def train_worker() -> psutil.Process:
    """One of the processes that train at this moment."""
    family = psutil.Process().children(recursive=True)
    return [process for process in family if "RayTrainWorker" in " ".join(process.cmdline())][-1]


@dataclass
class Killed:
    """A run on S3 whose worker was killed once it had gone far enough."""

    spec: JobSpec
    store: ObjectStore
    status: RunStatus
    storage: dict[str, Any]
    """Section of the spec, to store another run beside it."""


@pytest.fixture(scope="module")
def killed(runs: Runs, server: S3Server) -> Killed:
    storage: dict[str, Any] = {
        "url": f"s3://{server.new_bucket()}/runs",
        "s3": {"endpoint": server.endpoint, "region": "us-east-1", "access_key": "test", "secret_key": "testsecret"},
    }
    spec = runs.spec("on-s3", storage=storage, training={"steps": STEPS}, checkpoint={"codec": "delta"})
    store = open_object_store(spec.storage, "on-s3")
    with running(spec) as job:
        wait_for_step(store, 10, job)
        kill(train_worker())
    outcome = job.result()
    assert outcome.verdict is None
    assert outcome.status is not None
    return Killed(spec, store, outcome.status, storage)


def test_a_killed_worker_on_s3(
    killed: Killed,
    server: S3Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, store = killed.spec, killed.store
    (recovery,) = killed.status.recoveries
    assert recovery.restore_point >= 10
    assert recovery.steps_lost <= spec.checkpoint.max_lag
    assert recovery.max_age <= spec.checkpoint.staleness_bound_steps
    assert recovery.phases is not None
    assert recovery.phases.total == pytest.approx(recovery.seconds)
    assert all(seconds > 0 for _, seconds in recovery.phases), recovery.phases
    check_history(store, killed.status)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    where = [f"{spec.storage.url}/on-s3", "--endpoint", server.endpoint, "--region", "us-east-1"]

    def tell(*arguments: str) -> dict:
        capsys.readouterr()  # what Ray has printed
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    status = tell("status", *where)
    assert status["recoveries"][0]["phases"] == recovery.phases.model_dump()
    assert (status["step"], status["restore_point"], status["max_age"], status["finished"]) == (STEPS, STEPS, 0, True)
    assert status["ticks"] >= STEPS
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


def test_a_plan_from_one_run_foretells_another(runs: Runs, killed: Killed) -> None:
    """Another budget and criterion, and nobody killed."""
    thrifty = {"write_budget": "1/24", "criterion": "drift"}
    checkpoint = {"codec": "delta", **thrifty}
    spec = runs.spec("thrifty", storage=killed.storage, training={"steps": STEPS}, checkpoint=checkpoint)
    run_whole(spec)
    plan, real = plan_run(killed.store, thrifty), plan_run(open_object_store(spec.storage, spec.name), {})
    recorded, replayed, planned, happened = (
        of.outlook for of in (plan.recorded, plan.replayed, plan.planned, real.recorded)
    )
    print(f"{recorded=}\n{replayed=}\n{planned=}\n{happened=}")
    assert happened.bytes_written < 0.6 * recorded.bytes_written, "the settings make no difference"
    assert replayed.bytes_written == pytest.approx(recorded.bytes_written, rel=0.05)
    assert replayed.mean_age == pytest.approx(recorded.mean_age, rel=0.15)
    assert planned.bytes_written == pytest.approx(happened.bytes_written, rel=0.15)
    assert planned.mean_age == pytest.approx(happened.mean_age, rel=0.3)
