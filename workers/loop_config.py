"""What the driver gives every worker. Without torch: Ray Train's controller unpickles it before any worker starts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage.fault_points import FaultOptions
from storage.options import CheckpointOptions, StorageOptions
from workers.options import ModelOptions, TrainingOptions

if TYPE_CHECKING:
    import ray

    from workers.data import TokenizedData


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What the driver gives every worker."""

    run: str
    storage: StorageOptions
    model: ModelOptions
    training: TrainingOptions
    checkpoint: CheckpointOptions
    faults: tuple[FaultOptions, ...]
    total_steps: int
    pad_id: int
    data: "ray.ObjectRef[TokenizedData]"
    actor: Any
