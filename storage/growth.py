"""How a layer's sums grow with its age: what a run recorded at some ages, estimated at others.

AdamW's moves add up like a walk with a memory: for a few steps the squared drift grows nearly with the square of the
age, later nearly with the age itself, while the impact levels off, as the first moment forgets. So the growth is taken
as a power of the age in each octave of ages, the same for all layers; its exponents come from pairs of rows of the same
reference, one twice as old as the other. A value at another age is the recorded one nearest in age and time, times the
growth from its age to that one. At the age that was recorded it is the recorded value itself.
"""

import math

import numpy as np

from storage.messages import LayerSums
from storage.recording import Floats, Ints, Recording

OCTAVES = 20
FEWEST_PAIRS = 20
"""With fewer the exponent of an octave is as far from the usual one as that of the octave before."""
USUAL_DRIFT_SQ = (1.9, 1.8, 1.7, 1.6, 1.4, 1.3)
USUAL_IMPACT = (0.95, 0.75, 0.4, 0.3, 0.2, 0.2)
"""Exponents by octave, of AdamW with beta1 = 0.9 (see `docs/decisions.md`); the last stands for all that follow."""
NEAR_STEPS = 100.0
"""So many steps away in time count as much as a factor e in age."""
WINDOW_TICKS = 100
"""Farther away in time nothing is looked for."""

_DRIFT_SQ, _IMPACT = (LayerSums._fields.index(name) for name in ("drift_sq", "impact"))


class Growth:
    """Sums at any age."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        ages = recording.steps[:, None] - recording.references
        self.oldest = int(ages.max(initial=1))
        """Largest age that was recorded: beyond it values are extrapolated."""
        self._log_ages = np.log(np.maximum(ages, 1))
        self._columns = {
            column: (
                np.isfinite(recording.sums[:, :, column]) & (ages >= 1),
                _exponents(recording, ages, recording.sums[:, :, column], usual),
            )
            for column, usual in ((_DRIFT_SQ, USUAL_DRIFT_SQ), (_IMPACT, USUAL_IMPACT))
        }

    @property
    def has_impacts(self) -> bool:
        """Whether any impact was recorded: not where the optimizer keeps no `exp_avg`."""
        usable, _ = self._columns[_IMPACT]
        return bool(usable.any())

    def sums(self, index: int, references: Ints) -> Floats:
        """Sums at tick `index` if the references had been taken at these steps ([layers]): [layers, 3]."""
        sums: Floats = self._recording.sums[index].copy()
        ages = self._recording.steps[index] - references
        for column in self._columns:
            sums[:, column] = self._at(index, ages, column)
        return sums

    def impacts(self, index: int, references: Ints) -> Floats:
        """What the loss would lose at tick `index` by each layer's falling back to its reference: [layers]."""
        return self._at(index, self._recording.steps[index] - references, _IMPACT)

    def _at(self, index: int, ages: Ints, column: int) -> Floats:
        usable, exponents = self._columns[column]
        low, high = max(0, index - WINDOW_TICKS), index + WINDOW_TICKS + 1
        apart = np.abs(self._recording.steps[low:high] - self._recording.steps[index]) / NEAR_STEPS
        log_ages = np.log(np.maximum(ages, 1))
        distance = np.abs(self._log_ages[low:high] - log_ages) + apart[:, None]
        nearest = np.where(usable[low:high], distance, np.inf).argmin(axis=0)
        rows = low + nearest, np.arange(len(ages))
        growth = _log_growth(log_ages, exponents) - _log_growth(self._log_ages[rows], exponents)
        value = np.where(usable[rows], self._recording.sums[:, :, column][rows] * np.exp(growth), np.nan)
        return np.where(ages >= 1, value, 0.0)


def _exponents(recording: Recording, ages: Ints, values: Floats, usual: tuple[float, ...]) -> Floats:
    """Exponent of the growth in each octave of ages: [OCTAVES]."""
    young, old, pairs = np.zeros((3, OCTAVES))
    for row in range(values.shape[1]):
        seen = np.isfinite(values[:, row]) & (ages[:, row] >= 1)
        size = np.abs(values[seen, row]).mean() if seen.any() else 0.0  # so that every layer counts alike
        place = {
            (tick.attempt, int(recording.references[index, row]), int(ages[index, row])): index
            for index, tick in enumerate(recording.ticks)
            if seen[index] and size > 0
        }
        for (attempt, reference, age), index in place.items():
            later = place.get((attempt, reference, 2 * age))
            if later is not None:
                octave = min(OCTAVES, age.bit_length()) - 1
                young[octave] += values[index, row] / size
                old[octave] += values[later, row] / size
                pairs[octave] += 1
    exponents, beyond = np.array([*usual, *[usual[-1]] * (OCTAVES - len(usual))]), 0.0
    for octave in range(OCTAVES):
        expected = exponents[octave] + beyond
        if pairs[octave] >= FEWEST_PAIRS and min(young[octave], old[octave]) > 0:
            exponents[octave], beyond = np.log2(old[octave] / young[octave]), 0.0
            beyond = exponents[octave] - (expected - beyond)
        else:
            exponents[octave] = max(0.0, expected)
    return exponents


def _log_growth(log_ages: Floats, exponents: Floats) -> Floats:
    """Logarithm of the growth from age 1 on."""
    octaves = np.minimum(log_ages / math.log(2), OCTAVES - 1)
    whole = octaves.astype(np.int64)
    before = np.concatenate([[0.0], exponents.cumsum()])
    result: Floats = math.log(2) * (before[whole] + (octaves - whole) * exponents[whole])
    return result
