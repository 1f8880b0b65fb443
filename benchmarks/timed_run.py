"""`python -m benchmarks.timed_run FOLDER METHOD ARGUMENTS...`: `python -m app ARGUMENTS...`, timed."""

import functools
import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import app.driver
from app.cli import main
from app.job_spec import JobSpec, load_spec
from benchmarks.rivals import METHODS, RayTrainReport
from benchmarks.timed_train import timed_train
from storage.s3_store import arrow_filesystem


def ray_trains_store(spec: JobSpec) -> dict[str, Any]:
    """Arguments of Ray Train's `RunConfig`."""
    url = spec.storage.url
    if not url.startswith("s3://"):
        return {"storage_path": str(Path(url).resolve())}
    return {
        "storage_path": url.removeprefix("s3://"),
        "storage_filesystem": arrow_filesystem(spec.storage.s3),
    }


def start(folder: Path, method: str, arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    overrides = [value for flag, value in pairwise(arguments) if flag == "--set"]
    spec = load_spec(Path(arguments[1]), overrides)
    driver = os.getpid()
    app.driver.train = functools.partial(timed_train, folder, method, driver, spec.storage)  # type: ignore[assignment]
    if METHODS[method] is RayTrainReport:
        where, trainer = ray_trains_store(spec), app.driver.TorchTrainer
        app.driver.TorchTrainer = lambda *given, run_config, **options: trainer(  # type: ignore[misc, assignment]
            *given, run_config=replace(run_config, **where), **options
        )
    return main(arguments)


if __name__ == "__main__":
    sys.exit(start(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
