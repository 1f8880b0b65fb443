"""Options of the store and of checkpointing, as they stand in the job spec."""

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator


class Options(BaseModel):
    """Base of every section of the job spec: frozen, unknown keys and infinities refused, field docstrings kept."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class S3Options(Options):
    """Connection to S3 or an S3-compatible server; leave it out to use the usual AWS chain."""

    endpoint: str | None = None
    """URL of an S3-compatible server, e.g. `http://10.0.0.5:7480`; null means AWS."""

    region: str | None = None
    """Region; null leaves it to the AWS configuration."""

    access_key: SecretStr | None = None
    """Access key; null means the AWS chain (environment, profile, instance role)."""

    secret_key: SecretStr | None = None
    """Secret key that belongs to `access_key`."""

    @model_validator(mode="after")
    def _keys_come_in_pairs(self) -> "S3Options":
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("access_key and secret_key must be given together, or neither")
        return self


class StorageOptions(Options):
    """Where runs are stored."""

    url: str = "runs"
    """Folder or `s3://bucket/prefix`; the run is stored in `<url>/<name>`."""

    s3: S3Options = S3Options()
    """Connection details when `url` is an `s3://` URL."""

    allow_unsafe_create: bool = False
    """Accept a store that ignores exclusive creation. Two drivers on one run can then destroy it."""


def parse_write_budget(value: float | str) -> tuple[Literal["share", "bytes_per_s"], float]:
    """Parse a write budget into its unit and amount.

    Args:
        value: a share of the full state per tick (`0.05`, `"1/22.6"`) or a rate (`"50 MB/s"`).

    Raises:
        ValueError: it is neither, or not positive, or a share above 1.
    """
    text = str(value).strip()
    units = {"B/s": 1, "kB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9}
    for unit, scale in sorted(units.items(), key=lambda item: -len(item[0])):
        if text.endswith(unit):
            rate = float(text[: -len(unit)]) * scale
            if not 0 < rate < float("inf"):
                raise ValueError(f"a rate must be positive and finite, got {text!r}")
            return "bytes_per_s", rate
    numerator, _, denominator = text.partition("/")
    try:
        share = float(Fraction(numerator) / Fraction(denominator or 1))
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f'expected a share such as 0.05 or "1/20", or a rate such as "50 MB/s", got {text!r}'
        ) from None
    if not 0 < share <= 1:
        raise ValueError(f"a share of the full state per tick must be above 0 and at most 1, got {text!r}")
    return "share", share


def _checked_write_budget(value: float | str) -> float | str:
    parse_write_budget(value)
    return value


def _checked_block(value: int) -> int:
    if value & (value - 1):
        raise ValueError(f"expected a power of two, got {value}")
    return value


Bits = Literal[2, 4, 8]


class DeltaOptions(Options):
    """How coarse codec `delta` is: bits for each element, and how many elements share one scale."""

    weight_bits: Bits = 4
    """Bits for a weight's difference from the base version; the error is at most the block's largest difference (2
    bits: signs), or that over 14 (4) or 254 (8)."""

    exp_avg_bits: Bits = 2
    """Bits for Adam's first moment; the error as for `weight_bits`, of the moment itself."""

    exp_avg_sq_bits: Bits = 4
    """Bits for the square root of Adam's second moment; the error is at most the block's largest root over 6 (2 bits),
    30 (4) or 510 (8)."""

    block_elements: Annotated[int, Field(ge=16, le=65536), AfterValidator(_checked_block)] = 256
    """Elements that share one scale of 4 bytes: a power of two."""


class CheckpointOptions(Options):
    """What is persisted, when, and how stale a restored layer may be."""

    mode: Literal["adaptive", "full"] = "adaptive"
    """`adaptive`: layer by layer under the budget. `full`: every layer at every tick, recovery is exact."""

    interval_steps: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two ticks (a tick measures deltas and may persist layers)."""

    write_budget: Annotated[float | str, AfterValidator(_checked_write_budget)] = "1/20"
    """Share of the full state written per tick (`0.05`, `"1/20"`), or a rate (`"50 MB/s"`). Unused in mode `full`."""

    threshold: Annotated[float, Field(ge=0)] | None = None
    """Persist a layer before its deadline only if its drift reaches this; null means no threshold."""

    criterion: Literal["drift", "impact", "oldest"] = "oldest"
    """What ranks layers that are not yet due: drift or impact per byte, or their age."""

    staleness_bound_steps: Annotated[int, Field(ge=1)] = 50
    """Largest age, in steps, of any layer in a restore point (S)."""

    max_lag: Annotated[int, Field(ge=1)] = 10
    """Largest number of steps that a failure may cost; training holds when storage falls further behind."""

    weight_prediction: bool = True
    """After a failure, carry the weights of each stale layer along its own momentum over the steps that it missed, if
    that lowers the loss of the next samples; false restores them as they were stored."""

    reference_fraction: Annotated[float, Field(gt=0, le=1)] = 1 / 64
    """Share of each slice that is kept on the device as the reference for deltas; 1 measures exactly."""

    codec: Literal["raw", "lossless", "delta"] = "raw"
    """`raw`: as it is. `lossless`: exact, compressed. `delta`: weights as a quantized difference from the weights the
    run began with (a copy of them stays in the nodes' memory), Adam's moments quantized."""

    delta: DeltaOptions = DeltaOptions()
    """How coarse codec `delta` is."""

    keep_restore_points: Annotated[int, Field(ge=1)] = 3
    """Newest restore points whose objects are kept."""

    milestone_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Every so many steps all layers are written at one step, on top of the budget, and kept for good; null: never."""

    keep_best: Annotated[int, Field(ge=0)] = 0
    """Restore points that are kept for their held-out loss: the first one after each of the best evaluations."""

    in_flight_bytes: Annotated[int, Field(gt=0)] | None = None
    """Largest number of bytes per node that are accepted but not yet durable; null: half the node's object store."""

    drain_s: Annotated[float, Field(ge=0)] = 10.0
    """Longest wait, after a failure, for uploads that were already accepted."""

    @model_validator(mode="after")
    def _is_exact_where_asked(self) -> "CheckpointOptions":
        if self.mode == "full" and self.codec == "delta":
            raise ValueError("codec must be raw or lossless in mode full (its recovery is exact), got delta")
        return self

    @model_validator(mode="after")
    def _bounds_fit(self) -> "CheckpointOptions":
        if self.max_lag < 2 * self.interval_steps:
            raise ValueError(
                f"max_lag must be at least 2 x interval_steps = {2 * self.interval_steps} "
                f"(a decision is taken one tick and durable another tick later), got {self.max_lag}"
            )
        if self.mode == "adaptive" and self.staleness_bound_steps < 4 * self.interval_steps:
            raise ValueError(
                f"staleness_bound_steps must be at least 4 x interval_steps = {4 * self.interval_steps}, "
                f"got {self.staleness_bound_steps}"
            )
        return self
