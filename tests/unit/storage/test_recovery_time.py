"""Seconds of a recovery by phase: from two stations on the actor's clock, and rank 0's laps."""

import pytest

from storage.messages import Comeback
from storage.records import Phases
from storage.recovery_time import RecoveryTime

LAPS = {"imports": 4.0, "load_model": 2.0, "plan": 0.25, "read": 0.5, "broadcast": 0.125, "first_step": 1.0}


def _comeback(**changes: float) -> Comeback:
    return Comeback(laps={**LAPS, **changes}, ago_s=0.5)


def _after_a_death() -> RecoveryTime:
    """Last report at 100, news of the failure at 101, the plan is asked for at 108."""
    time = RecoveryTime(90.0)
    time.heard(100.0)
    time.failed(101.0)
    time.attempt_began(108.0)
    return time


def test_what_rank_0_does_not_explain_is_the_restart() -> None:
    took = _after_a_death().first_report(111.0, _comeback())
    assert took == (10.5, Phases(detect=1.0, restart=1.625, **LAPS))
    assert took[1].total == took[0]


def test_a_process_that_ray_had_at_hand_is_older_than_the_failure() -> None:
    took = _after_a_death().first_report(111.0, _comeback(imports=4000.0))
    assert took == (10.5, Phases(detect=1.0, restart=0.0, **LAPS | {"imports": 5.625}))


def test_laps_longer_than_the_actor_saw_count_as_they_are() -> None:
    """The news of the failure came late: it waited for an actor that was being restarted."""
    seconds, phases = _after_a_death().first_report(104.0, _comeback())
    assert (phases.restart, phases.imports, phases.first_step) == (0.0, 0.0, 1.0)
    assert phases.total == seconds


def test_each_recovery_is_timed_once() -> None:
    time = _after_a_death()
    assert time.first_report(111.0, None) == (11.0, None)
    assert time.first_report(112.0, _comeback()) is None


def test_groups_that_fail_before_their_attempt_belong_to_the_first_failure() -> None:
    time = RecoveryTime(90.0)
    time.heard(100.0)
    time.failed(101.0)
    time.failed(120.0)
    time.attempt_began(130.0)
    assert time.first_report(131.0, None) == (31.0, None)


def test_a_group_that_fails_as_it_restores_begins_a_recovery_of_its_own() -> None:
    time = _after_a_death()
    time.failed(109.0)
    time.attempt_began(115.0)
    assert time.first_report(117.0, None) == (9.0, None)


@pytest.mark.parametrize("laps", [LAPS, LAPS | {"imports": 2.0}])
def test_a_job_submitted_again_has_nothing_to_detect(laps: dict[str, float]) -> None:
    time = RecoveryTime(50.0)  # the new driver's CheckpointActor
    time.attempt_began(57.0)
    seconds, phases = time.first_report(60.5, Comeback(laps=laps, ago_s=0.5))
    assert (phases.detect, seconds, phases.total) == (0.0, 10.0, 10.0)
