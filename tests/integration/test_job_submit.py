"""`ray start --head` and `ray job submit` as a user does them, with token authentication on."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.status import read_status
from app.verify import verify_run
from storage.catalog import Catalog
from storage.object_store import open_object_store
from storage.options import StorageOptions
from tests.helpers.cluster import RayHead, ray_head, tiny_project, wait_for

STEPS = 200

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head(cpus=2) as started:
        yield started


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with what must stay at home."""
    folder = tiny_project(tmp_path / "project", steps=STEPS, workers=2)
    for heavy in (".venv", "runs", ".git"):
        (folder / heavy).mkdir()
        (folder / heavy / "must-stay-at-home").touch()
    return folder


def submit(head: RayHead, project: Path, *arguments: str, storage: Path, token: bool = True) -> tuple[int, str]:
    """Exit code and output of `ray job submit` of the project's job."""
    command = [sys.executable, "-m", "app", "run", "job/job.yaml", "--set", f"storage.url={storage}"]
    done = head.ray("job", "submit", "--working-dir", ".", *arguments, "--", *command, cwd=project, token=token)
    return done.returncode, done.stdout


def test_job_without_token_is_refused(head: RayHead, project: Path, tmp_path: Path) -> None:
    code, output = submit(head, project, storage=tmp_path / "store", token=False)
    assert code != 0
    assert "Missing authentication token" in output
    assert not (tmp_path / "store").exists()


@pytest.mark.timeout(400)
def test_job_is_stopped_and_goes_on_when_submitted_again(head: RayHead, project: Path, tmp_path: Path) -> None:
    store = open_object_store(StorageOptions(url=str(tmp_path / "store")), "tiny")

    code, output = submit(head, project, "--no-wait", "--submission-id", "first", storage=tmp_path / "store")
    assert code == 0, output
    wait_for("a restore point", lambda: (record := Catalog(store).newest_record()) is not None and record.step >= 5)
    head.ray("job", "stop", "first")
    stopped = read_status(store)
    assert 5 <= stopped.restore_point < STEPS, "stopped too late to show anything"
    assert "error: interrupted; run the same command again to resume" in head.ray("job", "logs", "first").stdout

    code, output = submit(head, project, storage=tmp_path / "store")
    assert code == 0, output
    assert re.search(rf"steps +{STEPS}, restore point at {STEPS}", output), output
    assert "warning: storage.url" not in output
    finished = read_status(store)
    assert finished.finished
    assert finished.epoch == stopped.epoch + 1
    (recovery,) = finished.recoveries
    assert recovery.restore_point >= stopped.restore_point
    assert "submitted again" in recovery.cause
    assert verify_run(store).problems == []
    carried = {path.name for path in head.temp_dir.glob("session_2*/runtime_resources/working_dir_files/*/*")}
    assert {"app", "workers", "storage", "job"} <= carried
    assert not {".venv", "runs", ".git"} & carried
