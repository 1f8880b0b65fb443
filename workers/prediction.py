"""Weight prediction: carries a restored layer's weights over the steps that it missed.

A stale layer is wrong mostly by a move that its own optimizer state foretells: over some ten steps Adam's first moment
changes little. So its weights are moved as AdamW would have moved them, had its gradient stayed what that moment says.
Predicting weights from momentum is how asynchronous pipelines bear stale weights (SpecTrain, arXiv 1809.02839; with
Adam: XPipe, arXiv 1911.04610); here it is done once, after a restart. Where the learning rate is so high that the
weights swing to and fro it makes them worse: so the loss decides.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from storage.records import ElementRange
from workers.data import Examples
from workers.layers import Layer
from workers.slices import trainable
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

    All ranks call it, and do the same. Returns None if no layer is stale.
    """
    newest = max(restored.values(), default=0)
    stale = [layer for layer in layers if 0 < restored[layer.name] < newest]
    if not stale:
        return None
    model = trainee.model.module
    stored = upcoming_loss(trainee, examples, newest + 1, group)
    kept = [(view, view.to("cpu", copy=True)) for layer in stale for view in _weights(layer, model)]
    predict_weights(restored, layers, model, trainee.optimizer, learning_rate)
    found = Judgement(stored, upcoming_loss(trainee, examples, newest + 1, group))
    if not found.is_better:
        for view, values in kept:
            view.copy_(values)
    return found


def _weights(layer: Layer, model: nn.Module) -> Iterator[Tensor]:
    for held in trainable(layer, model):
        yield model.get_parameter(held.tensor).detach().view(-1)[held.first : held.first + held.count]


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
    parts = [(restored[layer.name], held) for layer in layers for held in trainable(layer, model)]
    newest_of: dict[str, int] = {}
    for step, held in parts:
        newest_of[held.tensor] = max(step, newest_of.get(held.tensor, 0))
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for step, held in parts:
        rate = sum(learning_rate(missed) for missed in range(step + 1, newest + 1))
        if step > 0 and rate > 0:
            parameter = model.get_parameter(held.tensor)
            # Of a tensor that is split among layers, the optimizer's `step` is that of the newest part.
            behind = newest_of[held.tensor] - step
            _move(parameter, held, optimizer.state[parameter], groups[parameter], behind, rate)


@torch.no_grad()
def _move(
    parameter: Tensor,
    held: ElementRange,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    behind: int,
    rate: float,
) -> None:
    def own(tensor: Tensor) -> Tensor:
        return tensor.view(-1)[held.first : held.first + held.count]

    updates = max(1.0, state["step"].item() - behind)
    first, second = (1 - beta**updates for beta in group["betas"])
    weights = own(parameter).float()
    root = (own(state["exp_avg_sq"]).float() / second).sqrt_().add_(group["eps"])
    move = (own(state["exp_avg"]).float() / first).div_(root).add_(weights, alpha=group["weight_decay"])
    own(parameter).copy_(weights - rate * move)
