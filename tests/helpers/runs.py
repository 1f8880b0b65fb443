"""Small runs on a Ray session that tests share: their specs, what they stored, and how to strike at them."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import ray
from rich.console import Console
from transformers import GPT2Config

from app.driver import RunOutcome, run_job
from app.gc import collect
from app.job_spec import JobSpec
from app.verify import verify_run
from storage.catalog import Catalog
from storage.codecs import Base
from storage.object_store import ObjectStore, open_object_store
from storage.records import Record, VersionRef
from storage.shard_format import ShardTensor
from storage.shard_reader import read_shard
from tests.helpers.tiny import tiny_tokenizer, write_tiny_chat, write_tiny_model

ROOT = Path(__file__).parents[2]

NAN_AT_5 = {"step": 5, "point": "backward", "action": "nan"}
"""A fault: a gradient of step 5 becomes NaN."""

State = dict[tuple[str, str], npt.NDArray[np.generic]]
"""(tensor, kind) -> all elements, flat."""


@contextmanager
def ray_session() -> Iterator[None]:
    """Ray on this machine, with more CPUs than it has: what runs here is small."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20)
    try:
        yield
    finally:
        ray.shutdown()


class Runs:
    """Runs of one tiny GPT-2 with dropout, in one folder."""

    def __init__(self, folder: Path) -> None:
        config = GPT2Config(
            vocab_size=len(tiny_tokenizer()),
            n_embd=16,
            n_layer=3,
            n_head=2,
            n_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
        )
        self.folder = folder
        self._model = str(write_tiny_model(folder / "model", config=config))
        self._data = str(write_tiny_chat(folder / "chat.jsonl", rows=48))

    def spec(self, name: str, **sections: Any) -> JobSpec:
        """The spec of a run; `sections` are merged over what all runs have in common."""
        return JobSpec.model_validate_json(json.dumps(self._merged(name, sections)))

    def spec_file(self, name: str, **sections: Any) -> Path:
        """The same, as a file to submit (JSON is YAML)."""
        path = self.folder / f"{name}-{len(list(self.folder.glob('*.yaml')))}.yaml"
        path.write_text(json.dumps(self._merged(name, sections)))
        return path

    def _merged(self, name: str, sections: dict[str, Any]) -> dict[str, Any]:
        common: dict[str, Any] = {
            "name": name,
            "storage": {"url": str(self.folder / "runs")},
            "model": {"path": self._model, "weights": "random", "attention": "eager"},
            "data": {"path": self._data, "messages_column": "messages", "max_length": 64, "eval_examples": 4},
            "training": {
                "steps": 8,
                "global_batch": 6,
                "micro_batch": 1,
                "learning_rate": 1e-3,
                "schedule": "constant",
                "precision": "float32",
            },
            "scaling": {"workers": 2, "cpus_per_worker": 0.5},
            "checkpoint": {"write_budget": "1/5", "staleness_bound_steps": 12, "max_lag": 4, "drain_s": 5.0},
        }
        merged = {**common, **{k: v for k, v in sections.items() if not isinstance(v, dict)}}
        for section, values in sections.items():
            if isinstance(values, dict):
                merged[section] = {**common.get(section, {}), **values}
        return merged

    def store(self, name: str) -> ObjectStore:
        """The store of a run."""
        return open_object_store(self.spec(name).storage, name)

    def newest(self, name: str) -> Record:
        """Newest record of a run."""
        record = Catalog(self.store(name)).newest_record()
        assert record is not None
        return record


def run(spec: JobSpec, **options: Any) -> RunOutcome:
    """Run a job silently."""
    return run_job(spec, console=Console(file=io.StringIO()), **options)


def run_whole(spec: JobSpec) -> RunOutcome:
    """Run a job that must finish."""
    outcome = run(spec)
    assert outcome.verdict is None, outcome.verdict
    assert outcome.status is not None
    assert outcome.status.finished
    return outcome


class DriverProcess:
    """`python -m app run` in a process of its own, on the Ray cluster at `address`."""

    def __init__(self, spec_file: Path, *arguments: str, address: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "run", str(spec_file), *arguments],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": address, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> tuple[int, str]:
        """Exit code and the last line of stderr."""
        _, err = self.process.communicate(timeout=300)
        return self.process.returncode, (err.splitlines() or [""])[-1]

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None


@contextmanager
def driver_process(spec_file: Path, *arguments: str, address: str, **environment: str) -> Iterator[DriverProcess]:
    """Such a driver beside the block; killed at the block's end if it still lives."""
    driver = DriverProcess(spec_file, *arguments, address=address, **environment)
    try:
        yield driver
    finally:
        if not driver.is_over():
            driver.process.kill()
            driver.process.communicate()


def session_address() -> str:
    """Address of this process's Ray session, for a driver of its own."""
    return str(ray.get_runtime_context().gcs_address)


@contextmanager
def running(spec: JobSpec) -> Iterator[Future[RunOutcome]]:
    """Run a job in a thread beside the block; the block's end waits for the run's."""
    with ThreadPoolExecutor(1, thread_name_prefix="job") as pool:
        future = pool.submit(run, spec)
        yield future
        future.result(timeout=300)


def wait_until(
    what: str,
    condition: Callable[[], bool],
    *,
    future: Future[RunOutcome] | DriverProcess | None = None,
    timeout_s: float = 300,
) -> None:
    """Wait for `condition`; fails when the run in `future` is over before, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if isinstance(future, DriverProcess):
            assert not future.is_over(), f"the driver ended before {what}: {future.wait()}"
        else:
            assert future is None or not future.done(), f"the run was over before {what}: {future.result()}"
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.2)  # each look at an S3 store costs its server, in this process, as much as a commit


def wait_for_step(store: ObjectStore, step: int, future: Future[RunOutcome] | DriverProcess) -> None:
    """Wait until the run's restore point has reached `step`."""
    catalog = Catalog(store)

    def reached() -> bool:
        record = catalog.newest_record()
        return record is not None and record.step >= step

    wait_until(f"a restore point at step {step}", reached, future=future)


def actor_process(kind: str) -> psutil.Process:
    """The process of the one live actor of class `kind` in this session."""
    found = [p for p in psutil.Process().children(recursive=True) if _title(p).startswith(f"ray::{kind}")]
    assert len(found) == 1, f"expected one {kind} process, got {[_title(p) for p in found]}"
    return found[0]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill(process: psutil.Process) -> None:
    """SIGKILL, and make sure that it is gone."""
    process.send_signal(signal.SIGKILL)
    wait_until(f"the end of {process}", lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def tensors_of(store: ObjectStore, ref: VersionRef, base: Base | None = None) -> list[ShardTensor]:
    """What the shards of a stored layer version hold; codec `delta` needs the `base`."""
    shards = Catalog(store).read_manifest(ref).shards
    return [t for shard in shards for t in read_shard(store, shard.key, shard.bytes, shard.digest, base).tensors]


def joined(tensors: Iterable[ShardTensor]) -> State:
    """Put together, by their first elements; of two with the same one (`step`, of parts) the last counts."""
    parts: dict[tuple[str, str], dict[int, npt.NDArray[np.generic]]] = {}
    for tensor in tensors:
        parts.setdefault((tensor.name, tensor.kind), {})[tensor.first] = tensor.data
    return {key: np.concatenate([runs[first] for first in sorted(runs)]) for key, runs in parts.items()}


def state_of(store: ObjectStore, record: Record, base: Base | None = None) -> State:
    """The whole composite of a restore point; codec `delta` needs the `base`."""
    refs = sorted(record.layers.values(), key=lambda ref: ref.step)
    return joined(tensor for ref in refs for tensor in tensors_of(store, ref, base))


def differing(one: State, other: State) -> list[tuple[str, str]]:
    """Tensors that are not the same bit by bit."""
    assert one.keys() == other.keys()
    return [key for key in one if one[key].tobytes() != other[key].tobytes()]


def check_consistent(store: ObjectStore) -> Record:
    """Every retained restore point reads back, nothing unnamed is left, no bound was broken; returns the newest."""
    found = verify_run(store)
    assert found.problems == []
    assert found.objects > 0
    left = collect(store, dry_run=True)
    assert (left.keys, left.unfinished) == ((), ())
    records = Catalog(store).restorable().records
    assert all(max(record.ages().values()) <= record.staleness_bound_steps for record in records)
    assert records[0].finished
    return records[0]
