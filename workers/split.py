"""Layers that are too large to be written at one tick, split by rows into parts that age on their own.

A part is a layer like any other, called `embedding.00`, `embedding.01`, ... What the parts of a run are depends on its
model and spec only, so that any world size resumes it.
"""

import math
from collections.abc import Sequence

from torch import nn

from storage.encoding import largest_share
from storage.options import CheckpointOptions, parse_write_budget
from storage.records import ElementRange
from workers.layers import BLOCK, Layer
from workers.slices import trained_bytes
from workers.state import planned_layer_bytes


def split_layers(
    layers: Sequence[Layer], model: nn.Module, options: CheckpointOptions, dtype: str
) -> tuple[Layer, ...]:
    """Split what is larger than the largest transformer block, or than what the budget passes in a tick.

    So about equal bytes can be written at each tick, and each tick can write something. In mode `full`, which writes
    everything at once, nothing is split. `layers` are whole ones of `model`, which may be on the meta device; `dtype`
    is the spec's `model.dtype`.
    """
    if options.mode == "full":
        return tuple(layers)
    sizes = {layer.name: planned_layer_bytes(layer, model) for layer in layers}
    limits: list[float] = []
    if blocks := [size for name, size in sizes.items() if name.startswith(f"{BLOCK}-") and size > 0]:
        limits.append(max(blocks))
    unit, amount = parse_write_budget(options.write_budget)
    if unit == "share":
        limits.append(amount * sum(sizes.values()) / largest_share(options, dtype))
    limit = min(limits, default=math.inf)
    return tuple(part for layer in layers for part in _parts(layer, model, math.ceil(sizes[layer.name] / limit) or 1))


def _parts(layer: Layer, model: nn.Module, count: int) -> list[Layer]:
    """Cut what is trained of `layer` into `count` parts of about equal bytes, between rows (along the last dimension).

    Vectors are not cut. What is frozen, and the buffers, go with the first part. There are fewer parts if there are
    fewer rows.
    """
    total = trained_bytes(layer, model)
    params: list[list[ElementRange]] = [[] for _ in range(count)]
    position = 0
    for held in layer.params:
        parameter = model.get_parameter(held.tensor)
        if not parameter.requires_grad or held.count == 0:
            params[0].append(held)
            continue
        row = parameter.shape[-1] if parameter.ndim > 1 else held.count
        rows, row_bytes, first = held.count // row, row * parameter.itemsize, 0
        for index, taken in enumerate(params, start=1):
            end = min(rows, max(first, round((total * index / count - position) / row_bytes)))
            if first < end:
                taken.append(ElementRange(tensor=held.tensor, first=first * row, count=(end - first) * row))
            first = end
        position += parameter.nbytes
    filled = [ranges for ranges in params if ranges]
    if len(filled) <= 1:
        return [layer]
    width = max(2, len(str(len(filled) - 1)))
    return [
        Layer(f"{layer.name}.{index:0{width}d}", tuple(ranges), layer.buffers if index == 0 else ())
        for index, ranges in enumerate(filled)
    ]
