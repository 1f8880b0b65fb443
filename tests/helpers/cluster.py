"""A real Ray cluster on this machine, ended by the ids of its own processes, and a tiny project to submit to it."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
WRONG_CLOCK = Path(__file__).with_name("wrong_clock")
START_S = 400.0


def checkout(folder: Path) -> Path:
    """What a job needs of a checkout, in `folder`; returns it."""
    for part in ("app", "workers", "storage", "jobs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".gitignore", folder)
    return folder


def wait_for(what: str, condition: Callable[[], bool], seconds: float = START_S) -> None:
    """Wait until `condition` holds; fails when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.1)


@dataclass(frozen=True)
class RayHead:
    """A `ray start --head` with token authentication, and the nodes that joined it."""

    address: str
    """URL of its job server."""
    gcs: str
    """Address that nodes and drivers join."""
    token: Path
    temp_dir: Path
    nodes: tuple[psutil.Process, ...]
    """`ray start` of each node beside the head."""

    def wrong_clock_seen(self, process: psutil.Process) -> bool:
        """Whether the wall clock of `process` is off."""
        return (self.temp_dir / "wrong-clock" / str(process.pid)).exists()

    def ray(
        self, *arguments: str, cwd: Path | None = None, token: bool = True, address: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Ray's command line against this head, with its token or without any."""
        settings = {
            "RAY_ADDRESS": address or self.address,
            "HOME": str(self.temp_dir),
        }  # HOME: no token of the user's own
        if token:
            settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        return subprocess.run(
            [str(RAY), *arguments],
            cwd=cwd,
            env=_clean_environment() | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )


def _clean_environment() -> dict[str, str]:
    """The environment without PYTHONPATH, so that the job finds its code in its working directory or not at all."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != "PYTHONPATH"}


@contextmanager
def ray_cluster(nodes: int, clocks: Sequence[float] = ()) -> Iterator[RayHead]:
    """Start a head without CPUs, as cluster.yaml has it, and `nodes` with one CPU each; on leaving end their processes,
    and no others.

    `clocks`: by how many seconds the wall clock of each node is off; nodes beyond them have the right time.
    """
    temp_dir = Path(tempfile.mkdtemp(prefix="lc", dir="/tmp"))  # short: Ray puts Unix sockets below it
    token = temp_dir / "token"
    token.write_text(secrets.token_hex(32))
    gcs, dashboard, client = free_ports(3)
    with ExitStack() as started:
        started.callback(shutil.rmtree, temp_dir, ignore_errors=True)
        ports = {"port": gcs, "dashboard-port": dashboard, "ray-client-server-port": client}
        head = started.enter_context(_started(temp_dir, "--head", {}, **ports, **{"temp-dir": temp_dir, "num-cpus": 0}))
        url = f"http://127.0.0.1:{dashboard}"
        wait_for("the head answers", lambda: _answers(head, url))
        address = f"--address=127.0.0.1:{gcs}"
        others = []
        for number in range(nodes):
            own = {"temp-dir": temp_dir / str(number)}  # as on another machine: no node unpacks a job over another's
            clock = _wrong_clock(temp_dir, clocks[number]) if number < len(clocks) else {}
            others.append(started.enter_context(_started(temp_dir, address, clock, **own, **{"num-cpus": 1})))
            wait_for("the node runs", lambda: _blocks(temp_dir, [head, *others]))
        yield RayHead(url, f"127.0.0.1:{gcs}", token, temp_dir, tuple(others))


def _wrong_clock(temp_dir: Path, off_by_s: float) -> dict[str, str]:
    """Environment of a node whose Python processes see a wall clock that is off; see `wrong_clock_seen`."""
    seen = temp_dir / "wrong-clock"
    seen.mkdir(exist_ok=True)
    return {"PYTHONPATH": str(WRONG_CLOCK), "WRONG_CLOCK_S": str(off_by_s), "WRONG_CLOCK_SEEN": str(seen)}


@contextmanager
def _started(temp_dir: Path, flag: str, environment: dict[str, str], **options: object) -> Iterator[psutil.Process]:
    """`ray start --block` in a session of its own; ended at once on leaving, with all that its raylet has started."""
    options |= {"dashboard-agent-listen-port": 0, "min-worker-port": 0, "max-worker-port": 0}
    options |= {"object-store-memory": 200_000_000}
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(temp_dir / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    settings |= {"RAY_JOB_STOP_WAIT_TIME_S": "60"}  # Ray's own 3 s are short on a loaded machine
    with (temp_dir / "start.log").open("a") as log:
        process = subprocess.Popen(
            [str(RAY), "start", "--block", flag, *(f"--{name}={value}" for name, value in options.items())],
            env=_clean_environment() | settings | environment,
            cwd=temp_dir,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            remove_node(psutil.Process(process.pid))
        process.wait()


def remove_node(node: psutil.Process) -> None:
    """Take a node away without grace, with all that its raylet has started. (On SIGTERM it drains for 30 s.)"""
    descendants = node.children(recursive=True)
    os.killpg(node.pid, signal.SIGKILL)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(descendants, timeout=10)


def node_id(node: psutil.Process) -> str:
    """Ray's id of a node."""
    (raylet,) = [process for process in node.children(recursive=True) if process.name() == "raylet"]
    (named,) = {word.partition("=")[2] for word in raylet.cmdline() if word.startswith(("--node_id=", "--node-id="))}
    return named


def processes_of(node: psutil.Process, title: str) -> list[psutil.Process]:
    """Living processes of a node whose command line has `title` in it."""
    found = []
    for process in node.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found.append(process)
    return found


def _blocks(temp_dir: Path, nodes: list[psutil.Process]) -> bool:
    """Whether `ray start` has started every process of the nodes, and says that it blocks now."""
    log = (temp_dir / "start.log").read_text()
    assert all(node.status() != psutil.STATUS_ZOMBIE for node in nodes), log
    return log.count("will now block forever") == len(nodes)


def _answers(head: psutil.Process, url: str) -> bool:
    assert head.is_running(), "`ray start --head` has ended"
    try:
        urllib.request.urlopen(f"{url}/api/version", timeout=5)
    except urllib.error.HTTPError as refused:
        return refused.code == 401
    except OSError:
        return False
    raise AssertionError("the head answers without a token")


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    for held in sockets:
        held.bind(("127.0.0.1", 0))
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports
