"""What the report's figures show, as arrays, from a run's history. No drawing in here."""

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from storage.history import Tick

MAX_BINS = 300
"""Most columns of a figure: two pixels each on a laptop's screen."""

_NICE_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """Steps 1 to `last` in bins of `width` steps: at most `MAX_BINS`, none of them between two ticks."""

    last: int
    width: int

    @classmethod
    def of(cls, ticks: Sequence[Tick], last: int) -> "Bins":
        """For ticks up to step `last` and a figure of the usual width."""
        apart = [after.step - before.step for before, after in pairwise(ticks) if after.step > before.step]
        return cls(max(last, 1), max(min(apart, default=1), -(-last // MAX_BINS)))

    def __len__(self) -> int:
        return -(-self.last // self.width)

    def index(self, steps: Iterable[int] | Ints) -> Ints:
        """Bin of each step."""
        return np.clip((np.array(list(steps), np.int64) - 1) // self.width, 0, len(self) - 1)

    @property
    def centres(self) -> Floats:
        """Middle step of each bin."""
        return np.arange(len(self), dtype=np.float64) * self.width + (self.width + 1) / 2


@dataclass(frozen=True)
class Curve:
    """A value over steps: its mean, least and greatest in each bin that has any."""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats


def loss_curves(ticks: Sequence[Tick], bins: Bins) -> list[Curve]:
    """Training loss of each attempt, so that a step made twice is shown twice."""
    attempts = groupby(ticks, key=lambda tick: tick.attempt)
    losses = [_last_losses(group) for _, group in attempts]
    return [_curve(attempt, bins) for attempt in losses if attempt]


def loss_difference(ticks: Sequence[Tick], others: Sequence[Tick], bins: Bins) -> Curve:
    """Training loss against another run's at the same step, in percent of the latter; what was trained last counts."""
    loss, other = _last_losses(ticks), _last_losses(others)
    return _curve({step: 100 * (loss[step] / other[step] - 1) for step in loss if other.get(step)}, bins)


def _last_losses(ticks: Iterable[Tick]) -> dict[int, float]:
    return {tick.step: tick.loss for tick in ticks if tick.loss is not None and math.isfinite(tick.loss)}


def _curve(values: dict[int, float], bins: Bins) -> Curve:
    steps = sorted(values)
    binned: dict[int, list[float]] = {}
    for place, step in zip(bins.index(steps).tolist(), steps, strict=True):
        binned.setdefault(place, []).append(values[step])
    at = np.array(steps, float) if bins.width == 1 else bins.centres[list(binned)]
    means, lows, highs = (np.array([f(found) for found in binned.values()], float) for f in (np.mean, min, max))
    return Curve(at, means, lows, highs)


@dataclass(frozen=True)
class Stored:
    """Versions that became durable: how many of each layer (rows) in each bin of steps, and bytes of each layer."""

    versions: Ints
    bytes: Ints


def stored_versions(ticks: Sequence[Tick], layers: Sequence[str], bins: Bins) -> Stored:
    """What was persisted, and of which steps."""
    rows = {layer: row for row, layer in enumerate(layers)}
    versions, sizes = np.zeros((len(layers), len(bins)), np.int64), np.zeros(len(layers), np.int64)
    durable = [version for tick in ticks for version in tick.durable if version.layer in rows]
    at = np.array([rows[version.layer] for version in durable], np.int64)
    np.add.at(versions, (at, bins.index(version.step for version in durable)), 1)
    np.add.at(sizes, at, [version.bytes for version in durable])
    return Stored(versions, sizes)


@dataclass(frozen=True)
class Ages:
    """Ages in steps: of each layer (rows) the greatest in each bin (NaN: no tick there), mean and greatest of all."""

    binned: Floats
    mean_of_layer: Floats
    greatest_of_layer: Floats
    mean: Curve
    greatest: Curve
    lag: Curve
    """Steps that a failure would have cost: the step less the restore point."""


def layer_ages(ticks: Sequence[Tick], layers: Sequence[str], bins: Bins) -> Ages:
    """Ages at each tick, the last one of a step. A version counts once it is durable and not past the restore point."""
    ages: dict[int, list[int]] = {}
    lag: dict[int, float] = {}
    steps_of: dict[str, list[int]] = {layer: [0] for layer in layers}
    for before, tick in zip([None, *ticks], ticks, strict=False):
        for version in tick.durable:
            if version.layer in steps_of:
                insort(steps_of[version.layer], version.step)
        at = tick.restore_point
        if before is not None and before.attempt != tick.attempt:  # what is newer is of a group that is gone
            steps_of = {layer: steps[: bisect_right(steps, at)] for layer, steps in steps_of.items()}
        ages[tick.step] = [at - steps[bisect_right(steps, at) - 1] for steps in steps_of.values()]
        lag[tick.step] = tick.step - at
    by_step = np.array([ages[step] for step in sorted(ages)], float).reshape(len(ages), len(layers))
    binned = np.full((len(layers), len(bins)), -1.0)
    for place, row in zip(bins.index(sorted(ages)).tolist(), by_step, strict=True):
        binned[:, place] = np.maximum(binned[:, place], row)
    overall = {step: row for step, row in zip(sorted(ages), by_step, strict=True) if row.size}
    return Ages(
        binned=np.where(binned < 0, np.nan, binned),
        mean_of_layer=by_step.mean(axis=0) if len(ages) else np.zeros(len(layers)),
        greatest_of_layer=by_step.max(axis=0, initial=0),
        mean=_curve({step: float(row.mean()) for step, row in overall.items()}, bins),
        greatest=_curve({step: float(row.max()) for step, row in overall.items()}, bins),
        lag=_curve(lag, bins),
    )


@dataclass(frozen=True)
class Pause:
    """From an attempt's last tick to the next one's first, in seconds of the run; 0 long where an epoch begins, too."""

    start: float
    end: float
    attempt: int


@dataclass(frozen=True)
class WriteRate:
    """Bytes that became durable in each bin of `width_s` seconds, epochs laid end to end."""

    width_s: int
    end_s: float
    bytes: Floats
    bytes_of_last_step: Floats
    pauses: tuple[Pause, ...]
    largest_second: float
    """Bytes of the fullest second, the last step's left out."""
    mean_second: float
    """Mean from the first to the last of these writes."""


def write_rate(ticks: Sequence[Tick]) -> WriteRate:
    """How evenly the run has written. Versions of its last step are told apart: the flush writes all that is left."""
    begins = _epoch_begins(ticks)
    last_step = max((tick.step for tick in ticks if tick.flush), default=None)
    found = [(begins[tick.epoch] + version.seconds, version) for tick in ticks for version in tick.durable]
    at = np.array([seconds for seconds, _ in found])
    sizes = np.array([version.bytes for _, version in found], float)
    is_last = np.array([version.step == last_step for _, version in found], bool)
    end = max([*at.tolist(), *(begins[tick.epoch] + tick.seconds for tick in ticks)], default=0.0)
    width = next((width for width in _NICE_SECONDS if end / width <= MAX_BINS), math.ceil(end / MAX_BINS))
    bins = np.arange(int(end // width) + 2) * float(width)
    seconds, place = np.unique(np.floor(at[~is_last]), return_inverse=True)
    of_second = np.bincount(place, weights=sizes[~is_last])
    return WriteRate(
        width_s=width,
        end_s=end,
        bytes=np.histogram(at, bins, weights=sizes)[0],
        bytes_of_last_step=np.histogram(at[is_last], bins, weights=sizes[is_last])[0],
        pauses=tuple(
            Pause(begins[before.epoch] + before.seconds, begins[after.epoch] + after.seconds, after.attempt)
            for before, after in pairwise(ticks)
            if before.attempt != after.attempt
        ),
        largest_second=float(of_second.max(initial=0)),
        mean_second=float(of_second.sum() / (seconds[-1] - seconds[0] + 1)) if seconds.size else 0.0,
    )


def _epoch_begins(ticks: Sequence[Tick]) -> dict[int, float]:
    """Second at which each epoch begins, when each follows the one before at once: no clock spans two of them."""
    begins: dict[int, float] = {}
    at = 0.0
    for epoch, group in groupby(ticks, key=lambda tick: tick.epoch):
        begins[epoch] = at
        at += max(max([tick.seconds, *(version.seconds for version in tick.durable)]) for tick in group)
    return begins
