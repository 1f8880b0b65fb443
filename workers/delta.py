"""How far each layer has moved since its last durable value, measured on a sample of this rank's slices."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

from storage.records import ElementRange
from workers.layers import Layer
from workers.slices import Slice
from workers.state import PARAM

_RUN = 64
"""Elements of a sampled run: fewer would cost more cache misses than they save in bytes."""

_BATCH_RUNS = {"cpu": 2**12, "cuda": 2**17}
"""Runs handled at once, by type of device: on a CPU what stays in the cache (1 MB a tensor), on a GPU what takes few
kernels and bounds the scratch memory of an exact measurement to some 100 MB."""


@dataclass(frozen=True)
class _Piece:
    """What is measured of a layer's part of one tensor, as rows of `_RUN` elements.

    `runs` ([rows], int32) numbers the runs taken of the flattened tensor from `first` on; None takes all elements
    `[first, first + count)`, filled up with zeros. `scale` is the part's elements per element sampled.
    """

    layer: int
    parameter: nn.Parameter
    beta: float
    scale: float
    first: int
    count: int
    runs: Tensor | None = None
    _views: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """By name of the tensor: its address and what `_view` made of it, which takes as long as gathering the runs."""

    @property
    def num_rows(self) -> int:
        return -(-self.count // _RUN)

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        """The piece of `tensor`, which has the parameter's shape: [num_rows, _RUN], in its own dtype."""
        address, view = self._views.get(name, (None, tensor))
        if address != tensor.data_ptr():
            view = self._view(tensor.detach().view(-1)[self.first :])
            self._views[name] = tensor.data_ptr(), view
        if self.runs is not None:
            return view.index_select(0, self.runs)
        return functional.pad(view, (0, -self.count % _RUN)).view(-1, _RUN)

    def _view(self, flat: Tensor) -> Tensor:
        if self.runs is None:
            return flat[: self.count]
        return flat[: flat.numel() // _RUN * _RUN].view(-1, _RUN)


class _Batch:
    """Pieces that are measured with one set of kernels, and their reference."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        device = pieces[0].parameter.device
        sizes = torch.tensor([piece.num_rows for piece in pieces])
        self.pieces = pieces
        self.piece_of_row = torch.repeat_interleave(sizes).to(torch.int32).to(device)
        self.scales = torch.tensor([piece.scale for piece in pieces], dtype=torch.float64, device=device)
        self.betas = torch.tensor([piece.beta for piece in pieces], dtype=torch.float64, device=device)
        self.layers = [
            (layer, sum(p.num_rows for p in group)) for layer, group in groupby(pieces, key=lambda p: p.layer)
        ]
        self.reference = torch.cat([piece.rows(PARAM, piece.parameter) for piece in pieces])

    def rebase(self, layers: Collection[int]) -> None:
        start = 0
        for piece in self.pieces:
            end = start + piece.num_rows
            if piece.layer in layers:
                self.reference[start:end] = piece.rows(PARAM, piece.parameter)
            start = end

    def momenta(self, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
        """`exp_avg` ([rows, _RUN]), and per piece what corrects its bias ([pieces], NaN where there is none)."""
        states = [optimizer.state.get(piece.parameter, {}) for piece in self.pieces]
        # The weights stand in for a missing `exp_avg`: whatever they are, the factor makes it NaN.
        rows = [
            piece.rows("exp_avg", state.get("exp_avg", piece.parameter))
            for piece, state in zip(self.pieces, states, strict=True)
        ]
        none = torch.tensor(math.nan, device=self.scales.device)
        steps = torch.stack([state["step"] if "exp_avg" in state else none for state in states])
        steps = steps.to(self.scales.device, torch.float64, non_blocking=True)
        return torch.cat(rows), 1 / (1 - self.betas ** steps.clamp(min=1))

    def sums(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Scaled sums of each row: [rows, 3], float64, columns as in `DeltaMeter.measure`."""
        reference = self.reference.float()
        moved = torch.cat([piece.rows(PARAM, piece.parameter) for piece in self.pieces]).float().sub_(reference)
        momenta, corrections = self.momenta(optimizer)
        scales = torch.stack([self.scales, self.scales, -self.scales * corrections], dim=1)
        vecdot = torch.linalg.vecdot
        sums = torch.stack([vecdot(moved, moved), vecdot(reference, reference), vecdot(momenta.float(), moved)], dim=1)
        return sums.double() * scales.index_select(0, self.piece_of_row)


class DeltaMeter:
    """Per-layer sums over this rank's slices; their total over all ranks gives each layer's drift and impact.

    The sample is drawn per layer and tensor from `seed`: one run of 64 elements in each of as many equal parts of what
    the layer holds of the tensor as `fraction` asks for, at least one. It does not depend on the number of ranks: the
    rank that owns a run's first element measures the run. Sums are scaled per tensor, elements over sampled elements,
    so that the total over all ranks estimates the whole layer. With `fraction` 1, and for tensors shorter than a run,
    nothing is left out.

    The reference takes `fraction` of the owned parameters in their own dtype, and 8 bytes of index a run.
    """

    @torch.no_grad()
    def __init__(
        self,
        layers: Sequence[Layer],
        slices: Sequence[Slice],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        fraction: float,
        seed: int,
    ) -> None:
        """Take the current weights as reference. `slices` are this rank's, one a layer, in the order of `layers`."""
        betas = {p: group.get("betas", (0.0,))[0] for group in optimizer.param_groups for p in group["params"]}
        self._optimizer = optimizer
        self._names = [layer.name for layer in layers]
        self._device = next(model.parameters()).device
        self._batches: list[_Batch] = []
        pieces = [
            piece
            for index, (layer, slice) in enumerate(zip(layers, slices, strict=True))
            for owned in slice.ranges
            for piece in _pieces(index, layer, owned, model.get_parameter(owned.tensor), betas, fraction, seed)
        ]
        start = rows = 0
        for end, piece in enumerate(pieces, start=1):
            rows += piece.num_rows
            if rows >= _BATCH_RUNS[self._device.type] or end == len(pieces):
                self._batches.append(_Batch(pieces[start:end]))
                start, rows = end, 0

    @torch.no_grad()
    def measure(self) -> Tensor:
        """Sums of this rank: [layers, 3], float64, on the device; does not wait for the device.

        Columns: Σ(W − W_ref)², ΣW_ref², −Σ m̂(W − W_ref), with m̂ = exp_avg / (1 − β1^step) (Kingma and Ba 2015,
        algorithm 1). The last is NaN for a layer whose optimizer state has no `exp_avg`. A layer of which this rank
        owns nothing has zeros.
        """
        totals = torch.zeros(len(self._names), 3, dtype=torch.float64, device=self._device)
        for batch in self._batches:
            parts = torch.split(batch.sums(self._optimizer), [rows for _, rows in batch.layers])
            for (layer, _), part in zip(batch.layers, parts, strict=True):
                totals[layer] += part.sum(0)
        return totals

    @torch.no_grad()
    def rebase(self, layer_names: Collection[str]) -> None:
        """Make the current weights of these layers their reference."""
        chosen = {index for index, name in enumerate(self._names) if name in layer_names}
        for batch in self._batches:
            batch.rebase(chosen)


def _pieces(
    index: int,
    layer: Layer,
    owned: ElementRange,
    parameter: nn.Parameter,
    betas: dict[nn.Parameter, float],
    fraction: float,
    seed: int,
) -> Iterator[_Piece]:
    """What is measured of one owned range; an exact one in parts of at most a batch."""
    held = next(held for held in layer.params if held.tensor == owned.tensor)
    num_runs = held.count // _RUN
    beta = betas[parameter]
    if fraction == 1 or num_runs == 0:
        end = owned.first + owned.count
        most = _BATCH_RUNS[parameter.device.type] * _RUN
        for first in range(owned.first, end, most):
            yield _Piece(index, parameter, beta, 1.0, first, min(most, end - first))
        return
    sample = _sample(num_runs, max(1, round(fraction * num_runs)), f"{seed}/{layer.name}/{owned.tensor}")
    scale = held.count / (len(sample) * _RUN)
    starts = held.first + sample * _RUN
    mine = sample[(starts >= owned.first) & (starts < owned.first + owned.count)]
    if len(mine):
        runs = mine.to(torch.int32).to(parameter.device)
        yield _Piece(index, parameter, beta, scale, held.first, len(mine) * _RUN, runs)


def _sample(num_runs: int, size: int, key: str) -> Tensor:
    """`size` of `num_runs` runs, one at random in each of `size` equal parts: [size], int64, ascending.

    Every run is as likely as any other (one that two parts share may come twice). A regular grid would not do: its
    stride can fall in step with the rows of a matrix and see a few columns only.
    """
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)
    places = torch.arange(size, dtype=torch.float64) + torch.rand(size, generator=generator, dtype=torch.float64)
    return (places * (num_runs / size)).long().clamp_(max=num_runs - 1)
