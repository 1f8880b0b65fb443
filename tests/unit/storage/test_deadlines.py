"""Deadlines: the sums by deadline say what adding the layers up one by one says."""

from hypothesis import given
from hypothesis import strategies as st

from storage.deadlines import Deadlines

SIZES = st.integers(1, 500)


def slack(ticks: list[int], sizes: list[float], tokens: float, refill: float) -> float:
    """The definition: for each deadline, what the bucket passes until then less what must be written until then."""
    beat = min(sizes) if min(sizes) <= refill else 0.0
    left = []
    for due in ticks:
        large = sum(size for size, tick in zip(sizes, ticks, strict=True) if tick <= due and size > refill)
        small = sum(size for size, tick in zip(sizes, ticks, strict=True) if tick <= due and size <= refill)
        left.append(tokens + refill * due - large - max(small, beat * due))
    return min(left)


@given(
    layers=st.lists(st.tuples(st.integers(-3, 12), SIZES), min_size=1, max_size=12),
    refreshed=st.integers(0, 15),
    refill=st.integers(0, 300),
    tokens=st.integers(-500, 2000),
    data=st.data(),
)
def test_sums_by_deadline_are_those_of_the_layers(layers, refreshed, refill, tokens, data) -> None:
    ticks, sizes = [max(0, tick) for tick, _ in layers], [float(size) for _, size in layers]
    deadlines = Deadlines([tick for tick, _ in layers], sizes, refreshed, float(refill))
    assert deadlines.slack(tokens) == slack(ticks, sizes, tokens, refill)
    assert deadlines.slack(tokens, ticks_later=1) == slack([max(0, tick - 1) for tick in ticks], sizes, tokens, refill)
    index = data.draw(st.integers(0, len(layers) - 1))
    after = [refreshed if place == index else tick for place, tick in enumerate(ticks)]
    expected = slack(after, sizes, tokens - sizes[index], refill)
    assert deadlines.slack_after(index, tokens) == expected
    assert deadlines.slack(tokens) == slack(ticks, sizes, tokens, refill), "asking has changed something"
    deadlines.refresh(index)
    assert deadlines.slack(tokens - sizes[index]) == expected


def test_without_layers_everything_may_be_spent() -> None:
    assert Deadlines([], [], 3, 10.0).slack(5.0) == float("inf")
