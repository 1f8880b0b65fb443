"""What a user would pick instead, behind the door of `Checkpointer`, so that in a comparison all else is the same."""

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train.v2.api.report_config import CheckpointConsistencyMode, CheckpointUploadMode
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict import get_state_dict

from storage.messages import Verdict
from storage.options import StorageOptions
from storage.s3_store import s3fs_arguments
from workers.checkpointer import Checkpointer, RunStoppedError, StepStats


class NoCheckpoints(Checkpointer):
    """Trains, and keeps nothing."""

    storage: ClassVar[StorageOptions]
    """Where the full checkpoints go; the run's own catalog lies elsewhere."""

    def restore(self) -> int:
        """As ever: there is nothing but the base version."""
        step = super().restore()
        self._saving_group = dist.new_group(backend="gloo")
        return step

    def after_step(self, step: int, stats: StepStats) -> None:
        """Save at each tick."""
        if step % self._options.interval_steps == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Save everything as of `step`."""

    def wait(self) -> None:
        """Return when all that was saved is stored."""

    def finish(self, step: int) -> None:
        """Wait, and end the run: its catalog has nothing to finish."""
        self.wait()
        raise RunStoppedError(Verdict(kind="Measured", message=f"step {step}"))

    def state(self) -> dict[str, Any]:
        """Weights and optimizer."""
        weights, optimizer = get_state_dict(self._model, self._optimizer)
        return {"weights": weights, "optimizer": optimizer}

    def writer(self, step: int) -> dcp.StorageWriter:
        """PyTorch's own, for this store."""
        path = f"{self.storage.url}/{self._run}-full/{step:06d}"
        if not path.startswith("s3://"):
            return dcp.FileSystemWriter(path)
        return FsspecWriter(path, **s3fs_arguments(self.storage.s3))


class SynchronousSave(NoCheckpoints):
    """`torch.distributed.checkpoint.save`; training waits."""

    def save(self, step: int) -> None:
        """Save everything as of `step`."""
        dcp.save(self.state(), storage_writer=self.writer(step), process_group=self._saving_group)


class AsyncSave(NoCheckpoints):
    """`torch.distributed.checkpoint.async_save`, one at a time, as its documentation asks for."""

    _saving: Any = None

    def save(self, step: int) -> None:
        """Save everything as of `step`."""
        self.wait()
        self._saving = dcp.async_save(self.state(), storage_writer=self.writer(step), process_group=self._saving_group)

    def wait(self) -> None:
        """Return when all that was saved is stored."""
        if self._saving is not None:
            self._saving.result()


class RayTrainReport(NoCheckpoints):
    """`ray.train.report(checkpoint=..., checkpoint_upload_mode=ASYNC)` of what rank 0 saves, as under DDP."""

    def save(self, step: int) -> None:
        """Save everything as of `step`."""
        checkpoint = None
        if self._rank == 0:
            folder = Path(tempfile.mkdtemp(prefix="layercheck-bench-"))
            torch.save(self.state(), folder / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    def wait(self) -> None:
        """Return when all that was saved is stored."""
        ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)


NONE, OURS, DCP = "none", "layercheck", "DCP async_save"
METHODS: dict[str, type[Checkpointer]] = {
    NONE: NoCheckpoints,
    OURS: Checkpointer,
    DCP: AsyncSave,
    "Ray Train ASYNC": RayTrainReport,
    "synchronous save": SynchronousSave,
}
