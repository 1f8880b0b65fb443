"""A real Ray head on this machine, ended by the ids of its own processes, and a tiny project to submit to it."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.tiny import write_tiny_chat, write_tiny_model

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
START_S = 170.0


def tiny_project(folder: Path, *, steps: int, workers: int) -> Path:
    """A folder as a checkout is: the packages, and a tiny job at job/job.yaml; returns `folder`."""
    for package in ("app", "workers", "storage"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".gitignore", folder)
    write_tiny_model(folder / "job" / "model")
    write_tiny_chat(folder / "job" / "chat.jsonl")
    (folder / "job" / "job.yaml").write_text(
        f"""\
name: tiny
model: {{path: job/model, weights: random}}
data: {{path: job/chat.jsonl, messages_column: messages, max_length: 64}}
training: {{steps: {steps}, global_batch: {workers}, micro_batch: 1, precision: float32}}
scaling: {{workers: {workers}}}
checkpoint: {{write_budget: "1/4", max_lag: 4, staleness_bound_steps: 12}}
"""
    )
    return folder


def wait_for(what: str, condition: Callable[[], bool], seconds: float = START_S) -> None:
    """Wait until `condition` holds; fails when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


@dataclass(frozen=True)
class RayHead:
    """A `ray start --head` with token authentication."""

    address: str
    """URL of its job server."""
    token: Path
    temp_dir: Path

    def ray(self, *arguments: str, cwd: Path | None = None, token: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Ray's command line against this head, with its token or without any."""
        settings = {"RAY_ADDRESS": self.address, "HOME": str(self.temp_dir)}  # HOME: no token of the user's own
        if token:
            settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        return subprocess.run(
            [str(RAY), *arguments],
            cwd=cwd,
            env=_clean_environment() | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
        )


def _clean_environment() -> dict[str, str]:
    """The environment without PYTHONPATH, so that the job finds its code in its working directory or not at all."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != "PYTHONPATH"}


@contextmanager
def ray_head(cpus: int) -> Iterator[RayHead]:
    """Start a head on free ports; on leaving end its processes, and no others."""
    temp_dir = Path(tempfile.mkdtemp(prefix="lc", dir="/tmp"))  # short: Ray puts Unix sockets below it
    token = temp_dir / "token"
    token.write_text(secrets.token_hex(32))
    gcs, dashboard, client = free_ports(3)
    head = RayHead(f"http://127.0.0.1:{dashboard}", token, temp_dir)
    options = {
        "port": gcs,
        "dashboard-port": dashboard,
        "ray-client-server-port": client,
        "dashboard-agent-listen-port": 0,
        "num-cpus": cpus,
        "object-store-memory": 200_000_000,
        "temp-dir": temp_dir,
    }
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {"RAY_JOB_STOP_WAIT_TIME_S": "60"}  # Ray's own 3 s are short on a loaded machine
    with (temp_dir / "head.log").open("w") as log:
        process = subprocess.Popen(
            [str(RAY), "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items())],
            env=_clean_environment() | settings,
            cwd=temp_dir,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for("the head answers", lambda: _answers(process, head))
        yield head
    finally:
        _end(process)
        shutil.rmtree(temp_dir, ignore_errors=True)


def _answers(process: subprocess.Popen[bytes], head: RayHead) -> bool:
    assert process.poll() is None, (head.temp_dir / "head.log").read_text()
    try:
        urllib.request.urlopen(f"{head.address}/api/version", timeout=5)
    except urllib.error.HTTPError as refused:
        return refused.code == 401
    except OSError:
        return False
    raise AssertionError("the head answers without a token")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the head's process group at once (on SIGTERM it drains for 30 s), and what its raylet has started."""
    if process.poll() is None:
        descendants = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)  # the group is the session that the process was started in
        process.wait()
        for left in psutil.wait_procs(descendants, timeout=10)[1]:
            left.kill()


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    for held in sockets:
        held.bind(("127.0.0.1", 0))
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports
