import re

import pytest
from torch import nn

from storage.errors import SpecError
from tests.unit.workers.models import CONFIGS, tiny
from workers.layers import Layer, find_layers, has_prefix


def names(layer: Layer) -> tuple[str, ...]:
    return tuple(held.tensor for held in layer.params)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_and_persistent_buffer_is_in_exactly_one_layer(kind: str) -> None:
    model = tiny(kind)
    layers = find_layers(model)
    assert {held.first for layer in layers for held in layer.params} == {0}
    covered = [(held.tensor, held.count) for layer in layers for held in layer.params]
    assert sorted(covered) == sorted((name, parameter.numel()) for name, parameter in model.named_parameters())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = {id(tensors[name]) for layer in layers for name in names(layer) + layer.buffers}
    assert held == {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    assert sum(len(layer.params) + len(layer.buffers) for layer in layers) == len(held)


@pytest.mark.parametrize("kind", CONFIGS)
def test_names_say_what_is_in_a_layer(kind: str) -> None:
    model = tiny(kind)
    layers = {layer.name: layer for layer in find_layers(model)}
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    expected = ["embedding", "block-00", "block-01"] + ([] if tied else ["head"])
    assert list(layers) == expected
    for index in (0, 1):
        for name in names(layers[f"block-0{index}"]):
            assert re.search(rf"\.(layers|h)\.{index}\.", name)
            assert "vision" not in name
    rest = names(layers["embedding"]) + (() if tied else names(layers["head"]))
    assert not any(re.search(r"^(?!.*vision).*\.(layers|h)\.\d", name) for name in rest)
    last = names(layers["embedding" if tied else "head"])
    assert any(re.search(r"(?<!vision_tower)\.(norm|ln_f|final_layer_norm)\.weight$", name) for name in last)


def test_position_embeddings_go_with_the_embedding() -> None:
    assert "transformer.wpe.weight" in names(find_layers(tiny("gpt2"))[0])


def test_persistent_buffers_of_a_block_are_in_its_layer() -> None:
    layers = find_layers(tiny("deepseek_v3"))
    assert [layer.buffers for layer in layers] == [(), (), ("model.layers.1.mlp.gate.e_score_correction_bias",), ()]


def test_a_buffer_that_is_not_saved_is_in_no_layer() -> None:
    model = tiny("llama")
    model.model.register_buffer("unsaved", model.model.norm.weight.detach().clone(), persistent=False)
    assert not any("unsaved" in name for layer in find_layers(model) for name in layer.buffers)


def test_prefixes_are_whole_parts() -> None:
    assert has_prefix("a.1.b", "a.1")
    assert has_prefix("a.1", "a.1")
    assert has_prefix("a.1.b", "a.1.")
    assert not has_prefix("a.10.b", "a.1")


def test_override_is_used_in_model_order() -> None:
    layers = find_layers(
        tiny("llama"), {"rest": ["model.norm", "lm_head"], "blocks": ["model.layers"], "e": ["model.embed_tokens"]}
    )
    assert [layer.name for layer in layers] == ["e", "blocks", "rest"]
    assert names(layers[2]) == ("model.norm.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"a": ["model"]}, r"got lm_head\.weight: it is in none"),
        ({"a": ["model", "lm_head"], "b": ["model.norm"]}, r"got model\.norm\.weight: it is in a and b"),
        ({"a": ["model", "lm_head", "modell"]}, r"model\.layers\.a: .*got 'modell', which matches nothing"),
        ({"a/b": ["model", "lm_head"]}, r"expected a layer name of letters.*got 'a/b'"),
        ({"a.00": ["model", "lm_head"]}, r"expected a layer name of letters.*got 'a\.00'"),
        ({"a": ["model", "lm_head"], "b": []}, r"model\.layers\.b: .*got none"),
    ],
)
def test_override_that_is_no_partition_is_refused(override: dict[str, list[str]], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        find_layers(tiny("llama"), override)


def test_model_without_blocks_is_refused() -> None:
    model = tiny("llama")
    model.model.layers = nn.Sequential(*model.model.layers)
    with pytest.raises(SpecError, match=r"model\.layers: expected a ModuleList"):
        find_layers(model)
