"""`ray start` and `ray job submit` as a user does them: token authentication on, two nodes with one worker each."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.status import read_status
from app.verify import verify_run
from storage.catalog import Catalog
from storage.object_store import ObjectStore, open_object_store
from storage.options import StorageOptions
from tests.helpers.cluster import RayHead, checkout, processes_of, ray_cluster, wait_for

STEPS = 100  # more than are done before `ray job stop` lands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_cluster(nodes=2) as started:
        yield started


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with what must stay at home."""
    folder = checkout(tmp_path / "project")
    for heavy in (".venv", "runs", ".git"):
        (folder / heavy).mkdir()
        (folder / heavy / "must-stay-at-home").touch()
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Where the project's run is stored."""
    return open_object_store(StorageOptions(url=str(tmp_path / "store")), "quickstart")


def submit(head: RayHead, project: Path, *arguments: str, token: bool = True) -> tuple[int, str]:
    """Exit code and output of `ray job submit` of the quickstart, without the fault that it injects itself."""
    settings = [
        f"storage.url={project.parent / 'store'}",
        f"training.steps={STEPS}",
        "fault_injection=[]",
        "export=null",
    ]
    command = [sys.executable, "-m", "app", "run", "jobs/quickstart.yaml"]
    command += [part for setting in settings for part in ("--set", setting)]
    done = head.ray("job", "submit", "--working-dir", ".", *arguments, "--", *command, cwd=project, token=token)
    return done.returncode, done.stdout


def wait_until_restorable(store: ObjectStore, step: int) -> None:
    def restorable() -> bool:
        record = Catalog(store).newest_record()
        return record is not None and record.step >= step

    wait_for(f"a restore point at step {step} or later", restorable)


def has_recovered(store: ObjectStore) -> bool:
    """Whether there is a restore point of after the last recovery; what was on its way before it lands meanwhile."""
    status = read_status(store)
    return bool(status.recoveries) and status.restore_point > status.recoveries[-1].restore_point


def test_job_without_token_is_refused(head: RayHead, project: Path) -> None:
    code, output = submit(head, project, token=False)
    assert code != 0
    assert "Missing authentication token" in output
    assert not (project.parent / "store").exists()


def test_worker_killed_then_job_stopped_and_submitted_again(head: RayHead, project: Path, store: ObjectStore) -> None:
    code, output = submit(head, project, "--no-wait", "--submission-id", "first")
    assert code == 0, output
    wait_until_restorable(store, 2)
    assert [len(processes_of(node, "ray::ShardWriter")) for node in head.nodes] == [1, 1]
    (worker,) = processes_of(head.nodes[0], "RayTrainWorker")
    worker.kill()
    wait_for("training goes on after the kill", lambda: has_recovered(store))
    head.ray("job", "stop", "first")
    stopped = read_status(store)
    assert stopped.restore_point < STEPS, "stopped too late to show anything"
    assert "run the same command again to go on" in head.ray("job", "logs", "first").stdout

    code, output = submit(head, project)
    assert code == 0, output
    assert re.search(rf"steps +{STEPS}, restore point at {STEPS}", output), output
    assert "warning: storage.url" not in output
    finished = read_status(store)
    assert finished.finished
    assert finished.epoch == stopped.epoch + 1
    death, resubmission = finished.recoveries
    assert "worker process died" in death.cause
    assert death.max_age <= finished.staleness_bound_steps
    assert "submitted again" in resubmission.cause
    assert resubmission.restore_point >= stopped.restore_point
    assert verify_run(store).problems == []

    wait_for("the ShardWriters end", lambda: not any(processes_of(node, "ray::ShardWriter") for node in head.nodes), 10)
    carried = {path.name for path in head.temp_dir.glob("**/session_2*/runtime_resources/working_dir_files/*/*")}
    assert {"app", "workers", "storage", "jobs"} <= carried
    assert not {".venv", "runs", ".git"} & carried
