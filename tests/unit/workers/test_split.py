"""Parts of layers: they cover everything once, are as small as asked, and say nothing of the world size."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from storage.options import CheckpointOptions, parse_write_budget
from storage.records import ElementRange
from tests.unit.workers.models import CONFIGS, config, split, tiny
from workers.layers import Layer, find_layers
from workers.split import split_layers
from workers.state import planned_layer_bytes


def runs_of(layers: tuple[Layer, ...]) -> dict[str, list[tuple[int, int]]]:
    """First and last + 1 element of what layers hold of each tensor."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for held in (held for layer in layers for held in layer.params):
        runs.setdefault(held.tensor, []).append((held.first, held.first + held.count))
    return runs


def check_partition(model: nn.Module, whole: tuple[Layer, ...], layers: tuple[Layer, ...]) -> None:
    """Every element is in exactly one of `layers`, and cut between rows."""
    runs = runs_of(layers)
    assert runs.keys() == {held.tensor for layer in whole for held in layer.params}
    for name, found in runs.items():
        parameter = model.get_parameter(name)
        assert found[0][0] == 0, name
        assert found[-1][1] == parameter.numel(), name
        assert all(end == first for (_, end), (first, _) in pairwise(found)), name
        row = parameter.shape[-1] if parameter.ndim > 1 else parameter.numel()
        assert all(first % row == 0 for first, _ in found if row), name
    assert [name for layer in layers for name in layer.buffers] == [name for layer in whole for name in layer.buffers]
    assert len({layer.name for layer in layers}) == len(layers)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_element_is_in_exactly_one_part_and_no_part_is_larger_than_asked(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(kind))
    whole = find_layers(model)
    longest_row = 3 * max(parameter.shape[-1] * parameter.itemsize for parameter in model.parameters())
    for freeze, budget in product(("nothing", "embed", "norm"), ("1/3", "1/12", "1/200", "50 MB/s")):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(freeze not in name)
        layers = split(model, budget)
        check_partition(model, whole, layers)
        sizes = {layer.name: planned_layer_bytes(layer, model) for layer in whole}
        limit = max(size for name, size in sizes.items() if name.startswith("block-"))
        unit, amount = parse_write_budget(budget)
        if unit == "share":
            limit = min(limit, sum(sizes.values()) * amount)
        assert max(planned_layer_bytes(layer, model) for layer in layers) <= limit + longest_row + 128


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=3), min_size=1, max_size=6),
    st.integers(1, 300),
)
def test_any_shapes_are_cut_between_rows(shapes: list[list[int]], parts: int) -> None:
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.empty(shape)) for i, shape in enumerate(shapes)})
    held = tuple(ElementRange(tensor=name, first=0, count=p.numel()) for name, p in model.items())
    whole = (Layer("all", held, ()),)
    layers = split_layers(whole, model, CheckpointOptions(write_budget=1 / parts), "float32")
    check_partition(model, whole, layers)
    assert len(layers) <= parts + 1
    assert (layers == whole) == (len(layers) == 1)


def smollm2() -> PreTrainedModel:
    """SmolLM2-135M without values."""
    shape = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape)


@pytest.mark.parametrize(
    ("options", "embedding", "block"),
    [
        ({"write_budget": "1/22.6"}, 8, 1),
        ({"write_budget": "1/100"}, 22, 3),
        ({"write_budget": "1/100", "codec": "delta"}, 8, 1),
        ({"write_budget": "50 MB/s"}, 8, 1),
        ({"mode": "full"}, 1, 1),
    ],
)
def test_parts_of_smollm2(options: dict[str, str], embedding: int, block: int) -> None:
    model = smollm2()
    whole = find_layers(model)
    layers = split_layers(whole, model, CheckpointOptions(**options), "float32")
    names = [layer.name for layer in layers]
    assert len(names) == embedding + 30 * block
    if embedding > 1:
        assert names[:2] == ["embedding.00", "embedding.01"]
    check_partition(model, whole, layers)
    sizes = [planned_layer_bytes(layer, model) for layer in layers]
    assert max(sizes) < 1.3 * min(sizes) or options.get("mode") == "full"


def test_a_layer_of_an_override_is_split_by_the_budget_only() -> None:
    model = tiny("llama")
    whole = find_layers(model, {"a": ["model"], "b": ["lm_head"]})
    for budget, count in ((1.0, 2), ("50 MB/s", 2)):
        assert len(split_layers(whole, model, CheckpointOptions(write_budget=budget), "float32")) == count
    parts = split_layers(whole, model, CheckpointOptions(write_budget=0.1), "float32")
    assert [part.name for part in parts if part.name.startswith("b")] == ["b.00", "b.01"]


def test_the_final_norm_stays_whole_in_one_part() -> None:
    runs = runs_of(split(tiny("llama-tied"), "1/40"))
    assert len(runs["model.norm.weight"]) == 1
    assert len(runs["model.embed_tokens.weight"]) > 3
