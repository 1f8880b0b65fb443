from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from storage.records import ElementRange
from tests.unit.workers.models import split, take_steps, tiny
from workers.layers import Layer, find_layers
from workers.optimizer import build_optimizer, learning_rate, set_learning_rate
from workers.options import TrainingOptions
from workers.prediction import predict_weights
from workers.slices import cut
from workers.state import slice_tensors

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
