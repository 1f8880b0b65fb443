"""The training loop with a rival's way of saving, timed.

Rank 0 leaves `FOLDER/run.json`: what happened from the end of step `FIRST` to the moment when all is stored.
"""

import json
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import torch.distributed as dist

from benchmarks.rivals import METHODS, NoCheckpoints
from storage.messages import Verdict
from storage.options import StorageOptions
from workers import train_loop
from workers.checkpointer import StepStats
from workers.loop_config import LoopConfig

FIRST = 3
"""By then every process has started, and what is done once has been done."""


def cpu_seconds(driver: int) -> float:
    """CPU time of a driver and all that it has started: Ray, the workers, the CheckpointActor and the ShardWriters."""
    total = 0.0
    for process in (psutil.Process(driver), *psutil.Process(driver).children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def timed_train(
    folder: Path, method: str, driver: int, storage: StorageOptions, config: dict[str, LoopConfig]
) -> Verdict | None:
    """`workers.train_loop.train` with the saving of `method`."""
    base = METHODS[method]

    class Timed(base):  # type: ignore[misc, valid-type]  # chosen at run time
        _began: tuple[float, float]
        _in_ticks: list[float]
        _in_steps: list[float]

        def after_step(self, step: int, stats: StepStats) -> None:
            began = time.perf_counter()
            super().after_step(step, stats)
            if step > FIRST:
                self._in_ticks.append(time.perf_counter() - began)
                self._in_steps.append(stats.seconds)
            elif step == FIRST:
                dist.barrier(self._group)
                self._in_ticks, self._in_steps = [], []
                self._began = (time.perf_counter(), cpu_seconds(driver))

        def finish(self, step: int) -> None:
            trained = time.perf_counter()
            try:
                super().finish(step)
            finally:
                dist.barrier(self._group)
                if self._rank == 0:
                    self._tell(trained)

        def _tell(self, trained: float) -> None:
            began, cpu_began = self._began
            seconds = time.perf_counter() - began
            told = {
                "seconds": seconds,
                "seconds_to_last_step": trained - began,
                "cpu_seconds": cpu_seconds(driver) - cpu_began,
                "tick_seconds": self._in_ticks,
                "step_seconds": self._in_steps,
                "ended_at": time.time(),
            }
            (folder / "run.json").write_text(json.dumps(told))

    if issubclass(base, NoCheckpoints):
        base.storage = storage
    with patch.object(train_loop, "Checkpointer", Timed):
        return train_loop.train(config)
