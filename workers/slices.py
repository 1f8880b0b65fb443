"""Who owns which elements of a layer under DDP."""

from dataclasses import dataclass

from torch import nn

from storage.records import ElementRange
from workers.layers import Layer


@dataclass(frozen=True)
class Slice:
    """What one rank owns of a layer: element ranges of its trainable parameters.

    `owns_scalars` marks the one rank that also owns the layer's buffers and the optimizer state that has not
    the shape of its parameter (`step`).
    """

    layer: str
    ranges: tuple[ElementRange, ...]
    owns_scalars: bool


def cut(layer: Layer, model: nn.Module, rank: int, world_size: int) -> Slice:
    """Slice of `rank` when the layer's trainable elements, laid end to end, are cut evenly among `world_size` ranks.

    Every element has exactly one owner. A rank may own nothing of a tensor, or of a layer. Frozen parameters are in no
    slice, and neither are the buffers of a layer without trainable parameters.
    """
    sizes = {name: model.get_parameter(name).numel() for name in trainable(layer, model)}
    total = sum(sizes.values())
    first, end = total * rank // world_size, total * (rank + 1) // world_size
    ranges = []
    start = 0
    for name, size in sizes.items():
        low, high = max(first, start), min(end, start + size)
        if low < high:
            ranges.append(ElementRange(tensor=name, first=low - start, count=high - low))
        start += size
    return Slice(layer.name, tuple(ranges), owns_scalars=rank == 0 and bool(sizes))


def trainable(layer: Layer, model: nn.Module) -> tuple[str, ...]:
    """Names of the layer's parameters that are trained; none means that the layer is frozen."""
    return tuple(name for name in layer.params if model.get_parameter(name).requires_grad)
