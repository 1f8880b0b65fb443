"""A run's history as arrays: how far each layer had moved at each tick, since when, and how long uploads took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storage.history import LayerTable, Tick

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Upload(NamedTuple):
    """What a version took: from the tick that took its snapshot until all its shards were stored."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class Standings:
    """How a run stood at some of its ticks: their indices, and what was committed then."""

    indices: Ints
    """Shape [n]."""
    restore_points: Ints
    """Step of the restore point: [n]."""
    versions: Ints
    """Step of each layer's version in it: [n, layers]."""
    starts: Ints
    """Step from which the attempt went on: a version older than that has not been left behind by more: [n]."""
    bytes_written: int
    """By all ticks, and the final flush."""


@dataclass(frozen=True)
class Recording:
    """Ticks of a run, oldest first. `layers` are the trained ones, in the order of every axis of layers."""

    ticks: Sequence[Tick]
    layers: tuple[str, ...]
    steps: Ints
    """Shape [ticks]."""
    seconds: Floats
    """Of one clock that goes on from epoch to epoch: [ticks]."""
    references: Ints
    """Step at which the reference was taken that a layer's sums are against: [ticks, layers]."""
    versions: Ints
    """Step of each layer's version in the restore point committed then: [ticks, layers]."""
    starts: Ints
    """Step from which the attempt went on: [ticks]."""
    sums: Floats
    """As reported: [ticks, layers, 3]."""
    uploads: dict[tuple[int, int], Upload]
    """By row of the layer, and step."""

    @classmethod
    def of(cls, ticks: Sequence[Tick]) -> "Recording":
        """Follow the orders and what became durable through `ticks`, at least one."""
        layers = tuple(ticks[0].sums)
        follower = _Follower(layers)
        followed = [follower.take(tick) for tick in ticks]
        seconds, references, versions, starts = zip(*followed, strict=True)
        tables = [tick.sums.array if isinstance(tick.sums, LayerTable) else [*tick.sums.values()] for tick in ticks]
        return cls(
            ticks=ticks,
            layers=layers,
            steps=np.array([tick.step for tick in ticks]),
            seconds=np.array(seconds),
            references=np.array(references),
            versions=np.array(versions),
            starts=np.array(starts),
            sums=np.array(tables),
            uploads=follower.uploads,
        )

    def standings(self) -> Standings:
        """How the run stood at each tick."""
        points = np.array([tick.restore_point for tick in self.ticks])
        written = sum(version.bytes for tick in self.ticks for version in tick.durable)
        return Standings(np.arange(len(self.ticks)), points, self.versions, self.starts, written)


class _Follower:
    """Where references and committed versions stand from tick to tick."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        self.uploads: dict[tuple[int, int], Upload] = {}
        self._row_of = {layer: row for row, layer in enumerate(layers)}
        self._before: Tick | None = None
        self._start = 0
        self._offset = self._now = 0.0
        self._references, self._versions = np.zeros((2, len(layers)), np.int64)
        self._carried: dict[tuple[int, int], float] = {}
        self._waiting: list[tuple[int, int]] = []

    def take(self, tick: Tick) -> tuple[float, Ints, Ints, int]:
        """The tick's moment, the references of its sums, the versions committed then, and where the attempt began."""
        before, self._before = self._before, tick
        if before is not None and before.epoch != tick.epoch:
            self._offset = self._now - tick.seconds
        self._now = self._offset + tick.seconds
        self._stored(tick)
        goes_on = before is not None and before.attempt == tick.attempt
        if not goes_on:
            self._references[:] = self._start = tick.restore_point
            if before is None:
                self._versions[:] = tick.restore_point
        self._commit(tick.restore_point)
        if not goes_on:
            self._waiting.clear()  # what was not committed belongs to the attempt before
        told = self._now, self._references.copy(), self._versions.copy(), self._start
        if goes_on and before is not None and before.epoch == tick.epoch:
            for row in (self._row_of[layer] for layer in before.chosen):
                self._references[row] = tick.step
                self._carried[row, tick.step] = self._now
        return told

    def _stored(self, tick: Tick) -> None:
        for version in tick.durable:
            place = self._row_of[version.layer], version.step
            self._waiting.append(place)
            if place in self._carried:
                took = self._offset + version.seconds - self._carried[place]
                self.uploads[place] = Upload(version.bytes, max(0.0, took))

    def _commit(self, restore_point: int) -> None:
        """A composite takes every version up to its step; one that goes back has none beyond it."""
        for row, step in self._waiting:
            if step <= restore_point:
                self._versions[row] = max(self._versions[row], step)
        self._waiting = [place for place in self._waiting if place[1] > restore_point]
        np.minimum(self._versions, restore_point, out=self._versions)
