from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from storage.errors import CorruptObjectError, LayerCheckError
from tests.unit.workers.models import CONFIGS, split, take_steps, tiny
from workers.layers import Layer, find_layers, persistent_buffers
from workers.optimizer import build_optimizer
from workers.options import TrainingOptions
from workers.slices import cut
from workers.state import (
    StateTensor,
    dtype_name,
    fill,
    from_numpy,
    layer_bytes,
    planned_layer_bytes,
    slice_tensors,
    to_numpy,
)

OPTIONS = TrainingOptions(steps=2, learning_rate=1e-2, weight_decay=0.1)
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)


def everything(
    model: Any, optimizer: torch.optim.Optimizer, world_size: int, layers: Sequence[Layer] = ()
) -> list[StateTensor]:
    return [
        part
        for layer in layers or find_layers(model)
        for rank in range(world_size)
        for part in slice_tensors(cut(layer, model, rank, world_size), layer, model, optimizer)
    ]


def bits(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    tensors = dict(model.named_parameters())
    tensors |= {name: model.get_buffer(name) for name in persistent_buffers(model)}
    for name, parameter in model.named_parameters():
        tensors |= {f"{name} {kind}": value for kind, value in optimizer.state[parameter].items()}
    return {name: to_numpy(tensor.detach().cpu().reshape(-1)).tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("world_size", "budget"), [(1, 1), (2, "1/30"), (3, 1), (5, "1/7")])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_element_has_exactly_one_owner(kind: str, world_size: int, budget: float | str) -> None:
    model = tiny(kind)
    optimizer = build_optimizer(model, OPTIONS)
    layers = split(model, budget)
    owners: Counter[tuple[str, str, int]] = Counter()
    for part in everything(model, optimizer, world_size, layers):
        owners.update((part.name, part.kind, part.first + offset) for offset in range(part.tensor.numel()))
    expected = 0
    for name, parameter in model.named_parameters():
        expected += 3 * parameter.numel()
        # Each part of a split tensor stores its `step`.
        assert owners.pop((name, "step", 0)) == sum(held.tensor == name for layer in layers for held in layer.params)
    expected += sum(model.get_buffer(name).numel() for name in persistent_buffers(model))
    assert set(owners.values()) == {1}
    assert len(owners) == expected


def test_ranks_share_evenly_and_the_first_owns_the_scalars() -> None:
    model = tiny("llama")
    for layer in find_layers(model):
        slices = [cut(layer, model, rank, 5) for rank in range(5)]
        sizes = [sum(owned.count for owned in slice.ranges) for slice in slices]
        assert max(sizes) - min(sizes) <= 1
        assert [slice.owns_scalars for slice in slices] == [True, False, False, False, False]


def test_more_ranks_than_elements_leave_some_without_any() -> None:
    model = tiny("llama")
    layer = find_layers(model, {"norm": ["model.norm"], "rest": ["model.embed_tokens", "model.layers", "lm_head"]})[-1]
    assert layer.name == "norm"
    sizes = [sum(owned.count for owned in cut(layer, model, rank, 50).ranges) for rank in range(50)]
    assert sum(sizes) == 32
    assert set(sizes) == {0, 1}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_save_and_restore_give_back_every_bit(kind: str, dtype: torch.dtype, device: str) -> None:
    model = tiny(kind, dtype=dtype).to(device)
    optimizer = build_optimizer(model, OPTIONS)
    take_steps(model, optimizer)
    for name in persistent_buffers(model):
        torch.nn.init.normal_(model.get_buffer(name))
    world_size = 3
    stored = [
        (part.name, part.kind, part.first, dtype_name(part.tensor), to_numpy(part.tensor.cpu()).copy())
        for part in everything(model, optimizer, world_size, split(model))
    ]
    other = tiny(kind, seed=1, dtype=dtype).to(device)
    other_optimizer = build_optimizer(other, OPTIONS)
    wanted = bits(model, optimizer)
    assert bits(other, other_optimizer) != wanted
    for name, state_kind, first, stored_dtype, array in stored:
        array.flags.writeable = False
        fill(other, other_optimizer, name, state_kind, first, from_numpy(array, stored_dtype))
    assert bits(other, other_optimizer) == wanted
    if device == "cpu":
        take_steps(model, optimizer, steps=1, seed=7)
        take_steps(other, other_optimizer, steps=1, seed=7)
        assert bits(other, other_optimizer) == bits(model, optimizer)


def test_state_is_a_view_of_the_live_tensors() -> None:
    model = tiny("gpt2")
    optimizer = build_optimizer(model, OPTIONS)
    part = next(part for part in everything(model, optimizer, 2) if part.kind == "exp_avg")
    part.tensor.fill_(5)
    assert optimizer.state[model.get_parameter(part.name)]["exp_avg"].view(-1)[part.first] == 5


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.NAdam(p, lr=0.1),
    lambda p: torch.optim.Adafactor(p, lr=0.1),
])  # fmt: skip
def test_other_optimizers_are_kept_whole(make: Any) -> None:
    runs = []
    for seed in (0, 1):
        model = tiny("llama-tied", seed=seed)
        optimizer = make(model.parameters())
        take_steps(model, optimizer, seed=seed)
        runs.append((model, optimizer))
    (model, optimizer), (other, other_optimizer) = runs
    for name, kind, first, values in everything(model, optimizer, 3):
        fill(other, other_optimizer, name, kind, first, values.clone())
    assert bits(other, other_optimizer) == bits(model, optimizer)


def test_optimizer_state_that_is_no_tensor_is_refused() -> None:
    model = tiny("llama")
    optimizer = build_optimizer(model, OPTIONS)
    optimizer.state[model.lm_head.weight]["step"] = 3
    with pytest.raises(
        LayerCheckError, match=r"lm_head\.weight \(step\): expected the optimizer to keep tensors, got int"
    ):
        everything(model, optimizer, 1)


@pytest.mark.parametrize(
    ("name", "kind", "first", "values", "error", "message"),
    [
        ("lm_head.bias", "param", 0, torch.zeros(1), LayerCheckError, "one it lacks"),
        ("model.norm.weight", "buffer", 0, torch.zeros(1), LayerCheckError, "one it lacks"),
        (
            "model.norm.weight",
            "momentum",
            0,
            torch.zeros(1),
            LayerCheckError,
            r"keeps of it \(step, exp_avg, exp_avg_sq\)",
        ),
        ("model.norm.weight", "param", 0, torch.zeros(1).double(), LayerCheckError, "expected float32, got float64"),
        ("model.norm.weight", "param", 30, torch.zeros(3), CorruptObjectError, "run of its 32 elements"),
        ("model.norm.weight", "param", -1, torch.zeros(1), CorruptObjectError, "from element -1"),
        ("model.norm.weight", "exp_avg", 0, torch.zeros(33), CorruptObjectError, "got 33 from element 0"),
    ],
)
def test_fill_refuses_what_does_not_fit(
    name: str, kind: str, first: int, values: torch.Tensor, error: type[Exception], message: str
) -> None:
    model = tiny("llama")
    optimizer = build_optimizer(model, OPTIONS)
    before = bits(model, optimizer)
    with pytest.raises(error, match=message) as caught:
        fill(model, optimizer, name, kind, first, values)
    assert "\n" not in str(caught.value)
    assert bits(model, optimizer) == before


@pytest.mark.parametrize("freeze", [(), ("model.layers.1", "model.embed_tokens"), ("model.layers.1.mlp",)])
@pytest.mark.parametrize("kind", ["deepseek_v3", "llama-tied", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_bytes_are_the_real_bytes(kind: str, freeze: tuple[str, ...], dtype: torch.dtype) -> None:
    model = tiny(kind, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(freeze) if freeze else True)
    optimizer = build_optimizer(model, OPTIONS)
    layers = (*find_layers(model), *split(model))
    planned = [planned_layer_bytes(layer, model) for layer in layers]
    assert planned == [layer_bytes(layer, model, optimizer) for layer in layers]
    take_steps(model, optimizer)
    assert planned == [layer_bytes(layer, model, optimizer) for layer in layers]
    assert (0 in planned) == ("model.layers.1" in freeze)


def test_frozen_parameters_are_in_no_slice() -> None:
    model = tiny("deepseek_v3")
    model.model.layers[1].requires_grad_(False)
    model.lm_head.requires_grad_(False)
    names = {part.name for part in everything(model, build_optimizer(model, OPTIONS), 2)}
    assert "model.norm.weight" in names
    assert not any(name.startswith(("model.layers.1.", "lm_head")) for name in names)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_numpy_round_trip_shares_memory(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 2, 0], dtype=torch.float32).to(dtype)
    array = to_numpy(tensor)
    assert array.dtype != np.dtype(object)
    assert array.nbytes == tensor.nbytes
    back = from_numpy(array, dtype_name(tensor))
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()
    if dtype == torch.bfloat16:
        assert array.dtype == np.uint16


@pytest.mark.parametrize("dtype", ["float64", "load", "nonsense", "bfloat16"])
def test_from_numpy_refuses_another_width_or_no_type(dtype: str) -> None:
    with pytest.raises(CorruptObjectError, match="expected elements of 4 bytes"):
        from_numpy(np.zeros(4, np.float32), dtype)
