"""Outlook: what a run writes, and what a failure at each of its ticks would find and cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage.growth import Growth
from storage.recording import Recording, Standings
from storage.records import LayerFacts


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Bytes of the whole run; ages in steps and impacts in units of the loss, over the ticks before its final flush."""

    ticks: int
    bytes_written: int
    reduction: float | None
    """Times fewer bytes than a full checkpoint at every tick; None: nothing was written."""
    mean_age: float
    max_age: int
    mean_lag: float
    """Steps that a failure would have to redo."""
    max_lag: int
    mean_impact: float | None
    """What the loss would lose, to first order, by restoring layers older than the restore point: the sum over layers
    of their impact at the age they have. None: the optimizer keeps no `exp_avg`."""
    max_impact: float | None
    extrapolated: float
    """Share of the layers' ages, over the ticks, that are larger than any that the run has recorded."""


def outlook(recording: Recording, growth: Growth, standings: Standings, facts: Sequence[LayerFacts]) -> Outlook:
    """Sum up `standings` over the ticks before the final flush; `facts` of the trained layers.

    A tick counts once, however long training stood still there.
    """
    last_seen: dict[int, int] = {}
    impacts, ages, lags = [], [], []
    full_bytes = sum(fact.bytes for fact in facts)
    for place, index in enumerate(standings.indices):
        tick = recording.ticks[index]
        last_seen[tick.step] = int(index)
        if tick.held or tick.flush:
            continue
        point, versions = int(standings.restore_points[place]), standings.versions[place]
        at = last_seen.get(point)
        left_at = np.maximum(versions, standings.starts[place])
        impacts.append(float(growth.impacts(at, left_at).sum()) if at is not None else 0.0)
        ages.append(point - versions)
        lags.append(tick.step - point)
    finite = [impact for impact in impacts if math.isfinite(impact)] if growth.has_impacts else []
    written = standings.bytes_written
    return Outlook(
        ticks=len(ages),
        bytes_written=written,
        reduction=len(ages) * full_bytes / written if written else None,
        mean_age=float(np.mean(ages)),
        max_age=int(np.max(ages)),
        mean_lag=float(np.mean(lags)),
        max_lag=int(np.max(lags)),
        mean_impact=float(np.mean(finite)) if finite else None,
        max_impact=max(finite, default=None),
        extrapolated=float(np.mean(np.array(ages) > growth.oldest)),
    )
