"""AdamW with its state in place from the start, and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from workers.options import TrainingOptions


def build_optimizer(model: nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters; weight decay on matrices (2-D and up) only.

    Its state is allocated here (zeros, `step` 0), so that a restore can fill it in place before the first step.
    Training is bitwise what it is with state that torch creates at the first step.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(step: int, total_steps: int, options: TrainingOptions) -> float:
    """Learning rate of `step` (1 to `total_steps`).

    It rises in equal parts to the peak at step `warmup_steps` (at step 1 without warm-up); `linear` and `cosine` then
    fall so as to be 0 one step after the last, so that no step is taken at 0.
    """
    peak_step = max(options.warmup_steps, 1)
    if step < peak_step:
        return options.learning_rate * step / peak_step
    progress = (step - peak_step) / max(total_steps + 1 - peak_step, 1)
    match options.schedule:
        case "constant":
            return options.learning_rate
        case "linear":
            return options.learning_rate * (1 - progress)
        case "cosine":
            return options.learning_rate * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value` in every parameter group from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = value
