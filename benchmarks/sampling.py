"""How far the sampled reference is from the exact one: drift and impact of each layer, a few steps after a snapshot."""

import statistics
import time
from typing import Any

import numpy as np

from benchmarks.piece import Mark, Outcome, Profile
from benchmarks.subject import Trained, group_of_one, job_spec, train
from storage.messages import LayerSums
from workers.delta import DeltaMeter
from workers.slices import cut

EXACT = 1.0
FRACTIONS = (1 / 32, 1 / 64, 1 / 128)
AGES = (1, 8)
STEPS = 3
SEEDS = 5


def run(profile: Profile) -> Outcome:
    """Train on from a reference, and measure it at each age with samples of each size, several times drawn."""
    with group_of_one():
        trained = train(job_spec(profile), STEPS)
        exact = _meter(trained, EXACT, 0)
        meters = {fraction: [_meter(trained, fraction, seed) for seed in range(SEEDS)] for fraction in FRACTIONS}
        found: list[dict[str, Any]] = []
        for age in range(1, max(AGES) + 1):
            trained.step()
            if age in AGES:
                true = _measured(exact)
                found += [
                    {"age": age, "fraction": fraction, **_errors(true, drawn)} for fraction, drawn in meters.items()
                ]
    marks = [
        Mark(
            f"sampled reference, 1/{1 / one['fraction']:.0f}, {one['age']} steps old",
            "",
            f"drift off by {one['drift_median']:.1%} (largest {one['drift_largest']:.1%}), "
            f"impact by {one['impact_median']:.1%}; measured in {one['ms']:.1f} ms",
            met=None,
        )
        for one in found
    ]
    return Outcome(marks, {"errors": found})


def _meter(trained: Trained, fraction: float, seed: int) -> DeltaMeter:
    slices = [cut(layer, trained.model, 0, 1) for layer in trained.layers]
    return DeltaMeter(trained.layers, slices, trained.model, trained.optimizer, fraction, seed)


def _measured(meter: DeltaMeter) -> np.ndarray[Any, Any]:
    """Drift and impact of each layer: [layers, 2]."""
    return np.array([(sums.drift, sums.impact) for sums in (LayerSums(*row) for row in meter.measure().tolist())])


def _errors(true: np.ndarray[Any, Any], drawn: list[DeltaMeter]) -> dict[str, float]:
    """Relative errors over all layers and samples, and the milliseconds that one measurement takes."""
    began = time.perf_counter()
    off = np.stack([np.abs(_measured(meter) / true - 1) for meter in drawn])
    ms = 1000 * (time.perf_counter() - began) / len(drawn)
    drift, impact = off[..., 0].ravel().tolist(), off[..., 1].ravel().tolist()
    return {
        "drift_median": statistics.median(drift),
        "drift_largest": max(drift),
        "impact_median": statistics.median(impact),
        "impact_largest": max(impact),
        "ms": ms,
    }
