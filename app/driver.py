"""The driver: starts the CheckpointActor, runs Ray Train, shows progress, reports the outcome."""

import contextlib
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from app.export import check_export_folder, export_run
from app.failure_cause import TellCause, last_line
from app.interrupts import interruptible
from app.job_spec import JobSpec
from app.preflight import (
    Prepared,
    check_base,
    check_in_flight,
    check_run,
    check_spec,
    check_store,
    fleeting_paths,
    prepare,
)
from app.progress import LiveProgress, ProgressDisplay
from app.resources import ray_starts_here, shortage, worker_resources
from app.spec_identity import fingerprint, public_dump, resolve_paths
from app.status import RunStatus, read_status
from storage.actor_calls import patiently
from storage.actor_setup import ActorSetup
from storage.checkpoint_actor import CheckpointActor
from storage.encoding import largest_share
from storage.errors import LayerCheckError, SpecError, StoreError
from storage.fault_points import FaultPoints
from storage.liveness import this_process
from storage.messages import Verdict
from storage.object_store import ObjectStore, open_object_store
from storage.records import digest_of
from workers.loop_config import LoopConfig
from workers.train_loop import train

PROGRESS_S = 0.5
HEALTH_CHECK_S = "0.5"
"""How often Ray Train looks for dead workers; its own default is 2 s."""
CLOSE_S = 30.0
"""Longest wait for the CheckpointActor when the run ends; it is killed with Ray, or by Ray with the driver."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended: `verdict` says why it did not finish."""

    status: RunStatus | None
    verdict: Verdict | None = None
    had_finished: bool = False
    """The run was finished before; nothing was trained."""


def run_job(spec: JobSpec, *, takeover: bool = False, console: Console) -> RunOutcome:
    """Run the job, or go on with it where its newest restore point stands.

    Raises:
        SpecError, StoreError, RunLiveError: it cannot be started; nothing was started and nothing written.
        LayerCheckError: Ray or the CheckpointActor could not start, that was fenced as it did, or the export cannot be
            written.
    """
    resolved = resolve_paths(spec)
    check_spec(resolved)
    store = open_object_store(resolved.storage, resolved.name)
    record = check_run(spec, store)
    if record is not None and record.finished:
        if resolved.export is not None and not Path(resolved.export).exists():
            export_run(store, Path(resolved.export))  # the last driver did not get that far
        return RunOutcome(read_status(store), had_finished=True)
    if resolved.export is not None:
        check_export_folder("export", Path(resolved.export))
    prepared = prepare(resolved)
    check_store(spec, store, prepared, takeover=takeover)
    for warning in fleeting_paths(resolved):
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    described = public_dump(spec)  # before Ray is joined: it may unpack a job's working directory, this one, anew
    with interruptible(), _ray(resolved):
        outcome = _train(resolved, described, prepared, store, console)
    if outcome.verdict is None and resolved.export is not None:
        export_run(store, Path(resolved.export))
    return outcome


@contextmanager
def _ray(spec: JobSpec) -> Iterator[None]:
    """Join the cluster this job was submitted to, or start Ray here; leave what was running as it was."""
    # The CheckpointActor watches for notices itself; Ray Train's watcher costs a process for each worker group.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", HEALTH_CHECK_S)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not ray_starts_here():
        _join(os.environ["RAY_ADDRESS"], quiet)
    else:
        cpus = max(os.cpu_count() or 1, int(spec.scaling.workers * spec.scaling.cpus_per_worker + 0.999))
        _start(num_cpus=cpus, include_dashboard=False, **quiet)
    try:
        with interruptible():
            yield
    finally:
        ray.shutdown()


def _start(**options: Any) -> None:
    try:
        ray.init(address="local", **options)
    except Exception as error:  # Ray raises OSError, ValueError, RuntimeError and bare ones
        raise LayerCheckError(
            f"Ray could not be started on this machine: {' '.join(str(error).split())[:300]}; "
            "mend that, or free processor time and memory, and run the same command again"
        ) from error


def _join(address: str, quiet: dict[str, Any]) -> None:
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError as error:
        raise SpecError(
            f"RAY_ADDRESS: expected the address of a Ray cluster that lets this job in, got {address!r}: "
            f"{' '.join(str(error).split())[:200]}; "
            "correct it, or set RAY_AUTH_MODE and the token as `ray start` had them"
        ) from error


def _train(
    resolved: JobSpec, described: dict[str, Any], prepared: Prepared, store: ObjectStore, console: Console
) -> RunOutcome:
    sizes = _object_store_sizes()
    check_base(prepared.base_bytes, min(sizes), len(sizes))
    # Half of the smallest store: beyond it Ray spills to disk. A node's share of the base version stays there, too.
    free = min(sizes) - prepared.base_bytes // len(sizes)
    limit = resolved.checkpoint.in_flight_bytes or free // 2
    check_in_flight(resolved.checkpoint, prepared.full_bytes, limit)
    setup = ActorSetup(
        storage=resolved.storage,
        run=resolved.name,
        run_id=digest_of(store.url.encode()),
        checkpoint=resolved.checkpoint,
        in_flight_limit_bytes=limit,
        encoded_share=largest_share(resolved.checkpoint, resolved.model.dtype),
        spec=described,
        spec_fingerprint=fingerprint(described),
        data_fingerprint=prepared.data.fingerprint,
        driver=uuid.uuid4().hex,
        where=this_process(),
        attempts_without_progress=resolved.failures.attempts_without_progress,
        store_outage_s=resolved.failures.store_outage_s,
        faults=tuple(resolved.fault_injection),
    )
    actor = _start_actor(setup)
    try:
        _answer(actor.start.remote())
        loop = LoopConfig(
            run=resolved.name,
            storage=resolved.storage,
            model=resolved.model,
            training=resolved.training,
            checkpoint=resolved.checkpoint,
            faults=tuple(resolved.fault_injection),
            total_steps=prepared.total_steps,
            pad_id=prepared.pad_id,
            data=ray.put(prepared.data),
            actor=actor,
        )
        faults = FaultPoints(resolved.fault_injection, "driver", store)
        with _progress(actor, resolved, prepared.total_steps, faults, console):
            verdict = _fit(resolved, loop)
        verdict = verdict or patiently(actor, "verdict")
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(actor.close.remote(), timeout=CLOSE_S)
    return RunOutcome(_status_if_readable(store, verdict), verdict)


def _status_if_readable(store: ObjectStore, verdict: Verdict | None) -> RunStatus | None:
    """How the run stands; None when the store that ended it cannot be read either."""
    try:
        return read_status(store)
    except StoreError:
        if verdict is None:
            raise
        return None


def _answer(call: Any) -> Any:
    """Result of an actor's method; an error of ours comes as it was raised, without Ray's traceback around it."""
    try:
        return ray.get(call)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, LayerCheckError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        reason = last_line(error)[:200]
        raise LayerCheckError(
            f"the CheckpointActor could not be started: {reason}; give the cluster this project's code and packages "
            "(`ray job submit --working-dir .` from the project's folder)"
        ) from error


def _object_store_sizes() -> list[int]:
    """Size of each node's object store, in bytes."""
    sizes = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]]
    return [int(size) for size in sizes if size]


def _start_actor(setup: ActorSetup) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 1000, "scheduling_strategy": here}
    return ray.remote(CheckpointActor).options(**options).remote(setup)


def _fit(spec: JobSpec, loop: LoopConfig) -> Verdict | None:
    scaling = spec.scaling
    with tempfile.TemporaryDirectory(prefix="layercheck-ray-") as scratch:
        trainer = TorchTrainer(
            train,  # type: ignore[arg-type]  # typed as if nothing could be returned
            train_loop_config={"job": loop},
            torch_config=TorchConfig(backend="nccl" if scaling.gpus_per_worker else "gloo"),
            scaling_config=ray.train.ScalingConfig(
                num_workers=scaling.workers,
                use_gpu=scaling.gpus_per_worker > 0,
                resources_per_worker=worker_resources(scaling),
            ),
            run_config=ray.train.RunConfig(
                name=spec.name,
                storage_path=scratch,  # nothing is reported to Ray Train: checkpoints go through the ShardWriters
                failure_config=ray.train.FailureConfig(max_failures=spec.failures.max_failures),
                callbacks=[TellCause(loop.actor)],  # type: ignore[list-item]  # typed as Ray Train V1's
            ),
        )
        try:
            with interruptible():
                verdict: Verdict | None = trainer.fit().return_value  # type: ignore[attr-defined]  # as above
        except SystemExit as stop:  # what Ray Train makes of Ctrl-C, when it has aborted the worker group
            raise KeyboardInterrupt(signal.SIGINT) from stop
        except ray.train.TrainingFailedError as error:
            return Verdict(
                kind="TrainingFailedError",
                message=f"the workers failed more often than failures.max_failures = {spec.failures.max_failures} "
                f"allows; mend the cause and run the same command again: {last_line(error)}",
            )
    return verdict


@contextmanager
def _progress(actor: Any, spec: JobSpec, total_steps: int, faults: FaultPoints, console: Console) -> Iterator[None]:
    """Show how the run stands until the block ends."""
    done = threading.Event()

    def follow(display: ProgressDisplay) -> None:
        while not done.wait(PROGRESS_S):
            try:
                live = ray.get(actor.live.remote(), timeout=PROGRESS_S)
                lacking = shortage(spec.scaling, ray.cluster_resources())
            except (ray.exceptions.RayError, TimeoutError):
                continue  # the actor is being restarted
            faults.strike("progress", step=live.step)
            display.update(
                LiveProgress(
                    step=live.step,
                    total_steps=total_steps,
                    loss=live.loss,
                    tokens_per_s=live.tokens_per_s,
                    restore_point=live.restore_point,
                    max_age=live.max_age,
                    bytes_per_s=live.bytes_per_s,
                    state=lacking if lacking and live.state in ("starting", "recovering") else live.state,
                )
            )

    with ProgressDisplay(console) as display:
        thread = threading.Thread(target=follow, args=(display,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
