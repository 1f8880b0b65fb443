"""Stopping a job by signal or take-over, and going on with the same command. Real processes, real Ray."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app import cli
from app.status import RunStatus, read_status
from storage.errors import SpecError
from storage.liveness import read_life
from storage.object_store import ObjectStore, open_object_store
from storage.options import StorageOptions
from tests.helpers.tiny import write_tiny_chat, write_tiny_model

ROOT = Path(__file__).parents[2]
STEPS = 150  # heavy ones: many times what is done between a signal and the end of the worker group
PATIENCE_S = 300.0
JOB = f"""\
name: job
storage: {{url: runs}}
model: {{path: model}}
data: {{path: chat.jsonl, messages_column: messages, max_length: 64}}
training: {{steps: {STEPS}, global_batch: 64, micro_batch: 2, precision: float32}}
scaling: {{workers: 1}}
checkpoint: {{write_budget: "1/4", staleness_bound_steps: 20}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tiny_model(tmp_path / "model", weights=True)
    write_tiny_chat(tmp_path / "chat.jsonl")
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture
def store(here: Path) -> ObjectStore:
    return open_object_store(StorageOptions(url=str(here / "runs")), "job")


class Driver:
    """`python -m app run job.yaml` in a process group of its own, as a shell starts it."""

    def __init__(self, here: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "run", "job.yaml", *arguments],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._family: list[psutil.Process] = []

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        """Signal the whole group as Ctrl-C does, else the driver as `ray job stop` does: exit code and last line."""
        self.know_family()
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)
        code, _, err = self.wait()
        return code, err.splitlines()[-1]

    def know_family(self) -> None:
        """Remember Ray's processes, to look for them afterwards."""
        self._family = psutil.Process(self.process.pid).children(recursive=True)
        assert any("raylet" in process.name() for process in self._family)

    def wait(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, when it has ended."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def leaves_nobody(self) -> bool:
        """Whether Ray's processes have gone, within seconds."""
        _, alive = psutil.wait_procs(self._family, timeout=10)
        return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def driver(here: Path, *arguments: str) -> Iterator[Driver]:
    started = Driver(here, *arguments)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()


def wait_for_restore_point(store: ObjectStore, driver: Driver, step: int, epoch: int) -> RunStatus:
    """Status once `epoch` has committed a restore point at `step` or later."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(SpecError):
            status = read_status(store)
            if status.epoch >= epoch and status.restore_point >= step:
                return status
        if driver.process.poll() is not None:
            raise AssertionError(f"the driver ended early: {driver.process.communicate()}")
        time.sleep(0.05)
    raise AssertionError("no restore point in time")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_interrupted_job_goes_on_from_the_catalog(here: Path, store: ObjectStore) -> None:
    with driver(here) as first:
        wait_for_restore_point(store, first, step=1, epoch=1)
        code, line = first.stop(signal.SIGINT)
    assert (code, line) == (130, "error: interrupted by SIGINT; run the same command again to go on")
    assert first.leaves_nobody()
    life = read_life(store, 1)
    assert life is not None
    assert life.ended
    left = read_status(store)
    assert not left.finished

    with driver(here, "--json") as second:
        code, out, err = second.wait()
    assert code == 0
    status = RunStatus.model_validate(json.loads(out))
    assert (status.epoch, status.step, status.restore_point, status.finished) == (2, STEPS, STEPS, True)
    [resumed] = status.recoveries
    assert resumed.cause == "the job was submitted again"
    assert resumed.restore_point == left.restore_point > 0
    assert {layer.step for layer in status.layers} == {STEPS}
    assert "\x1b" not in err
    assert all(text.startswith("step ") for text in err.splitlines()), err


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_driver_is_refused_unless_it_takes_over(
    here: Path, store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = ["--set", "training.steps=100000"]
    with driver(here, *endless) as first:
        wait_for_restore_point(store, first, step=1, epoch=1)
        for command in (["run", "job.yaml", *endless], ["gc", "runs/job"]):
            assert cli.main(command) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert f"epoch 1 of this run is alive (pid {first.process.pid} on " in error
        first.know_family()
        with driver(here, *endless, "--takeover") as second:
            code, _, err = first.wait()
            assert code == 1
            assert err.splitlines()[-1].startswith("error: FencedError: epoch 2 of this run was claimed at ")
            assert f"(pid {second.process.pid} on " in err.splitlines()[-1]
            assert first.leaves_nobody()
            taken = read_status(store)
            assert taken.epoch == 2
            wait_for_restore_point(store, second, step=taken.restore_point + 1, epoch=2)
            code, line = second.stop(signal.SIGTERM)
            assert (code, line) == (143, "error: interrupted by SIGTERM; run the same command again to go on")
            assert second.leaves_nobody()
