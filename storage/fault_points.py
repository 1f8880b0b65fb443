"""Fault injection: addressed faults (who, step, point) that kill a process of the run, each at most once in the run."""

import contextlib
import os
import signal
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from storage import keys
from storage.errors import ObjectExistsError, StoreError
from storage.options import Options
from storage.records import Incident, Stored

if TYPE_CHECKING:  # Ray Train's controller imports this module, and needs no store
    from storage.object_store import ObjectStore

Who = Literal["worker", "writer", "actor", "driver"]
Point = Literal[
    "forward",
    "backward",
    "before_tick",
    "snapshot",
    "hand_over",
    "restore",
    "before_upload",
    "during_upload",
    "after_upload",
    "before_commit",
    "after_commit",
    "report",
    "begin_attempt",
    "finish",
    "progress",
]
POINTS: dict[Who, tuple[Point, ...]] = {
    "worker": ("backward", "forward", "before_tick", "snapshot", "hand_over", "restore"),
    "writer": ("during_upload", "before_upload", "after_upload"),
    "actor": ("before_commit", "after_commit", "report", "begin_attempt", "finish"),
    "driver": ("progress",),
}
"""Where each process can be struck; the first is the default."""


class FaultOptions(Options):
    """One injected fault, addressed by who, step and point. It fires once in a run, whatever is restarted."""

    who: Who = "worker"
    """Process that is struck: a training worker, a ShardWriter, the CheckpointActor or the driver."""

    rank: Annotated[int, Field(ge=0)] | None = None
    """Training worker that is struck, or whose shard the ShardWriter is at; null: whichever gets there first."""

    step: Annotated[int, Field(ge=0)]
    """It strikes when its point is first reached at or after this step: the step trained or restored (worker), of the
    version (writer), of the restore point or the report (actor), last reported (driver)."""

    point: Point | None = None
    """Worker: `forward`, `backward` (default): while they run; `before_tick`: optimizer stepped, nothing measured;
    `snapshot`: before the copy; `hand_over`: copied, not accepted; `restore`: reading the composite. Writer:
    `before_upload`, `during_upload` (default): record batches written, not closed; `after_upload`: stored, not told.
    Actor: `before_commit` (default); `after_commit`: record written, nobody told; `report`: ranks wait for a decision;
    `begin_attempt`: attempt committed, plan not given out; `finish`: run marked finished, nobody told. Driver:
    `progress` (default)."""

    attempt: Annotated[int, Field(ge=1)] | None = None
    """Attempt that is struck; null: any."""

    action: Literal["kill", "raise", "nan"] = "kill"
    """`kill`: SIGKILL. In a training worker also `raise`: an exception; `nan`: a gradient becomes NaN."""

    @model_validator(mode="after")
    def _fits_who(self) -> "FaultOptions":
        if self.at not in POINTS[self.who]:
            raise ValueError(f"point: expected one of {', '.join(POINTS[self.who])} for {self.who}, got {self.point}")
        if self.rank is not None and self.who not in ("worker", "writer"):
            raise ValueError(f"rank: expected null for {self.who}, got {self.rank}")
        if self.attempt is not None and self.who == "driver":
            raise ValueError(f"attempt: expected null for driver, got {self.attempt}")
        if self.action != "kill" and self.who != "worker":
            raise ValueError(f"action: expected kill for {self.who}, got {self.action}")
        if self.action == "nan" and self.at != "backward":
            raise ValueError(f"point: expected backward for action nan, got {self.point}")
        return self

    @property
    def at(self) -> Point:
        """The point, or the default of `who`."""
        return self.point or POINTS[self.who][0]

    @property
    def address(self) -> str:
        """Name of the fault within its run: two faults with the same address are one."""
        parts = (self.who, self.rank, self.step, self.at, self.attempt, self.action)
        return "-".join("any" if part is None else str(part) for part in parts)


class FaultMark(Stored):
    """Evidence that a fault has fired, created before it strikes."""

    nonce: str
    address: str
    step: int
    """Step at which it struck."""


class FaultPoints:
    """The faults addressed to one process, as it passes the points where they strike. Thread-safe."""

    def __init__(self, faults: Sequence[FaultOptions], who: Who, store: "ObjectStore") -> None:
        self._armed = [fault for fault in faults if fault.who == who]
        self._store = store

    def __bool__(self) -> bool:
        return bool(self._armed)

    def strike(self, point: Point, *, step: int, attempt: int = 0, rank: int | None = None) -> None:
        """Kill this process here if a fault is addressed to this point. Blocks on the store only then."""
        if self.due(point, step=step, attempt=attempt, rank=rank):
            os.kill(os.getpid(), signal.SIGKILL)

    def due(self, point: Point, *, step: int, attempt: int = 0, rank: int | None = None) -> FaultOptions | None:
        """The fault that strikes here and now, marked as fired, or None."""
        for fault in self._armed:
            here = fault.at == point and fault.step <= step and fault.rank in (None, rank)
            if here and fault.attempt in (None, attempt):
                with contextlib.suppress(StoreError):  # without evidence it does not fire; it stays armed
                    fires = self._mark(fault, step)
                    self._armed = [other for other in self._armed if other is not fault]
                    if fires:
                        return fault
        return None

    def _mark(self, fault: FaultOptions, step: int) -> bool:
        """Leave the evidence; False when it was there: the fault has fired before."""
        key = keys.fault(fault.address)
        mark = FaultMark(nonce=uuid.uuid4().hex, address=fault.address, step=step)
        try:
            self._store.create(key, mark.to_bytes())
        except ObjectExistsError:  # perhaps our own, its reply lost
            return FaultMark.from_bytes(key, self._store.read(key)) == mark
        return True


def fired_faults(store: "ObjectStore") -> tuple[Incident, ...]:
    """What has been injected into the run, by step."""
    marks = [FaultMark.from_bytes(info.key, store.read(info.key)) for info in store.list(keys.FAULTS)]
    return tuple(
        Incident(step=mark.step, kind="fault injected", what=mark.address)
        for mark in sorted(marks, key=lambda mark: mark.step)
    )
