"""How even writing is over time."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate


def largest_over_mean(events: Iterable[tuple[float, int]], window_s: float = 1.0) -> float:
    """Bytes of the fullest window over those of a mean one.

    `events`: (seconds, bytes) of each write, in any order; they span more than one window. The mean is over the time
    from the first to the last of them.
    """
    ordered = sorted(events)
    times = [at for at, _ in ordered]
    sums = [0, *accumulate(size for _, size in ordered)]
    fullest = max(sums[bisect_left(times, at + window_s)] - sums[i] for i, at in enumerate(times))
    return fullest / (sums[-1] * window_s / (times[-1] - times[0]))
