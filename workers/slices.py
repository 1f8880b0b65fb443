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
    held = trainable(layer, model)
    total = sum(whole.count for whole in held)
    first, end = total * rank // world_size, total * (rank + 1) // world_size
    ranges = []
    start = 0
    for whole in held:
        low, high = max(first, start), min(end, start + whole.count)
        if low < high:
            ranges.append(ElementRange(tensor=whole.tensor, first=whole.first + low - start, count=high - low))
        start += whole.count
    return Slice(layer.name, tuple(ranges), owns_scalars=rank == 0 and bool(held))


def trained_bytes(layer: Layer, model: nn.Module) -> int:
    """Bytes of the layer's trained parameters, without what an optimizer keeps of them."""
    return sum(held.count * model.get_parameter(held.tensor).itemsize for held in trainable(layer, model))


def trainable(layer: Layer, model: nn.Module) -> tuple[ElementRange, ...]:
    """What the layer holds of parameters that are trained; nothing means that the layer is frozen."""
    return tuple(held for held in layer.params if model.get_parameter(held.tensor).requires_grad)
