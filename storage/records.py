"""What the catalog stores, as JSON: epoch claims, manifests and records. Validated on reading, never executed."""

import json
import re
from typing import Annotated, Any, Literal, NamedTuple, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from storage.errors import CorruptObjectError

NonNegative = Annotated[int, Field(ge=0, lt=2**63)]

_LONGEST_REASON = 200  # what a message quotes of stored bytes
_SEALED = re.compile(rb'\{"digest":"([0-9a-f]{32})",')


def digest_of(data: bytes) -> str:
    """XXH3-128 of `data`, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def sealed(document: bytes) -> bytes:
    """The JSON object `document` with its digest as first field."""
    return b'{"digest":"%s",%s' % (digest_of(document).encode(), document[1:])


class Stored(BaseModel):
    """Base of everything stored as JSON: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> Self:
        """Parse what `to_bytes` wrote.

        Raises:
            CorruptObjectError: `data` is not such a document; names `key`.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            reason = " ".join(f"{where}: {first['msg']}".split())[:_LONGEST_REASON]
            raise CorruptObjectError(f"{key}: {reason}; restore the object or delete it") from error


class Sealed(Stored):
    """Base of everything stored as an object of its own: the JSON's first field is a digest of the rest."""

    def to_bytes(self) -> bytes:
        """Canonical JSON with its digest."""
        return sealed(super().to_bytes())

    @classmethod
    def from_bytes(cls, key: str, data: bytes) -> Self:
        """Parse what `to_bytes` wrote.

        Raises:
            CorruptObjectError: `data` is not such a document, or not as it was written; names `key`.
        """
        seal = _SEALED.match(data)
        rest = b"{" + data[seal.end() :] if seal else data
        expected, got = seal.group(1).decode() if seal else "at its beginning", digest_of(rest)
        if expected != got:
            raise CorruptObjectError(f"{key}: expected digest {expected}, got {got}; bring the object back from a copy")
        return super().from_bytes(key, rest)


class ElementRange(Stored):
    """Elements `[first, first + count)` of a flattened parameter."""

    tensor: str
    first: NonNegative
    count: NonNegative


class ShardRef(Stored):
    """One stored shard: one rank's slice of one layer at one step."""

    key: str
    rank: NonNegative
    bytes: NonNegative
    digest: str
    ranges: tuple[ElementRange, ...]


class VersionId(NamedTuple):
    """Identity of a layer version. All its shards come from one decision, so from one attempt.

    A tuple, as the CheckpointActor looks up 200 of them for each ShardWriter; stored as a JSON object.
    """

    layer: str
    step: NonNegative
    epoch: NonNegative
    attempt: NonNegative


class Manifest(Sealed):
    """Shards of all owners of one layer version."""

    format_version: Literal[1] = 1
    version: VersionId
    world_size: Annotated[int, Field(ge=1)]
    shards: tuple[ShardRef, ...]

    @model_validator(mode="after")
    def _one_shard_a_rank(self) -> Self:
        ranks = sorted(shard.rank for shard in self.shards)
        if len(ranks) != self.world_size or ranks != list(range(len(ranks))):
            raise ValueError(f"expected one shard of each of {self.world_size} ranks")
        return self

    @field_serializer("version")
    def _as_object(self, version: VersionId) -> dict[str, Any]:
        return version._asdict()

    @property
    def bytes(self) -> int:
        """Size of all shards together."""
        return sum(shard.bytes for shard in self.shards)


class VersionRef(Stored):
    """What a restore point says of one layer. The base version has no manifest and costs no bytes."""

    step: NonNegative
    epoch: NonNegative = 0
    attempt: NonNegative = 0
    manifest_key: str | None = None
    manifest_digest: str | None = None
    bytes: NonNegative = 0


BASE = VersionRef(step=0)


class LayerFacts(Stored):
    """Size of one layer's state, and whether it is trained at all."""

    name: str
    bytes: NonNegative
    frozen: bool = False


class BaseVersion(Stored):
    """Where step 0 came from, and the hash of its content."""

    source: str
    digest: str


class Totals(Stored):
    """Counters of the whole run, over all epochs and attempts."""

    ticks: NonNegative = 0
    bytes_written: NonNegative = 0
    attempts: NonNegative = 0
    attempts_without_commit: NonNegative = 0
    """Attempts in a row, up to now, that committed no restore point."""
    held_seconds: float = 0.0
    """Time for which training stood still because the restore point was `max_lag` behind."""


class Phases(Stored):
    """Where the seconds of a recovery went. Each is measured on one machine; no two clocks are compared."""

    detect: float
    """From the worker group's last report to the news that it has failed; the death lies somewhere between."""
    restart: float
    """Ray takes the old group down and starts rank 0's process."""
    imports: float
    """From the start of that process to the training loop's first line: Ray, torch, transformers, the process group."""
    load_model: float
    """Model and optimizer are built."""
    plan: float
    """The CheckpointActor lets uploads land, and pins a restore plan."""
    read: float
    """Shards are read and verified, by all ranks together."""
    broadcast: float
    """They are broadcast, and filled into model and optimizer."""
    first_step: float
    """DDP is set up, one pass is discarded, and the first step is made."""

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(getattr(self, name) for name in type(self).model_fields))


class Recovery(Stored):
    """One restart from the composite."""

    attempt: NonNegative
    cause: str
    restore_point: NonNegative
    steps_lost: NonNegative
    max_age: NonNegative
    mean_age: float
    seconds: float | None = None
    """From the last report before the failure, or from when the job was submitted again, to the first step after."""
    phases: Phases | None = None
    """Their sum is `seconds`; null when the report that tells them was lost, or there was no step left to make."""


class Incident(Stored):
    """Something that was handled, but that the user should know."""

    step: NonNegative
    kind: str
    what: str


class Progress(Stored):
    """How training stood when the record was written."""

    step: NonNegative = 0
    attempt_ticks: NonNegative = 0
    """Ticks of the present attempt, counted in `totals` already."""
    loss: float | None = None
    eval_losses: tuple[tuple[int, float | None], ...] = ()
    """(step, held-out loss); JSON has no NaN or infinity, so null stands for a loss that was not finite."""
    step_seconds_median: float | None = None
    tick_seconds_median: float | None = None
    tick_seconds_p99: float | None = None


class Record(Sealed):
    """A committed restore point: the whole map layer -> version, and the run's story so far."""

    format_version: Literal[1] = 1
    epoch: NonNegative
    seq: NonNegative
    step: NonNegative
    layers: dict[str, VersionRef]
    previous: dict[str, VersionRef] = {}
    """The version before the one in `layers`, kept for the day when that one cannot be read."""
    facts: tuple[LayerFacts, ...]
    base: BaseVersion
    spec_fingerprint: str
    staleness_bound_steps: NonNegative
    totals: Totals = Totals()
    progress: Progress = Progress()
    recoveries: tuple[Recovery, ...] = ()
    incidents: tuple[Incident, ...] = ()
    finished: bool = False

    @model_validator(mode="after")
    def _map_is_whole(self) -> Self:
        names = {fact.name for fact in self.facts}
        if names != self.layers.keys() or not names >= self.previous.keys():
            raise ValueError("expected a version of every layer, and of no other")
        if any(ref.step > self.step for ref in self.layers.values()):
            raise ValueError(f"expected no layer newer than the restore point's step {self.step}")
        return self

    def ages(self) -> dict[str, int]:
        """Age in steps of each layer that is trained."""
        return {fact.name: self.step - self.layers[fact.name].step for fact in self.facts if not fact.frozen}

    def named(self) -> set[VersionRef]:
        """Stored versions that this record needs, in first or in second place."""
        return {ref for ref in (*self.layers.values(), *self.previous.values()) if ref.manifest_key is not None}

    @property
    def full_checkpoint_bytes(self) -> int:
        """Size of one checkpoint of every trained layer."""
        return sum(fact.bytes for fact in self.facts if not fact.frozen)


class Fence(Sealed):
    """Stands where a stale epoch would create its next record, so that it cannot."""

    fenced_by: NonNegative
    """Epoch that took the run over."""


class ProcessId(Stored):
    """Which process on which machine: the start time tells a reused pid apart."""

    host: str
    boot_id: str
    pid: NonNegative
    started: str


class EpochClaim(Sealed):
    """Content of the object whose exclusive creation claims an epoch: who, where, when, with which spec."""

    format_version: Literal[1] = 1
    epoch: NonNegative
    nonce: str
    driver: str
    where: ProcessId
    claimed_at: str
    spec: dict[str, Any]
    spec_fingerprint: str
    data_fingerprint: str
    """Of the examples themselves: a path does not say what lies there."""

    @field_validator("spec")
    @classmethod
    def _is_json(cls, spec: dict[str, Any]) -> dict[str, Any]:
        json.dumps(spec, allow_nan=False)
        return spec


class EpochLife(Sealed):
    """Sign of life of an epoch: a counter that moves, so that no clock has to be trusted."""

    epoch: NonNegative
    beat: NonNegative
    ended: bool = False
