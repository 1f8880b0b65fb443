import pytest
import torch

from tests.unit.workers.models import take_steps, tiny
from workers.optimizer import build_optimizer, learning_rate, set_learning_rate
from workers.options import TrainingOptions

OPTIONS = TrainingOptions(steps=10, learning_rate=1e-2, weight_decay=0.1, schedule="cosine", warmup_steps=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_made_beforehand_trains_bitwise_as_state_made_at_the_first_step(dtype: torch.dtype) -> None:
    models = []
    for lazy in (False, True):
        model = tiny("gpt2", dtype=dtype)
        optimizer = build_optimizer(model, OPTIONS)
        if lazy:
            made = {p: {kind: (t.shape, t.dtype) for kind, t in state.items()} for p, state in optimizer.state.items()}
            optimizer.state.clear()
        take_steps(model, optimizer, steps=3)
        if lazy:
            assert made == {p: {kind: (t.shape, t.dtype) for kind, t in s.items()} for p, s in optimizer.state.items()}
        models.append((model, optimizer))
    (model, optimizer), (other, other_optimizer) = models
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for kind, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][kind]), kind


def test_decay_is_on_matrices_only_and_frozen_parameters_are_left_out() -> None:
    model = tiny("llama")
    model.lm_head.requires_grad_(False)
    optimizer = build_optimizer(model, OPTIONS)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(decays[p] == (0.1 if p.ndim >= 2 else 0.0) for p in decays)
    assert set(decays) == {p for p in model.parameters() if p.requires_grad} == set(optimizer.state)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1, 2 / 3, 1 / 3]),
        ("cosine", 1, [1, 0.853553, 0.5, 0.146447]),
        ("cosine", 8, [0.125, 0.25, 0.375, 0.5]),
    ],
)
def test_learning_rate(schedule: str, warmup: int, expected: list[float]) -> None:
    options = TrainingOptions.model_validate(
        {"steps": 4, "learning_rate": 1.0, "schedule": schedule, "warmup_steps": warmup}
    )
    assert [learning_rate(step, 4, options) for step in range(1, 5)] == pytest.approx(expected, abs=1e-6)


def test_learning_rate_is_set_in_every_group() -> None:
    optimizer = build_optimizer(tiny("llama"), OPTIONS)
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
