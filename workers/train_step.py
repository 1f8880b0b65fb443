"""One optimizer step and one evaluation; everything in them is a function of the step, not of stored state."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from workers.batches import IGNORED_LABEL, Batch, batch_indices, collate, label_count, micro_batches, sample_seed
from workers.data import Examples
from workers.options import TrainingOptions

Indices = npt.NDArray[np.int64]

JUDGED_SAMPLES = 16
"""Enough to tell two states of the same model apart: both are judged by the same ones."""


@dataclass(frozen=True)
class Trainee:
    """What a step works on."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    options: TrainingOptions
    device: torch.device
    pad_id: int

    def batch(self, examples: Examples, indices: Indices) -> Batch:
        """One micro-batch on the device."""
        return Batch(*(tensor.to(self.device) for tensor in collate(examples, indices, self.pad_id)))

    def autocast(self) -> torch.autocast:
        """Mixed precision as the spec says."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bfloat16")


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the next-token cross-entropy over the batch's labels, in float32 (scalar)."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    predicted, labels = logits[:, :-1].float().flatten(0, 1), batch.labels[:, 1:].flatten()
    return functional.cross_entropy(predicted, labels, ignore_index=IGNORED_LABEL, reduction="sum")


def forward_backward(trainee: Trainee, examples: Examples, step: int) -> tuple[float, int, int]:
    """Accumulate the gradients of this rank's share of step `step`; the last micro-batch averages them over the ranks.

    The loss is the mean over the global batch's label tokens, whatever the number of ranks.

    Returns:
        This rank's loss sum, label tokens and input tokens.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options = trainee.options
    indices = batch_indices(step, len(examples), options.global_batch, options.seed)
    scale = world_size / max(1, label_count(examples, indices))
    total, labels, tokens = 0.0, 0, 0
    for part, weight, sync in _shares(indices, options.micro_batch, rank, world_size):
        batch = trainee.batch(examples, part)
        torch.manual_seed(sample_seed(options.seed, step, int(part[0])))
        with sync_only(trainee.model, sync), trainee.autocast():
            loss = loss_sum(trainee.model, batch)
        with sync_only(trainee.model, sync):
            finite = loss.detach() * 0 + 1  # 1, or NaN: a loss that is not finite shows in every rank's gradient norm
            (loss * finite * (scale * weight)).backward()
        total += float(loss.detach()) * weight
        labels += int(label_count(examples, part) * weight)
        tokens += int(batch.attention_mask.sum() * weight)
    return total, labels, tokens


def _shares(indices: Indices, micro_batch: int, rank: int, world_size: int) -> Iterator[tuple[Indices, float, bool]]:
    """(micro-batch, weight, whether it synchronizes). A rank without one runs the first for nothing, to join in."""
    mine: Sequence[Indices] = micro_batches(indices, micro_batch, rank, world_size)
    if not mine:
        yield micro_batches(indices, micro_batch, 0, 1)[0], 0.0, True
    for number, part in enumerate(mine):
        yield part, 1.0, number == len(mine) - 1


def sync_only(model: DistributedDataParallel, sync: bool) -> AbstractContextManager[None]:
    """Average gradients over the ranks in this block only if `sync`."""
    return nullcontext() if sync else model.no_sync()


def clipped_gradient_norm(trainee: Trainee) -> float:
    """Clip the gradients as the spec says; returns their norm before."""
    limit = trainee.options.max_grad_norm
    norm = nn.utils.clip_grad_norm_(trainee.model.parameters(), float("inf") if limit is None else limit)
    return float(norm)


def held_out_loss(trainee: Trainee, examples: Examples, group: dist.ProcessGroup | None) -> float:
    """Mean loss per label token over all held-out examples, shared out over the ranks; the same on every rank."""
    return _mean_loss(trainee, examples, np.arange(len(examples), dtype=np.int64), group)


def upcoming_loss(trainee: Trainee, examples: Examples, step: int, group: dist.ProcessGroup | None) -> float:
    """Mean loss per label token of the samples of `step` and as many steps after it as make `JUDGED_SAMPLES`.

    Shared out over the ranks; the same on every rank.
    """
    options = trainee.options
    steps = range(step, step - (-JUDGED_SAMPLES // options.global_batch))
    samples = [batch_indices(one, len(examples), options.global_batch, options.seed) for one in steps]
    return _mean_loss(trainee, examples, np.concatenate(samples), group)


@torch.no_grad()
def _mean_loss(trainee: Trainee, examples: Examples, indices: Indices, group: dist.ProcessGroup | None) -> float:
    model = trainee.model.module
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for part in micro_batches(indices, trainee.options.micro_batch, dist.get_rank(), dist.get_world_size()):
        batch = trainee.batch(examples, part)
        with trainee.autocast():
            loss = loss_sum(model, batch)
        sums += torch.tensor([float(loss), label_count(examples, part)], dtype=torch.float64)
    model.train()
    dist.all_reduce(sums, group=group)
    return float(sums[0] / sums[1])
