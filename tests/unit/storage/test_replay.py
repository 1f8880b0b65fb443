"""What-if: a replay of a run's own settings is the run itself; of other settings, what they would have made of it.

Runs are simulated: the real decision, pacer and ledger over weights that move as under AdamW, so that what other
settings would have done, and what the sums would have been at any age, is known.
"""

from dataclasses import replace

import numpy as np
import pytest

from storage.growth import FEWEST_PAIRS, Growth
from storage.options import CheckpointOptions
from storage.outlook import Outlook, outlook
from storage.recording import Recording
from storage.records import LayerFacts
from storage.replay import Replay, UploadCosts
from tests.helpers.simulated_run import SimulatedRun, moving_weights

STEPS = 160
FACTS = (LayerFacts(name="embedding", bytes=4000), *(LayerFacts(name=f"block.{i}", bytes=500) for i in range(9)))
TRUTH = moving_weights(len(FACTS), STEPS)


def options(**changes) -> CheckpointOptions:
    return CheckpointOptions.model_validate(
        {"write_budget": "1/5", "criterion": "impact", "staleness_bound_steps": 40, "max_lag": 10} | changes
    )


def simulated(of: CheckpointOptions, **changes) -> SimulatedRun:
    return SimulatedRun(TRUTH, FACTS, of, STEPS, **changes)


def predicted(run: SimulatedRun, of: CheckpointOptions) -> Outlook:
    recording = Recording.of(run.ticks)
    growth = Growth(recording)
    standings = Replay(recording, growth, FACTS, of, UploadCosts(recording, FACTS, None), 1.0).run()
    return outlook(recording, growth, standings, FACTS)


def recorded(run: SimulatedRun) -> Outlook:
    recording = Recording.of(run.ticks)
    return outlook(recording, Growth(recording), recording.standings(), FACTS)


def true_impact(run: SimulatedRun) -> float:
    """Mean over the ticks of what the layers' staleness costs, by the weights themselves."""
    recording = Recording.of(run.ticks)
    found = [
        TRUTH(tick.restore_point, np.maximum(recording.versions[index], recording.starts[index]))[:, 2].sum()
        for index, tick in enumerate(run.ticks)
        if not tick.flush
    ]
    return float(np.mean(found))


@pytest.mark.parametrize(
    ("criterion", "threshold", "killed_at"),
    [("impact", None, None), ("impact", 0.01, 87), ("drift", None, 87), ("oldest", 0.01, None)],
)
def test_its_own_settings_make_its_own_decisions(
    criterion: str, killed_at: int | None, threshold: float | None
) -> None:
    own = options(criterion=criterion, threshold=threshold)
    run = simulated(own, killed_at=killed_at)
    before, after = recorded(run), predicted(run, own)
    assert after.bytes_written == run.bytes_written == before.bytes_written
    assert (after.ticks, after.max_age, after.max_lag) == (before.ticks, before.max_age, before.max_lag)
    assert after.mean_age == pytest.approx(before.mean_age, rel=0.02)
    assert after.mean_impact == pytest.approx(before.mean_impact, rel=0.02)
    assert before.mean_impact == pytest.approx(true_impact(run), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "killed_at", "bytes_off", "age_off", "impact_off"),
    [
        ({"write_budget": "1/20", "staleness_bound_steps": 60}, 87, 0.02, 0.1, 0.25),
        ({"write_budget": "1/10", "criterion": "oldest"}, 87, 0.02, 0.1, 0.1),
        ({"criterion": "drift"}, None, 0.02, 0.1, 0.1),
        ({"write_budget": "1/2"}, None, 0.05, 0.1, 0.1),
        ({"threshold": 0.01, "staleness_bound_steps": 60}, None, 0.15, 0.15, 0.25),  # beyond the ages recorded
    ],
)
def test_other_settings_are_predicted(
    changes: dict, killed_at: int | None, bytes_off: float, age_off: float, impact_off: float
) -> None:
    run = simulated(options(), killed_at=killed_at)
    told = predicted(run, options(**changes))
    happened = simulated(options(**changes), killed_at=killed_at, seed=9)
    real = recorded(happened)
    assert told.bytes_written == pytest.approx(real.bytes_written, rel=bytes_off)
    assert told.mean_age == pytest.approx(real.mean_age, rel=age_off)
    assert told.mean_impact == pytest.approx(true_impact(happened), rel=impact_off)
    assert told.max_age <= options(**changes).staleness_bound_steps
    assert (told.extrapolated > 0.05) == ("staleness_bound_steps" in changes)


def test_a_recorded_age_gives_the_recorded_sums() -> None:
    recording = Recording.of(simulated(options()).ticks)
    growth = Growth(recording)
    for index in (5, 60, 120):
        np.testing.assert_array_equal(growth.sums(index, recording.references[index]), recording.sums[index])


def test_sums_at_other_ages_are_near_what_they_would_be() -> None:
    recording = Recording.of(simulated(options()).ticks)
    growth = Growth(recording)
    off = []
    for index in range(60, 150, 7):
        for age in (2, 5, 10, 20):
            references = np.full(len(FACTS), recording.steps[index] - age)
            told, true = growth.sums(index, references), TRUTH(int(recording.steps[index]), references)
            off.append(np.abs(told / true - 1)[:, [0, 2]])
    assert np.median(off) < 0.15
    assert np.quantile(off, 0.9) < 0.5


def test_a_reference_just_taken_has_not_moved() -> None:
    recording = Recording.of(simulated(options()).ticks)
    sums = Growth(recording).sums(9, np.full(len(FACTS), recording.steps[9]))
    assert not sums[:, [0, 2]].any()
    assert sums[:, 1].all()


def test_an_optimizer_without_a_first_moment_has_no_impact_here_either() -> None:
    def truth(step, references):
        sums = TRUTH(step, references)
        sums[:, 2] = np.nan
        return sums

    own = options(criterion="drift")
    run = SimulatedRun(truth, FACTS, own, 60)
    told = predicted(run, own)
    assert told.bytes_written == run.bytes_written
    assert (told.mean_impact, told.max_impact) == (None, None)


def test_a_run_too_short_to_tell_grows_as_usual() -> None:
    run = simulated(options())
    few, many = (Growth(Recording.of(run.ticks[:count])) for count in (4, 120))
    assert FEWEST_PAIRS > 4
    references = np.zeros(len(FACTS), np.int64)
    assert np.isfinite(few.sums(3, references)).all()
    assert many.oldest > few.oldest


def test_an_actor_that_is_restarted_begins_with_an_empty_bucket() -> None:
    """Its successor records under another epoch, whose clock begins anew."""
    run = simulated(options())
    first, second = run.ticks[:100], run.ticks[100:]
    late = [
        replace(
            tick,
            epoch=2,
            seconds=tick.seconds - 100,
            durable=tuple(replace(version, seconds=max(0.0, version.seconds - 100)) for version in tick.durable),
        )
        for tick in second
    ]
    recording = Recording.of([*first, *late])
    assert (np.diff(recording.seconds) >= 0).all()
    own = predicted(run, options()).bytes_written
    growth = Growth(recording)
    replayed = Replay(recording, growth, FACTS, options(), UploadCosts(recording, FACTS, None), 1.0).run()
    assert replayed.bytes_written == pytest.approx(own, rel=0.05)
    assert replayed.bytes_written != own
