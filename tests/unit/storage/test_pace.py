"""Windows of a ShardWriter's shards: one after the other, over before more comes, and gone when somebody waits."""

import random
from dataclasses import replace

import pytest

from benchmarks.evenness import largest_over_mean
from storage.messages import Order
from storage.pace import Pace


class Clock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_windows_follow_one_another() -> None:
    clock = Clock()
    pace = Pace(clock)
    first, second = pace.window(7, 2.0), pace.window(7, 1.0)
    assert [first.left_s(share) for share in (0.0, 0.5, 1.0)] == [0.0, 1.0, 2.0]
    assert [second.left_s(share) for share in (0.0, 0.5, 1.0)] == [2.0, 2.5, 3.0]
    clock.now += 2.25
    assert [second.left_s(share) for share in (0.0, 0.5, 1.0)] == [0.0, 0.25, 0.75]
    clock.now += 5.0
    assert pace.window(7, 1.0).left_s(0.0) == 0.0, "a window does not begin in the past"


@pytest.mark.parametrize(("after_s", "left_s"), [(2.0, 0.0), (2.9, 0.0), (3.1, 2.9), (7.0, 0.0)])
def test_what_is_late_when_more_comes_waits_no_longer(after_s: float, left_s: float) -> None:
    clock = Clock()
    pace = Pace(clock)
    earlier = [pace.window(7, 2.0) for _ in range(3)]
    clock.now += after_s
    newest = pace.window(8, 1.0)
    assert earlier[-1].left_s(1.0) == pytest.approx(left_s)
    assert newest.left_s(0.0) == pytest.approx(left_s), "one after the other"
    assert pace.window(8, 1.0).left_s(0.0) == pytest.approx(left_s + 1.0)


def test_windows_that_are_always_too_long_never_pile_up() -> None:
    clock = Clock()
    pace = Pace(clock)
    for step in range(100):
        window = pace.window(step, 3.0)
        assert window.left_s(1.0) <= 3.0 * 1.5
        clock.now += 1.0


def test_what_must_not_wait_takes_the_rest_of_its_step_along() -> None:
    pace = Pace(Clock())
    waiting = pace.window(7, 2.0)
    assert pace.window(7, None).left_s(1.0) == 0.0
    assert waiting.left_s(1.0) == 0.0


def test_hurry_ends_a_wait_at_once() -> None:
    pace = Pace()
    window = pace.window(7, 3600.0)
    pace.hurry()
    window.wait(1.0)
    assert pace.window(7, 3600.0).left_s(1.0) > 3000.0, "what comes later waits again"


@pytest.mark.parametrize(("jitter", "largest"), [(0.0, 1.25), (0.3, 1.35)])
def test_writes_are_even_over_ticks_of_seconds(jitter: float, largest: float) -> None:
    """Two ranks hand over one or two layers a tick, in batches; ticks come a little early or late.

    Written as it comes, the same bytes are 3 times the mean.
    """
    clock, chance, batches = Clock(), random.Random(3), 8
    pace, tick_s, tick_bytes = Pace(clock), 3.0, 60_000
    paced, unpaced = [], []
    for step in range(200):
        layers = 1 + step % 2
        shards = [(pace.window(step, 0.9 * tick_s / layers / 2), tick_bytes // layers // 2) for _ in range(2 * layers)]
        for window, size in shards:
            assert not window.hurried.is_set()
            paced += [(clock.now + window.left_s(batch / batches), size // batches) for batch in range(batches)]
            unpaced.append((clock.now, size))
        clock.now += tick_s * chance.uniform(1 - jitter, 1 + jitter)
    assert largest_over_mean(unpaced, 1.0) > 2.5
    assert 1.0 <= largest_over_mean(paced, 1.0) < largest


def test_the_shards_of_a_node_share_its_time_by_their_bytes() -> None:
    order = Order(decision=1, epoch=1, attempt=1, layers=("a", "b"), spread_s=3.0)
    node_bytes = {"a": 100, "b": 200, "c": 1000}
    assert [order.spread_of(size, node_bytes) for size in (40, 60, 200)] == [0.4, 0.6, 2.0]
    assert replace(order, spread_s=None).spread_of(40, node_bytes) is None
    assert order.spread_of(0, dict.fromkeys("ab", 0)) == 0.0
