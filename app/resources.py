"""What the training workers need, and whether the machines have it."""

import os
import socket
from collections.abc import Mapping

import ray
import torch

from app.job_spec import ScalingOptions
from storage.errors import SpecError

_REACH_S = 5.0


def worker_resources(scaling: ScalingOptions) -> dict[str, float]:
    """What Ray reserves for each worker."""
    gpus = {"GPU": float(scaling.gpus_per_worker)} if scaling.gpus_per_worker else {}
    return {"CPU": scaling.cpus_per_worker, **gpus}


def ray_starts_here() -> bool:
    """Whether this job starts Ray on this machine, rather than joining the cluster it was submitted to."""
    return not ray.is_initialized() and "RAY_ADDRESS" not in os.environ


def check_cluster() -> None:
    """Refuse a cluster address where nothing listens: Ray itself would try for minutes.

    Raises:
        SpecError: names the address.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if ray.is_initialized() or not port.isdecimal():  # `auto` and `local` hold no port
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise SpecError(
            f"RAY_ADDRESS: expected the address of a running Ray cluster, got {address!r}, where nothing answers "
            f"({error}); start one, correct it, or unset it to run on this machine"
        ) from error


def check_gpus(scaling: ScalingOptions) -> None:
    """Refuse a job for more GPUs than this machine has, if Ray starts here: it would wait for them forever.

    Raises:
        SpecError: names what to change.
    """
    needed = scaling.workers * scaling.gpus_per_worker
    if ray_starts_here() and (found := torch.cuda.device_count()) < needed:
        raise SpecError(
            f"scaling.gpus_per_worker: expected {needed} GPUs on this machine for scaling.workers = {scaling.workers}, "
            f"got {found}; set it to 0 to train on the CPU, lower scaling.workers, or submit the job to a Ray cluster"
        )


def shortage(scaling: ScalingOptions, total: Mapping[str, float]) -> str | None:
    """What a cluster with `total` resources lacks for the worker group, or None.

    Nothing to refuse a job for: a cluster that grows by itself may have it in some minutes.
    """
    lacking = [
        f"{name} {total.get(name, 0):g} of {scaling.workers * each:g}"
        for name, each in worker_resources(scaling).items()
        if total.get(name, 0) < scaling.workers * each
    ]
    return f"waiting for resources: {', '.join(lacking)}" if lacking else None
