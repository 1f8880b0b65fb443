"""Messages between the training ranks, the CheckpointActor and the ShardWriters. Scalars and names only, no tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storage.encoding import Encoding
from storage.records import BaseVersion, ElementRange, LayerFacts, Manifest, VersionId, VersionRef
from storage.shard_format import ShardMeta

_EPSILON = 1e-12
"""Smallest reference norm, so that a layer of zeros has a finite drift."""


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """What rank 0 says of a worker group when it begins an attempt (or meets an actor that has been restarted)."""

    node_of_rank: tuple[str, ...]
    facts: tuple[LayerFacts, ...]
    shard_bytes: dict[str, tuple[int, ...]]
    """Per trained layer, the payload each rank owns."""
    base: BaseVersion


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Version of one layer to restore; no manifest means the base version, which the model already holds."""

    ref: VersionRef
    manifest: Manifest | None


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """One pinned plan, the same for all ranks."""

    attempt: int
    step: int
    layers: dict[str, LayerPlan]
    writers: dict[str, str]
    """ShardWriter's actor name by node id."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The run must stop; `kind` is the name of the error class."""

    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """Layers that all ranks persist at their next tick."""

    decision: int
    epoch: int
    attempt: int
    layers: tuple[str, ...]
    spread_s: float | None = None
    """Time over which each node's ShardWriter spreads its writing; None: as fast as possible."""

    def spread_of(self, shard_bytes: int, node_bytes: Mapping[str, int]) -> float | None:
        """One shard's part of `spread_s`. `node_bytes`: what its node hands over of each layer."""
        if self.spread_s is None:
            return None
        return self.spread_s * shard_bytes / max(1, sum(node_bytes[layer] for layer in self.layers))


@dataclass(frozen=True, kw_only=True)
class Comeback:
    """How rank 0 came to its first step, on its own clock."""

    laps: dict[str, float]
    """Seconds by phase, from `imports` to `first_step`: names of `storage.records.Phases`."""
    ago_s: float
    """How long ago that step was."""


class LayerSums(NamedTuple):
    """Sums over one whole layer, against the reference W_ref taken at its last snapshot."""

    drift_sq: float
    """Σ(W − W_ref)²."""
    reference_sq: float
    """ΣW_ref²."""
    impact: float
    """−Σ m̂(W − W_ref): what the loss would lose; NaN where the optimizer keeps no `exp_avg`."""

    @property
    def drift(self) -> float:
        """‖W − W_ref‖₂ / ‖W_ref‖₂."""
        return math.sqrt(self.drift_sq) / max(math.sqrt(self.reference_sq), _EPSILON)


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    """What rank 0 reports at a tick, after an all-reduce over the ranks."""

    attempt: int
    step: int
    sums: npt.NDArray[np.float64]
    """Of each trained layer, in the order of the worker group's facts: [layers, 3], columns as in `LayerSums`."""
    failed_hand_overs: tuple[str, ...] = ()
    """Layers of which a ShardWriter did not get a rank's shard."""
    unacknowledged: tuple[str, ...] = ()
    """Layers of which a rank does not know yet whether the ShardWriter has accepted its shard."""
    carried_out: Order | None = None
    """Order whose snapshots were taken at the tick before, at `carried_out_step`."""
    carried_out_step: int = 0
    hold: bool = False
    """Training stands still at `step` until the restore point has moved."""
    flush: bool = False
    """Training is over: persist every layer at `step`."""
    loss: float | None = None
    ticks: int = 0
    """Ticks of this attempt so far: a report that is lost takes none of them with it."""
    tokens: int = 0
    """Tokens trained on in this attempt so far."""
    eval_losses: tuple[tuple[int, float], ...] = ()
    """(step, loss) of the evaluations since the last report that was answered."""
    tick_seconds: float | None = None
    step_seconds: float | None = None
    attempt_facts: AttemptFacts | None = None
    comeback: Comeback | None = None
    """In the first report after the attempt's first step."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The CheckpointActor's answer to a report."""

    order: Order | None = None
    restore_point: int = 0
    whole_at: int | None = None
    """Step at which every trained layer is committed, if they are all of one step."""
    verdict: Verdict | None = None
    needs_attempt_facts: bool = False


@dataclass(frozen=True, kw_only=True)
class ShardOrder:
    """One shard that a ShardWriter has to store."""

    meta: ShardMeta
    ranges: tuple[ElementRange, ...]
    encoding: Encoding
    spread_s: float | None = None
    """The shard's part of its order's."""


class StoredShards(NamedTuple):
    """Shards of one layer version that a ShardWriter has stored. No object each: there may be 200,000 of them."""

    version: VersionId
    world_size: int
    entries: dict[int, bytes]
    """By rank, what a manifest says of the shard: its `ShardRef` as JSON."""
    sizes: dict[int, int]
    """By rank, its bytes."""


@dataclass(frozen=True, kw_only=True)
class FailedShard:
    """A shard that a ShardWriter could not store."""

    version: VersionId
    problem: str
    poisoned: bool = False
    """Refused because it holds a non-finite value."""


@dataclass(frozen=True, kw_only=True)
class WriterQuestion:
    """What the CheckpointActor asks a ShardWriter, which answers when there is news, or after `wait_s`."""

    epoch: int
    """Who asks. A writer forgets nothing for an epoch older than the newest one that has asked."""
    life: str = ""
    """The life of the writer that the rest is about; another life tells everything from its beginning."""
    seen: int = 0
    """Number of the last outcome heard of. Failures up to it may be forgotten."""
    over: frozenset[VersionId] = frozenset()
    """Versions of which nobody will ask any more what is stored."""
    wait_s: float
    tell_pending: bool = False


@dataclass(frozen=True, kw_only=True)
class WriterReport:
    """A ShardWriter's answer: the next outcomes after those seen, and, if asked for, the shards on their way."""

    life: str
    """Another one each time that the writer is started: what the one before had accepted is lost with it."""
    last: int
    """Number of the last outcome told so far."""
    stored: tuple[StoredShards, ...]
    failed: tuple[FailedShard, ...]
    pending: Mapping[VersionId, frozenset[int]] | None
    """Ranks by version. None unless asked for and no outcome is left to tell: only then what is not pending is lost."""


@dataclass(frozen=True, kw_only=True)
class LiveStatus:
    """How the run stands this moment, for the progress line."""

    state: str
    step: int
    loss: float | None
    tokens_per_s: float
    restore_point: int
    max_age: int
    bytes_per_s: float
