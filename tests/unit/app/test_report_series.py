"""What the report's figures show, from ticks made up by hand."""

import math
from typing import Any

import numpy as np
import pytest

from app.report.series import MAX_BINS, Bins, layer_ages, loss_curves, loss_difference, stored_versions, write_rate
from storage.history import Durable, Tick


def tick(step: int, *, attempt: int = 1, epoch: int = 1, **more: Any) -> Tick:
    return Tick(epoch=epoch, attempt=attempt, step=step, **{"seconds": float(step), "sums": {}, **more})


def durable(layer: str, step: int, size: int = 10, seconds: float = 0.0) -> Durable:
    return Durable(layer, step, size, seconds)


@pytest.mark.parametrize(
    ("steps", "last", "width", "count"),
    [
        ((), 0, 1, 1),
        ((1, 2, 3), 60, 1, 60),
        ((5, 10, 15), 61, 5, 13),  # no bin between two ticks
        ((1, 2), 2000, 7, 286),
        ((8, 9, 8, 9), 300, 1, 300),  # falling back is no distance
        ((1,), 2**62, -(-(2**62) // MAX_BINS), MAX_BINS),
    ],
)
def test_bins(steps: tuple[int, ...], last: int, width: int, count: int) -> None:
    bins = Bins.of([tick(step) for step in steps], last)
    assert (bins.width, len(bins)) == (width, count)
    assert bins.index([1, max(last, 1)]).tolist() == [0, count - 1]


def test_each_attempt_has_its_own_losses() -> None:
    ticks = [tick(1, loss=3.0), tick(2, loss=2.0), tick(2, attempt=2, loss=1.0), tick(3, attempt=2, loss=None)]
    first, second = loss_curves(ticks, Bins.of(ticks, 3))
    assert (first.steps.tolist(), first.mean.tolist()) == ([1, 2], [3.0, 2.0])
    assert (second.steps.tolist(), second.mean.tolist()) == ([2], [1.0])


def test_a_bin_of_losses_tells_mean_least_and_greatest() -> None:
    losses = [4.0, 2.0, math.nan, 1.0, math.inf]
    ticks = [tick(step, loss=loss) for step, loss in enumerate(losses, 1)]
    (curve,) = loss_curves(ticks, Bins(5, width=2))
    assert curve.steps.tolist() == [1.5, 3.5]
    assert (curve.low.tolist(), curve.mean.tolist(), curve.high.tolist()) == ([2, 1], [3, 1], [4, 1])


def test_the_difference_is_of_what_was_trained_last_at_the_same_step() -> None:
    ticks = [tick(1, loss=3.0), tick(2, loss=9.0), tick(2, attempt=2, loss=2.2), tick(4, attempt=2, loss=1.0)]
    others = [tick(1, loss=3.0), tick(2, loss=2.0), tick(3, loss=1.0)]
    difference = loss_difference(ticks, others, Bins.of(ticks, 4))
    assert difference.steps.tolist() == [1, 2]
    assert difference.mean.tolist() == pytest.approx([0.0, 10.0])
    assert loss_difference(ticks, [], Bins.of(ticks, 4)).steps.size == 0


def test_stored_versions_by_layer_and_step() -> None:
    ticks = [
        tick(3, durable=(durable("a", 1), durable("b", 1, 20), durable("frozen", 1))),
        tick(4, durable=(durable("a", 2), durable("a", 4))),
    ]
    stored = stored_versions(ticks, ["a", "b"], Bins(4, width=2))
    assert stored.versions.tolist() == [[2, 1], [1, 0]]
    assert stored.bytes.tolist() == [30, 20]


def ages_by_step(ticks: list[Tick], layers: list[str]) -> list[list[float]]:
    return layer_ages(ticks, layers, Bins.of(ticks, max(tick.step for tick in ticks))).binned.T.tolist()


def test_a_layer_ages_from_its_newest_durable_version_that_the_restore_point_reaches() -> None:
    ticks = [
        tick(1),
        tick(2, restore_point=0, durable=(durable("a", 1),)),  # not committed yet
        tick(3, restore_point=1),
        tick(4, restore_point=3, durable=(durable("b", 3),)),
        tick(5, restore_point=4, durable=(durable("b", 4), durable("a", 5))),
    ]
    assert ages_by_step(ticks, ["a", "b"]) == [[0, 0], [0, 0], [0, 1], [2, 0], [3, 0]]


def test_versions_of_a_dead_group_beyond_the_restore_point_never_count() -> None:
    ticks = [
        tick(1, restore_point=0),
        tick(2, restore_point=1, durable=(durable("a", 1), durable("a", 2))),  # 2 was never committed
        tick(2, attempt=2, restore_point=1),
        tick(3, attempt=2, restore_point=3, durable=(durable("b", 3),)),
    ]
    assert ages_by_step(ticks, ["a", "b"])[-1] == [2, 0]


def test_after_a_fallback_the_version_before_counts() -> None:
    ticks = [
        tick(4, restore_point=4, durable=(durable("a", 2), durable("a", 4), durable("b", 1))),
        tick(4, attempt=2, restore_point=3),  # the version of step 4 could not be read
        tick(5, attempt=2, restore_point=3),
    ]
    assert ages_by_step(ticks, ["a", "b"])[3:] == [[1, 2], [1, 2]]


def test_where_no_tick_is_known_there_is_no_age() -> None:
    assert np.isnan(ages_by_step([tick(1), tick(2), tick(5)], ["a"])).ravel().tolist() == [0, 0, 1, 1, 0]


def test_ages_of_all_layers_together() -> None:
    ticks = [tick(2, restore_point=2, durable=(durable("a", 2),)), tick(4, restore_point=2)]
    ages = layer_ages(ticks, ["a", "b"], Bins.of(ticks, 4))
    assert ages.mean.mean.tolist() == [1, 1]
    assert ages.greatest.high.tolist() == [2, 2]
    assert ages.lag.high.tolist() == [0, 2]
    assert (ages.mean_of_layer.tolist(), ages.greatest_of_layer.tolist()) == ([0, 2], [0, 2])
    assert layer_ages([], ["a"], Bins.of([], 1)).greatest_of_layer.tolist() == [0]


def test_write_rate_counts_in_seconds_and_keeps_the_flush_apart() -> None:
    ticks = [
        tick(1, seconds=1.0, durable=(durable("a", 1, 10, 0.5),)),
        tick(2, seconds=4.5, durable=(durable("a", 1, 30, 2.2), durable("b", 1, 50, 2.9))),
        tick(3, seconds=5.0, flush=True, durable=(durable("a", 3, 700, 4.9),)),
    ]
    rate = write_rate(ticks)
    assert (rate.width_s, rate.end_s) == (1, 5.0)
    assert rate.bytes.tolist() == [10, 0, 80, 0, 700, 0]
    assert rate.bytes_of_last_step.tolist() == [0, 0, 0, 0, 700, 0]
    assert (rate.largest_second, rate.mean_second) == (80, 30)
    assert rate.pauses == ()


def test_epochs_lie_end_to_end_and_a_new_attempt_ends_a_pause() -> None:
    ticks = [
        tick(1, seconds=10.0),
        tick(2, seconds=11.0, attempt=2),
        tick(3, epoch=2, seconds=2.0, attempt=2, durable=(durable("a", 2, 5, 1.0),)),
        tick(3, epoch=2, seconds=9.0, attempt=3),
    ]
    rate = write_rate(ticks)
    assert [(pause.start, pause.end, pause.attempt) for pause in rate.pauses] == [(10, 11, 2), (13, 20, 3)]
    assert np.flatnonzero(rate.bytes).tolist() == [12]


@pytest.mark.parametrize("seconds", [0.0, 3 * 86400.0, 1e300])
def test_a_run_of_any_length_fits(seconds: float) -> None:
    rate = write_rate([tick(1, seconds=seconds, durable=(durable("a", 1, 5, seconds),))])
    assert len(rate.bytes) <= MAX_BINS + 2
    assert rate.bytes.sum() == 5


def test_nothing_recorded_is_nothing_written() -> None:
    rate = write_rate([])
    assert (rate.bytes.sum(), rate.largest_second, rate.mean_second) == (0, 0, 0)
