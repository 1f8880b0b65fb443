"""The training loop with a rival's way of saving, timed.

Rank 0 leaves `FOLDER/run.json`: what happened from the end of step `FIRST` to the moment when all is stored.
"""

import json
import time
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.family import cpu_seconds
from benchmarks.rivals import METHODS, NoCheckpoints
from storage.messages import Verdict
from storage.options import StorageOptions
from workers import train_loop
from workers.checkpointer import StepStats
from workers.loop_config import LoopConfig

FIRST = 3
"""By then every process has started, and what is done once has been done."""


def timed_train(
    folder: Path, method: str, driver: int, storage: StorageOptions, config: dict[str, LoopConfig]
) -> Verdict | None:
    """`workers.train_loop.train` with the saving of `method`."""
    base = METHODS[method]

    class Timed(base):  # type: ignore[misc, valid-type]  # chosen at run time
        _began: tuple[float, dict[str, float]]
        _in_ticks: list[float]
        _in_steps: list[float]

        def before_optimizer_step(self) -> None:
            began = time.perf_counter()
            super().before_optimizer_step()
            if getattr(self, "_in_ticks", None):
                self._in_ticks[-1] += time.perf_counter() - began

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
            cpu = {kind: spent - cpu_began.get(kind, 0.0) for kind, spent in cpu_seconds(driver).items()}
            told = {
                "seconds": seconds,
                "seconds_to_last_step": trained - began,
                "cpu_seconds": sum(cpu.values()),
                "cpu_seconds_by_kind": cpu,
                "tick_seconds": self._in_ticks,
                "step_seconds": self._in_steps,
                "ended_at": time.time(),
            }
            (folder / "run.json").write_text(json.dumps(told))

    if issubclass(base, NoCheckpoints):
        base.storage = storage
    with patch.object(train_loop, "Checkpointer", Timed):
        return train_loop.train(config)
