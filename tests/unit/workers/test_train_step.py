"""A step whose loss is not finite is told from every rank's gradient norm, even if its own gradients are finite."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workers.data import Examples
from workers.options import TrainingOptions
from workers.train_step import Trainee, clipped_gradient_norm, forward_backward

WORDS = 4


pytestmark = pytest.mark.usefixtures("group_of_one")


class Biased(nn.Module):
    """Logits that do not depend on the input; `forbidden` words have none (minus infinity)."""

    def __init__(self, forbidden: list[int]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(WORDS))
        self.register_buffer("mask", torch.zeros(WORDS).index_fill(0, torch.tensor(forbidden, dtype=torch.long), 1.0))

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        shown = self.logits.masked_fill(self.mask.bool(), float("-inf"))
        return SimpleNamespace(logits=shown.expand(*input_ids.shape, WORDS))


@pytest.mark.parametrize(("forbidden", "finite"), [([], True), ([3], False)])
def test_an_infinite_loss_with_finite_gradients_shows_in_the_norm(forbidden, finite) -> None:
    examples = Examples(
        tokens=np.array([1, 2, 3] * 2, dtype=np.int32),
        targets=np.array([False, False, True] * 2),
        offsets=np.array([0, 3, 6], dtype=np.int64),
    )
    model = Biased(forbidden)
    trainee = Trainee(
        model=DistributedDataParallel(model),
        optimizer=torch.optim.SGD(model.parameters()),
        options=TrainingOptions(steps=1, global_batch=2, micro_batch=1, precision="float32"),
        device=torch.device("cpu"),
        pad_id=0,
    )
    loss, _, _ = forward_backward(trainee, examples, 1)
    assert math.isfinite(loss) == finite
    assert math.isfinite(clipped_gradient_norm(trainee)) == finite
