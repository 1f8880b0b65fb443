"""Deadlines: whether what the bucket will pass is enough for every layer to be written in time."""

from collections.abc import Sequence

import numpy as np


class Deadlines:
    """Bytes to be written, by the ticks that are left for it. Layers of one deadline are kept as sums.

    A question costs as many operations as there are different deadlines, whatever the number of layers.
    """

    def __init__(self, ticks_left: Sequence[int], sizes: Sequence[float], refreshed: int, refill: float) -> None:
        """One entry of `ticks_left` and `sizes` (bytes) a layer; a layer written now has `refreshed` ticks left.

        `refill` is what the bucket gets at each tick, in bytes.
        """
        ticks = np.maximum(0, np.asarray(ticks_left, dtype=np.int64))
        self._sizes = np.asarray(sizes, dtype=np.float64)
        self._refill = refill
        smallest = float(self._sizes.min(initial=np.inf))
        self._heartbeat = smallest if smallest <= refill else 0.0
        self._ticks, places = np.unique([*ticks, max(0, refreshed)], return_inverse=True)
        *self._place, self._refreshed = places.tolist()
        # Layers larger than a tick's refill are saved for while one small layer a tick goes on being written, so these
        # compete with them for the bucket.
        self._is_large = self._sizes > refill
        self._large, self._small, self._layers = (np.zeros(len(self._ticks)) for _ in range(3))
        for index, place in enumerate(self._place):
            self._add(index, place)

    def refresh(self, index: int) -> None:
        """Layer `index` is written now."""
        self._add(index, self._place[index], -1)
        self._place[index] = self._refreshed
        self._add(index, self._refreshed)

    def slack(self, tokens: float, *, ticks_later: int = 0) -> float:
        """Bytes that may be spent, out of `tokens`, with every deadline still met; negative when one is out of reach.

        With `ticks_later`: as many ticks from now, if nothing is written before.
        """
        ticks = np.maximum(0, self._ticks - ticks_later) if ticks_later else self._ticks
        need = self._large.cumsum() + np.maximum(self._small.cumsum(), self._heartbeat * ticks)
        left = tokens + self._refill * ticks - need
        return float(left[self._layers > 0].min(initial=np.inf))

    def slack_after(self, index: int, tokens: float) -> float:
        """`slack` once layer `index` is written."""
        place = self._place[index]
        self.refresh(index)
        slack = self.slack(tokens - self._sizes[index])
        self._add(index, self._refreshed, -1)
        self._place[index] = place
        self._add(index, place)
        return slack

    def _add(self, index: int, place: int, times: int = 1) -> None:
        sums = self._large if self._is_large[index] else self._small
        sums[place] += times * self._sizes[index]
        self._layers[place] += times
