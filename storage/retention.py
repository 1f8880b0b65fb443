"""What is kept and what may be deleted: pure functions over records and listings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from storage import keys
from storage.options import CheckpointOptions
from storage.records import Record, VersionRef

Kind = Literal["recent", "milestone", "best"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which restore points stay: the newest ones, coherent ones every so many steps, the best by held-out loss."""

    recent: int
    milestone_every_steps: int | None = None
    best: int = 0

    @classmethod
    def of(cls, options: CheckpointOptions) -> "Rule":
        """As the job spec says."""
        return cls(
            recent=options.keep_restore_points,
            milestone_every_steps=options.milestone_every_steps,
            best=options.keep_best,
        )


@dataclass(frozen=True)
class Kept:
    """A restore point that is kept, and why."""

    record: Record
    kinds: tuple[Kind, ...]

    @property
    def needed(self) -> set[VersionRef]:
        """Stored versions it needs; only of a recent one also the versions before, to fall back to."""
        if "recent" in self.kinds:
            return self.record.named()
        return {ref for ref in self.record.layers.values() if ref.manifest_key is not None}


def retained(records: Sequence[Record], rule: Rule) -> list[Kept]:
    """Restore points of `records` (newest first) that `rule` keeps, newest first.

    Records that name the same versions are one restore point, and its newest record stands for it: every attempt and
    every epoch begins with a record of the restore point it starts from, and these must not push out the ones to fall
    back to.
    """
    points: dict[frozenset[tuple[str, VersionRef]], Record] = {}
    for record in records:
        points.setdefault(frozenset(record.layers.items()), record)
    why: dict[int, list[Kind]] = {}
    order = {(point.epoch, point.seq): place for place, point in enumerate(points.values())}

    def keep(point: Record | None, kind: Kind) -> bool:
        if point is not None:
            why.setdefault(order[point.epoch, point.seq], []).append(kind)
        return point is not None

    distinct = list(points.values())
    for point in distinct[: rule.recent]:
        keep(point, "recent")
    history = _history(distinct)
    if rule.milestone_every_steps is not None:
        coherent = [point for point in history if is_coherent(point)]
        for number in {point.step // rule.milestone_every_steps for point in coherent} - {0}:
            low = number * rule.milestone_every_steps
            keep(_first(coherent, low, low + rule.milestone_every_steps), "milestone")
    found = 0
    for low, high in _evaluations(records, rule.best):
        found += found < rule.best and keep(_first(history, low, high), "best")
    return [Kept(distinct[place], tuple(kinds)) for place, kinds in sorted(why.items())]


def is_coherent(record: Record) -> bool:
    """Whether all trained layers are of one step, after which training has begun."""
    return record.step > 0 and not any(record.ages().values())


def _history(points: Sequence[Record]) -> list[Record]:
    """`points` (newest first) without those of a history that was given up for an earlier restore point."""
    history: list[Record] = []
    for point in points:
        if not history or point.step <= history[-1].step:
            history.append(point)
    return history


def _first(points: Sequence[Record], low: int, high: float) -> Record | None:
    """Of `points` (newest first) with step in [low, high), the one of the smallest step; the newest of equals."""
    return min((point for point in points if low <= point.step < high), key=lambda point: point.step, default=None)


def _evaluations(records: Sequence[Record], best: int) -> list[tuple[int, float]]:
    """Steps [of an evaluation, of the next one), lowest held-out loss first."""
    losses = records[0].progress.eval_losses if records and best else ()
    bounds = pairwise([*(step for step, _ in losses), float("inf")])
    ranked = [(loss, int(low), high) for (_, loss), (low, high) in zip(losses, bounds, strict=True) if loss is not None]
    return [(low, high) for _, low, high in sorted(ranked)]


def needed_prefixes(kept: Iterable[Kept]) -> set[str]:
    """Key prefixes of every layer version that one of `kept` needs."""
    refs = {ref for point in kept for ref in point.needed}
    return {(ref.manifest_key or "").rpartition("/")[0] + "/" for ref in refs}


def held_by_damage(unreadable: Iterable[str], kept: Sequence[Kept], rule: Rule) -> list[str]:
    """Keys of unreadable records that would be among the recent ones.

    What such a record names is unknown, so while it may be brought back nothing is deleted that it may name.
    """
    recent = [keys.record(point.record.epoch, point.record.seq) for point in kept if "recent" in point.kinds]
    return [key for key in unreadable if sum(newer > key for newer in recent) < rule.recent]


def unnamed(
    object_keys: Iterable[str], records: Sequence[Record], unreadable: Sequence[str], rule: Rule, epoch: int
) -> list[str]:
    """Keys of objects that no retained restore point needs, and that nobody will name.

    The last key of each epoch's records stays: it is the newest record of all, or fences a stale epoch.

    Args:
        object_keys: what is stored.
        records: readable records, newest first.
        unreadable: keys of the unreadable ones.
        rule: what to keep.
        epoch: what later epochs left is left to them.
    """
    object_keys, kept = sorted(object_keys), retained(records, rule)
    last = {key.rpartition("/")[0]: key for key in object_keys if key.startswith(keys.RECORDS)}
    kept_records = {*last.values(), *(keys.record(point.record.epoch, point.record.seq) for point in kept)}
    held = held_by_damage(unreadable, kept, rule)
    prefixes = needed_prefixes(kept)

    def is_unnamed(key: str) -> bool:
        if key.startswith(keys.RECORDS):
            return key not in kept_records and key not in held and (keys.epoch_in_catalog(key) or 0) <= epoch
        if key.startswith(keys.PROBES):
            return True
        return (
            key.startswith(keys.LAYERS)
            and not held
            and key.rpartition("/")[0] + "/" not in prefixes
            and not _may_be_named(key, records[0], epoch)
        )

    return [key for key in object_keys if is_unnamed(key)]


def abandoned(unfinished_keys: Iterable[str], newest: Record, epoch: int) -> set[str]:
    """Keys of unfinished uploads, or files, that nobody waits for: what is left of them may be given up.

    Those of the attempt under way are not among them, nor what `epoch` itself is writing into the catalog.
    """

    def is_abandoned(key: str) -> bool:
        writer = keys.epoch_in_catalog(key)
        return writer < epoch if writer is not None else not _may_be_named(key, newest, epoch)

    return {key for key in unfinished_keys if is_abandoned(key)}


def _may_be_named(key: str, newest: Record, epoch: int) -> bool:
    """Whether the attempt under way, or one that a later submission goes on from, may still name a version."""
    version = keys.version_of(key)
    if version is None:
        return False
    if version.epoch > epoch:
        return True
    known = newest.layers.get(version.layer)
    in_time = known is not None and version.step > known.step
    return in_time and not newest.finished and version.attempt >= newest.totals.attempts
