"""The journal: counters and stories that outlive an attempt, an epoch and the process."""

import numpy as np
import pytest

from storage.journal import KEPT_INCIDENTS, Journal
from storage.messages import Comeback, Report
from storage.records import Progress, Record, Recovery, Totals
from tests.helpers.records import record, ref


def report(step: int, **changes) -> Report:
    return Report(attempt=1, step=step, sums=np.zeros((0, 3)), **changes)


def recovery(attempt: int = 2) -> Recovery:
    return Recovery(attempt=attempt, cause="died", restore_point=3, steps_lost=1, max_age=2, mean_age=1.0)


def test_it_goes_on_from_a_record() -> None:
    newest = record(
        {"a": ref("a", 3)},
        totals=Totals(ticks=3, bytes_written=70, attempts=2),
        progress=Progress(step=4, loss=1.5, eval_losses=((2, 9.0),)),
        recoveries=(recovery(),),
    )
    journal = Journal(newest)
    journal.report(report(5, loss=1.0, tokens=10, ticks=1))
    journal.wrote(30)
    assert (journal.totals.ticks, journal.totals.bytes_written, journal.totals.attempts) == (4, 100, 2)
    assert (journal.progress.step, journal.progress.loss, journal.progress.eval_losses) == (5, 1.0, ((2, 9.0),))
    assert len(journal.recoveries) == 1


def test_a_held_out_loss_that_is_not_finite_leaves_the_record_readable() -> None:
    journal = Journal(None)
    journal.report(report(2, loss=float("inf"), eval_losses=((1, float("nan")), (2, 3.0))))
    stored = record({"a": ref("a", 2)}, progress=journal.progress)
    read = Record.from_bytes("key", stored.to_bytes())
    assert (read.progress.loss, read.progress.eval_losses) == (None, ((1, None), (2, 3.0)))


def test_ticks_that_fell_between_two_reports_are_told_by_the_second() -> None:
    """The actor was slow to answer: nothing of what happened meanwhile may be lost."""
    journal = Journal(None)
    journal.report(report(1, ticks=1, eval_losses=((1, 4.0),)))
    journal.report(report(4, ticks=4, tokens=30, eval_losses=((2, 3.0), (4, 2.0))))
    journal.report(report(4, ticks=4, tokens=30, hold=True))
    assert journal.totals.ticks == 4
    assert journal.progress.eval_losses == ((1, 4.0), (2, 3.0), (4, 2.0))


def test_a_report_that_is_told_again_to_a_restarted_actor_counts_once() -> None:
    """The actor died after it had committed what a report told, or before: the ranks cannot know which."""
    for told_before in (True, False):
        before = Journal(None)
        before.attempt_began(0, None)
        before.report(report(1, ticks=1, tokens=10))
        if told_before:
            before.report(report(2, ticks=2, tokens=20, eval_losses=((2, 3.0),)))
        stored = record({"a": ref("a", 1)}, totals=before.totals, progress=before.progress)
        journal = Journal(stored)
        journal.report(report(3, ticks=3, tokens=30, eval_losses=((2, 3.0),)))
        assert journal.totals.ticks == 3
        assert journal.progress.eval_losses == ((2, 3.0),)
        assert journal.tokens_per_s() == 0  # which of them are new is not known
        journal.report(report(4, ticks=4, tokens=40))
        assert journal.tokens_per_s() == 10


def test_an_attempt_counts_its_ticks_from_nought_and_goes_on_from_its_restore_point() -> None:
    journal = Journal(None)
    journal.attempt_began(0, None)
    journal.report(report(5, ticks=5))
    journal.reached(7)  # between two ticks
    assert journal.progress.step == 7
    journal.attempt_began(4, recovery())
    assert journal.progress.step == 4, "another failure before the next step would lose the same steps once more"
    journal.report(report(5, ticks=1))
    assert journal.totals.ticks == 6


def test_a_fall_back_to_an_older_restore_point_loses_more_steps() -> None:
    journal = Journal(None)
    journal.attempt_began(3, recovery())  # restore point 3, 1 step lost
    journal.fell_back(1, [0, 4])
    told = journal.recoveries[-1]
    assert (told.restore_point, told.steps_lost, told.max_age, told.mean_age) == (1, 3, 4, 2.0)
    assert journal.progress.step == 1


def test_steps_redone_replace_their_held_out_losses() -> None:
    journal = Journal(None)
    for step, loss in ((2, 3.0), (4, 2.0), (4, 2.5)):
        journal.report(report(step, eval_losses=((step, loss),)))
    assert journal.progress.eval_losses == ((2, 3.0), (4, 2.5))
    journal.report(report(2, eval_losses=((2, 3.1),)))  # after a recovery from before step 2
    assert journal.progress.eval_losses == ((2, 3.1),)


def test_a_loss_that_a_report_lacks_is_remembered() -> None:
    journal = Journal(None)
    journal.report(report(1, loss=2.0))
    journal.report(report(1, hold=True))
    assert journal.progress.loss == 2.0


def test_a_recovery_takes_until_the_first_step_after_it() -> None:
    journal = Journal(None)
    journal.report(report(4))
    journal.attempt_began(0, None)
    journal.failed()
    journal.attempt_began(3, recovery())
    assert journal.recoveries[-1].seconds is None
    laps = dict.fromkeys(("load_model", "plan", "read", "broadcast", "first_step"), 0.0) | {"imports": 1e6}
    journal.report(report(4, comeback=Comeback(laps=laps, ago_s=0.0)))
    assert journal.recoveries[-1].phases is not None
    assert journal.recoveries[-1].phases.total == pytest.approx(journal.recoveries[-1].seconds)
    assert journal.recoveries[-1].seconds < 60
    assert journal.recoveries[-1].seconds is not None
    seconds = journal.recoveries[-1].seconds
    journal.report(report(5))
    assert journal.recoveries[-1].seconds == seconds
    assert journal.totals.attempts == 2


def test_attempts_without_a_commit_are_counted_until_one() -> None:
    journal = Journal(None)
    journal.attempt_began(0, None)
    journal.attempt_began(3, recovery())
    assert journal.totals.attempts_without_commit == 2
    journal.progressed()
    assert (journal.totals.attempts_without_commit, journal.totals.attempts) == (0, 2)


def test_incidents_are_noted_once_and_bounded() -> None:
    journal = Journal(None)
    for _ in range(3):
        journal.incident("store", "503")
    assert [(i.kind, i.what, i.step) for i in journal.incidents] == [("store", "503", 0)]
    for number in range(KEPT_INCIDENTS + 50):
        journal.incident("store", str(number))
    assert len(journal.incidents) == KEPT_INCIDENTS
    assert journal.incidents[-1].what == str(KEPT_INCIDENTS + 49)


def test_timings_of_ticks_and_steps() -> None:
    journal = Journal(None)
    assert journal.snapshot().tick_seconds_median is None
    for step in range(1, 101):
        journal.report(report(step, tick_seconds=step / 1000, step_seconds=1.0))
    progress = journal.snapshot()
    assert progress.tick_seconds_median == pytest.approx(0.0505)
    assert progress.tick_seconds_p99 == pytest.approx(0.1)
    assert progress.step_seconds_median == 1.0


def test_rates() -> None:
    journal = Journal(None)
    assert (journal.tokens_per_s(), journal.bytes_per_s()) == (0.0, 0.0)
    journal.report(report(1, tokens=500))
    journal.wrote(2000)
    assert (journal.tokens_per_s(), journal.bytes_per_s()) == (500.0, 2000.0)
