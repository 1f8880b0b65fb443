"""Weight prediction: carries a restored layer's weights over the steps that it missed.

A stale layer is wrong mostly by a move that its own optimizer state foretells: over some ten steps Adam's first moment
changes little. So its weights are moved as AdamW would have moved them, had its gradient stayed what that moment says.
Predicting weights from momentum is how asynchronous pipelines bear stale weights (SpecTrain, arXiv 1809.02839; with
Adam: XPipe, arXiv 1911.04610); here it is done once, after a restart. Where the learning rate is so high that the
weights swing to and fro it makes them worse: so the loss decides.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.data import Examples
from workers.layers import Layer
from workers.slices import cut
from workers.state import BUFFER, PARAM, STEP, slice_tensors
from workers.train_step import Trainee, upcoming_loss


@dataclass(frozen=True)
class Judgement:
    """Mean losses of the next samples, with the weights as stored and as predicted."""

    stored: float
    predicted: float

    @property
    def is_better(self) -> bool:
        """Whether the prediction is worth keeping."""
        return self.predicted < self.stored


def predict_if_better(
    restored: Mapping[str, int],
    layers: Sequence[Layer],
    trainee: Trainee,
    examples: Examples,
    learning_rate: Callable[[int], float],
    group: dist.ProcessGroup | None,
) -> Judgement | None:
    """`predict_weights`, and bit by bit back to what was restored unless the loss of the next samples is lower so.

    All ranks call it, and do the same. Returns None if the layers miss less than a step on average: to judge takes
    longer.
    """
    newest = max(restored.values(), default=0)
    missed = {layer: newest - restored[layer.name] for layer in layers if restored[layer.name] > 0}
    if sum(missed.values()) < max(1, len(missed)):
        return None
    stale = [layer for layer, steps in missed.items() if steps > 0]
    model = trainee.model.module
    stored = upcoming_loss(trainee, examples, newest + 1, group)
    weights = [views[PARAM] for layer in stale for views in _views(layer, model, trainee.optimizer).values()]
    kept = [(view, view.to("cpu", copy=True)) for view in weights]
    predict_weights(restored, layers, model, trainee.optimizer, learning_rate)
    found = Judgement(stored, upcoming_loss(trainee, examples, newest + 1, group))
    if not found.is_better:
        for view, values in kept:
            view.copy_(values)
    return found


def _views(layer: Layer, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """What the layer holds of each trained parameter: name -> kind -> flat view."""
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for part in slice_tensors(cut(layer, model, 0, 1), layer, model, optimizer):
        if part.kind != BUFFER:
            found[part.name][part.kind] = part.tensor
    return found


def predict_weights(
    restored: Mapping[str, int],
    layers: Iterable[Layer],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[int], float],
) -> None:
    """Move the weights of each stale layer on to the newest restored step, in place; the optimizer's state stays.

    W <- W - (sum of the missed steps' learning rates) * (m / (sqrt(v) + eps) + weight_decay * W), m and v being
    AdamW's bias-corrected moments. A layer that was never persisted has none and stays as it is.

    `restored` tells the step of each layer's version, with which `model` and `optimizer` have just been filled; 0 is
    the base version.
    """
    newest = max(restored.values(), default=0)
    parts = [
        (restored[layer.name], name, views)
        for layer in layers
        for name, views in _views(layer, model, optimizer).items()
    ]
    newest_of: dict[str, int] = {}
    for step, name, _ in parts:
        newest_of[name] = max(step, newest_of.get(name, 0))
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for step, name, views in parts:
        rate = sum(learning_rate(missed) for missed in range(step + 1, newest + 1))
        if step > 0 and rate > 0:
            # Of a tensor that is split among layers, the optimizer's `step` is that of the newest part.
            _move(views, groups[model.get_parameter(name)], behind=newest_of[name] - step, rate=rate)


def _move(views: Mapping[str, Tensor], group: Mapping[str, Any], *, behind: int, rate: float) -> None:
    updates = max(1.0, views[STEP].item() - behind)
    first, second = (1 - beta**updates for beta in group["betas"])
    weights = views[PARAM].float()
    root = (views["exp_avg_sq"].float() / second).sqrt_().add_(group["eps"])
    move = (views["exp_avg"].float() / first).div_(root).add_(weights, alpha=group["weight_decay"])
    views[PARAM].copy_(weights - rate * move)
