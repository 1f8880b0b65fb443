"""What to restore when stored versions cannot be read: pure functions over restore points and records."""

from collections.abc import Iterable, Mapping, Sequence

from storage.ledger import RestorePoint
from storage.records import LayerFacts, Record, VersionRef


def without(
    point: RestorePoint,
    bad: Iterable[str],
    unreadable: set[VersionRef],
    trained: Sequence[LayerFacts],
    staleness_bound_steps: int,
) -> RestorePoint | None:
    """`point` with the previous version of each layer in `bad`; None if one has none, is unreadable, or is too old."""
    bad = set(bad)
    if not bad <= point.previous.keys():
        return None
    layers = {name: point.previous[name] if name in bad else ref for name, ref in point.layers.items()}
    previous = {name: ref for name, ref in point.previous.items() if name not in bad}
    replaced = RestorePoint(max(ref.step for ref in layers.values()), layers, previous)
    too_old = any(age > staleness_bound_steps for age in replaced.ages(trained))
    return None if too_old or unreadable & set(layers.values()) else replaced


def older(
    records: Sequence[Record], present: Mapping[str, VersionRef], unreadable: set[VersionRef]
) -> RestorePoint | None:
    """Newest of `records` (newest first) with another map than `present` and nothing unreadable in it."""
    for record in records:
        if record.layers != present and not unreadable & set(record.layers.values()):
            return RestorePoint(record.step, dict(record.layers), dict(record.previous))
    return None
