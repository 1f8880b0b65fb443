"""What is in flight, durable and committed: the CheckpointActor's memory, without any I/O or clock."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.assembly import Assembly
from storage.records import BASE, LayerFacts, Record, VersionId, VersionRef


@dataclass
class InFlight:
    """A layer version that was decided and is not durable yet."""

    decision: int
    node_bytes: tuple[int, ...]
    earliest: int
    """Step at which its snapshot can be taken at the earliest."""
    step: int | None = None
    """Step of the snapshot, known once the ranks have carried the decision out."""
    stored: bool = False
    """All shards are durable; only the manifest is still to be written."""
    ordered_at: int = 0
    """Moment (as the WriterGroup counts) at which the ranks were told."""
    accepted_at: int | None = None
    """Moment at which every rank was known to have handed its shard over; not looked at before there is a doubt."""

    def is_of(self, step: int) -> bool:
        """Whether this is the flight of the version at `step`."""
        return self.step == step if self.step is not None else step >= self.earliest


@dataclass(frozen=True)
class RestorePoint:
    """A complete, bounded map layer -> version."""

    step: int
    layers: dict[str, VersionRef]
    previous: dict[str, VersionRef]

    def ages(self, trained: Iterable[LayerFacts]) -> list[int]:
        """Age in steps of each layer of `trained`, in their order."""
        return [self.step - self.layers[fact.name].step for fact in trained]


class Ledger:
    """Layer versions of one run, from the decision to the restore point. At most one version a layer is in flight."""

    def __init__(self, facts: tuple[LayerFacts, ...], staleness_bound_steps: int, record: Record | None) -> None:
        self.facts = facts
        self.bound = staleness_bound_steps
        self.trained = tuple(fact for fact in facts if not fact.frozen)
        """Layers that age."""
        names = [fact.name for fact in facts]
        self.committed = RestorePoint(
            step=record.step if record else 0,
            layers={name: record.layers[name] if record else BASE for name in names},
            previous=dict(record.previous) if record else {},
        )
        self.coherent_step = 0
        """Step of the newest committed restore point whose layers were all of one step."""
        self.in_flight: dict[str, InFlight] = {}
        self.due: set[str] = set()
        self._assembling: dict[VersionId, Assembly] = {}
        self._durable: dict[str, list[VersionRef]] = {name: [] for name in names}

    def issue(self, decision: int, layer: str, node_bytes: tuple[int, ...], earliest: int) -> None:
        """A decision chose `layer`; each node will hand over so many bytes, of a snapshot at `earliest` or later."""
        self.in_flight[layer] = InFlight(decision=decision, node_bytes=node_bytes, earliest=earliest)
        self.due.discard(layer)

    def carried_out(self, decision: int, step: int) -> None:
        """All ranks took the snapshots of `decision` at `step`."""
        for flight in self.in_flight.values():
            if flight.decision == decision:
                flight.stored = flight.stored and flight.step == step  # else it was a late version that was stored
                flight.step = step

    def missing_ranks(self, version: VersionId, world_size: int) -> set[int]:
        """Ranks whose shards of `version` have not been reported durable."""
        return self._assembling.get(version, Assembly(version, world_size)).missing_ranks()

    def is_over(self, version: VersionId) -> bool:
        """Whether `version` is committed, or one after it."""
        return self.committed.layers[version.layer].step >= version.step

    def shards_durable(
        self, version: VersionId, world_size: int, entries: Mapping[int, bytes], sizes: Mapping[int, int]
    ) -> Assembly | None:
        """Shards are stored (see `Assembly.add`). Returns the version when none is missing any more, once."""
        if self.is_over(version):
            return None
        assembly = self._assembling.get(version)
        if assembly is None:
            assembly = self._assembling[version] = Assembly(version, world_size)
        if not assembly.add(entries, sizes):
            return None
        flight = self.in_flight.get(version.layer)
        if flight is not None and flight.is_of(version.step):
            flight.step, flight.stored = version.step, True
        return assembly

    def version_durable(self, layer: str, ref: VersionRef) -> None:
        """The manifest of a version is stored: a restore point may name it."""
        self._durable[layer] = sorted([*self._durable[layer], ref], key=lambda durable: durable.step)
        flight = self.in_flight.get(layer)
        if flight is not None and flight.is_of(ref.step):
            del self.in_flight[layer]

    def fail(self, layer: str, step: int | None = None) -> None:
        """The version of `layer` in flight will not become durable: the layer is due again.

        With a `step`: the version at that step; a newer one in flight is left alone.
        """
        # Its shards that are durable stay good: while training stands still, the next try makes the same version.
        flight = self.in_flight.get(layer)
        if flight is not None and (step is None or flight.is_of(step)):
            del self.in_flight[layer]
            self.due.add(layer)

    def newest_step_of(self, layer: str, at: int) -> int:
        """Step of the newest version of `layer`, durable or in flight (`at`, when its snapshot is still to come)."""
        flight = self.in_flight.get(layer)
        if flight is not None:
            return flight.step if flight.step is not None else at
        refs = self._durable[layer]
        return refs[-1].step if refs else self.committed.layers[layer].step

    def next_restore_point(self) -> RestorePoint | None:
        """Newest bounded restore point that is better than the committed one: a later step, or a lower age."""
        steps = {ref.step for refs in self._durable.values() for ref in refs} | {self.committed.step}
        for step in sorted((s for s in steps if s >= self.committed.step), reverse=True):
            point = self._composite(step)
            if self._is_bounded(point):
                return point if point.step > self.committed.step or point.layers != self.committed.layers else None
        return None

    def commit(self, point: RestorePoint) -> None:
        """`point` is in the catalog."""
        self.committed = point
        self.coherent_step = point.step if not any(point.ages(self.trained)) else min(self.coherent_step, point.step)
        for layer, refs in self._durable.items():
            self._durable[layer] = [ref for ref in refs if ref.step > point.layers[layer].step]
        for version in [version for version in self._assembling if self.is_over(version)]:
            del self._assembling[version]

    def begin_attempt(self) -> None:
        """What the last attempt has not committed belongs to a history that ends here."""
        self.in_flight.clear()
        self.due.clear()
        self._assembling.clear()
        self._durable = {name: [] for name in self._durable}

    def _composite(self, step: int) -> RestorePoint:
        layers, previous = dict(self.committed.layers), dict(self.committed.previous)
        for layer, refs in self._durable.items():
            for ref in refs:
                if ref.step <= step and ref.step > layers[layer].step:
                    previous[layer], layers[layer] = layers[layer], ref
        return RestorePoint(step, layers, previous)

    def _is_bounded(self, point: RestorePoint) -> bool:
        return all(age <= self.bound for age in point.ages(self.trained))
