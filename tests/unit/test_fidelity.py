"""What the study of policies says a failure costs."""

import pytest

from benchmarks.fidelity_report import progress_lost


@pytest.mark.parametrize(
    ("restored_loss", "steps"),
    [
        (2.0, 0.0),  # as good as the run that fails
        (1.9, 0.0),  # better: nothing is lost
        (3.0, 10.0),
        (3.5, 15.0),
        (5.0, 20.0),  # worse than the base version
    ],
)
def test_progress_lost_is_where_the_failure_free_run_had_that_loss(restored_loss: float, steps: float) -> None:
    study = {"alone": {0: 4.0, 10: 3.0, 20: 2.0, 30: 1.0}}
    assert progress_lost(study, {"failure": 20, "restored_loss": restored_loss}) == pytest.approx(steps)


@pytest.mark.parametrize(("restored_loss", "steps"), [(2.1, 0.0), (2.0, 0.0), (3.0, 9.5)])
def test_where_the_held_out_loss_rises_the_state_that_failed_has_still_lost_nothing(
    restored_loss: float, steps: float
) -> None:
    study = {"alone": {0: 4.0, 10: 3.0, 20: 2.0, 30: 2.1, 40: 2.0}}
    assert progress_lost(study, {"failure": 30, "restored_loss": restored_loss}) == pytest.approx(steps, abs=0.1)
