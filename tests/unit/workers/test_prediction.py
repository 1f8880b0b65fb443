import math
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from storage.records import ElementRange
from tests.unit.workers.models import split, take_steps, tiny
from workers.data import Examples
from workers.layers import Layer, find_layers
from workers.optimizer import build_optimizer, learning_rate, set_learning_rate
from workers.options import TrainingOptions
from workers.prediction import predict_if_better, predict_weights
from workers.slices import cut
from workers.state import slice_tensors
from workers.train_step import Trainee

OPTIONS = TrainingOptions(steps=40, learning_rate=1e-3, weight_decay=0.1, schedule="cosine", warmup_steps=4)
State = dict[str, list[Tensor]]


def rate(step: int) -> float:
    return learning_rate(step, 40, OPTIONS)


class Run:
    """A model whose gradients never change."""

    def __init__(self, model: PreTrainedModel, layers: tuple[Layer, ...]) -> None:
        self.model, self.layers = model, layers
        self.optimizer = build_optimizer(model, OPTIONS)
        self.step = 0
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.views = {
            layer.name: slice_tensors(cut(layer, model, 0, 1), layer, model, self.optimizer) for layer in layers
        }

    def train_to(self, step: int) -> None:
        while self.step < step:
            self.step += 1
            set_learning_rate(self.optimizer, rate(self.step))
            self.optimizer.step()

    def state(self) -> State:
        return {name: [view.tensor.clone() for view in views] for name, views in self.views.items()}

    def fill(self, states: Mapping[int, State], restored: Mapping[str, int]) -> None:
        """As a restore does: the newest layers last."""
        for name, step in sorted(restored.items(), key=lambda item: item[1]):
            for view, value in zip(self.views[name], states[step][name], strict=True):
                view.tensor.copy_(value)


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2"])
def test_with_a_gradient_that_never_changes_it_is_what_training_would_have_done(kind: str) -> None:
    model = tiny(kind)
    run = Run(model, split(model))
    assert sum(layer.name.startswith("embedding.") for layer in run.layers) > 1
    states = {}
    for step in (3, 7, 12, 20):
        run.train_to(step)
        states[step] = run.state()
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps = (3, 7, 12, 20)
    restored = {layer.name: steps[index % 4] for index, layer in enumerate(run.layers)}
    run.fill(states, restored)
    stale = max((p - trained[name]).abs().max().item() for name, p in model.named_parameters())
    moments = {
        name: [view.tensor.clone() for view in views if view.kind != "param"] for name, views in run.views.items()
    }
    predict_weights(restored, run.layers, model, run.optimizer, rate)
    wrong = max((p - trained[name]).abs().max().item() for name, p in model.named_parameters())
    assert stale > 5e-3
    assert wrong < 2e-5  # of weight decay only its first order is taken
    for name, before in moments.items():
        after = [view.tensor for view in run.views[name] if view.kind != "param"]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_layers_of_the_newest_step_or_of_the_base_version_stay_bitwise() -> None:
    model = tiny("llama")
    run = Run(model, find_layers(model))
    base = run.state()
    run.train_to(6)
    states = {0: base, 6: run.state()}
    restored = {layer.name: 6 * (index % 2) for index, layer in enumerate(run.layers)}
    run.fill(states, restored)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    predict_weights(restored, run.layers, model, run.optimizer, rate)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_frozen_layers_stay_and_bfloat16_weights_move() -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    model.lm_head.requires_grad_(False)
    run = Run(model, find_layers(model))
    run.train_to(8)
    frozen = model.lm_head.weight.detach().clone()
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    restored = {layer.name: 8 if layer.name == "embedding" else 5 for layer in run.layers}
    predict_weights(restored, run.layers, model, run.optimizer, rate)
    assert torch.equal(model.lm_head.weight, frozen)
    moved = model.model.layers[0].mlp.up_proj.weight - before
    assert 0.5 * 3 * rate(7) < moved.float().abs().mean() < 2 * 3 * rate(7)


def test_rows_without_moments_stay_and_nothing_is_divided_by_zero() -> None:
    model = tiny("llama")
    weight = model.model.embed_tokens.weight
    layers = (Layer("embedding", (ElementRange(tensor="model.embed_tokens.weight", first=0, count=96 * 32),), ()),)
    optimizer = build_optimizer(model, TrainingOptions(steps=40))
    take_steps(model, optimizer)
    for kind in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][kind][5:9] = 0  # tokens that no batch has had
    before = weight.detach().clone()
    predict_weights({"embedding": 2, "block-00": 9}, layers, model, optimizer, rate)
    assert torch.equal(weight[5:9], before[5:9])
    assert torch.isfinite(weight).all()
    assert not torch.equal(weight, before)


class Pull(nn.Module):
    """Logits that are one word's weight: its loss falls as that grows, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Parameter(torch.zeros(4))
        self.far = nn.Parameter(torch.zeros(4))

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=(self.near + self.far).expand(*input_ids.shape, 4))


@pytest.mark.parametrize(("momentum", "is_better"), [(-0.5, True), (0.5, False), (math.nan, False)])
def test_the_loss_of_the_next_samples_decides(group_of_one: None, momentum: float, is_better: bool) -> None:
    examples = Examples(
        tokens=np.full(12, 2, dtype=np.int32), targets=np.array([False, True, True] * 4), offsets=np.arange(0, 13, 3)
    )
    model = Pull()
    layers = [Layer(name, (ElementRange(tensor=name, first=0, count=4),), ()) for name in ("near", "far")]
    options = TrainingOptions(steps=40, global_batch=2, micro_batch=1, learning_rate=0.1, precision="float32")
    optimizer = build_optimizer(model, options)
    for parameter in (model.near, model.far):
        state = optimizer.state[parameter]
        state["step"].fill_(5)
        state["exp_avg"][2] = momentum
        state["exp_avg_sq"].fill_(1e-3)
    trainee = Trainee(DistributedDataParallel(model), optimizer, options, torch.device("cpu"), pad_id=0)
    found = predict_if_better({"near": 9, "far": 5}, layers, trainee, examples, rate, None)
    assert found is not None
    assert found.is_better == is_better
    assert found.stored == pytest.approx(math.log(4))
    assert (model.far[2] > 0) == is_better
    assert torch.count_nonzero(model.far) == int(is_better)
    assert torch.count_nonzero(model.near) == 0
    assert predict_if_better({"near": 9, "far": 8}, layers, trainee, examples, rate, None) is None, "not worth it"
    assert predict_if_better({"near": 9, "far": 0}, layers, trainee, examples, rate, None) is None
