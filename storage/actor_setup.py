"""What the driver gives the CheckpointActor."""

from dataclasses import dataclass
from typing import Any

from storage.fault_points import FaultOptions
from storage.options import CheckpointOptions, StorageOptions
from storage.records import ProcessId


@dataclass(frozen=True, kw_only=True)
class ActorSetup:
    """The run, its options, and who drives it."""

    storage: StorageOptions
    run: str
    run_id: str
    checkpoint: CheckpointOptions
    in_flight_limit_bytes: int
    encoded_share: float
    """Encoded bytes for each byte of the state, before anything has been encoded."""
    spec: dict[str, Any]
    spec_fingerprint: str
    data_fingerprint: str
    driver: str
    where: ProcessId
    attempts_without_progress: int
    store_outage_s: float
    faults: tuple[FaultOptions, ...] = ()

    @property
    def staleness_bound_steps(self) -> int:
        """Largest age in a restore point: 0 in mode `full`."""
        return 0 if self.checkpoint.mode == "full" else self.checkpoint.staleness_bound_steps
