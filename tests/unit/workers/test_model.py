import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from storage.errors import SpecError
from tests.unit.workers.models import CONFIGS, config, tiny
from workers.layers import find_layers, persistent_buffers
from workers.model import base_digest, build_meta_model, build_model, load_tokenizer
from workers.options import DataOptions, ModelOptions
from workers.state import planned_layer_bytes

CHAT = DataOptions(path="x.jsonl", messages_column="messages")
PAIRS = DataOptions(path="x.jsonl", prompt_column="q", answer_column="a")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama", seed=9).save_pretrained(tmp_path)
    return tmp_path


def save_tokenizer(folder: Path, **special: Any) -> None:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "a": 4}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), **special
    ).save_pretrained(folder)


def shapes(model: Any) -> dict[str, tuple[Any, ...]]:
    tensors = [*model.named_parameters(), *((name, model.get_buffer(name)) for name in persistent_buffers(model))]
    return {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors}


def test_pretrained_weights_are_loaded(folder: Path) -> None:
    model = build_model(ModelOptions(path=str(folder)), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny("llama", seed=9).parameters(), strict=True))
    assert model.training
    assert not model.config.use_cache
    assert not model.is_gradient_checkpointing
    assert all(p.is_contiguous() for p in model.parameters())


def test_random_weights_depend_on_the_seed_alone(folder: Path) -> None:
    options = ModelOptions(path=str(folder), weights="random")
    digests = []
    for seed in (1, 1, 2):
        torch.rand(3)
        state = torch.get_rng_state()
        model = build_model(options, seed)
        assert torch.equal(state, torch.get_rng_state())
        digests.append(base_digest(model, find_layers(model)))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_meta_model_has_the_same_names_shapes_and_layers(kind: str, dtype: Any, tmp_path: Path) -> None:
    tiny(kind).save_pretrained(tmp_path)
    for weights in ("random", "pretrained"):
        options = ModelOptions(path=str(tmp_path), weights=weights, dtype=dtype)  # type: ignore[arg-type]
        model, meta = build_model(options, 0), build_meta_model(options)
        assert {p.device.type for p in meta.parameters()} == {"meta"}
        assert shapes(meta) == shapes(model)
        assert find_layers(meta) == find_layers(model)
        layers = find_layers(model)
        assert [planned_layer_bytes(x, meta) for x in layers] == [planned_layer_bytes(x, model) for x in layers]


def test_gradient_checkpointing_attention_and_freezing_are_applied(folder: Path) -> None:
    options = ModelOptions(
        path=str(folder),
        gradient_checkpointing=True,
        attention="eager",
        freeze=["model.layers.1", "model.embed_tokens."],
    )
    model = build_model(options, 0)
    assert model.is_gradient_checkpointing
    assert model.config._attn_implementation == "eager"
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        name for name, _ in model.named_parameters() if name.startswith(("model.layers.1.", "model.embed_tokens"))
    }
    assert shapes(build_meta_model(options)) == shapes(model)
    tokens = torch.randint(3, 90, (1, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_digest_sees_every_tensor(folder: Path) -> None:
    model = tiny("deepseek_v3", dtype=torch.bfloat16)
    layers = find_layers(model)
    seen = {base_digest(model, layers)}
    names = [name for layer in layers for name in (*(held.tensor for held in layer.params), *layer.buffers)]
    for name in names:
        tensor = model.state_dict()[name]
        tensor.view(-1)[-1] += 1
        seen.add(base_digest(model, layers))
    assert len(seen) == len(names) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"freeze": ["model.layer"]}, r"model\.freeze: .*got 'model\.layer', which matches nothing"),
        ({"freeze": ["model", "lm_head"]}, r"model\.freeze: expected something left to train"),
        ({"attention": "flash_attention_2"}, r"model\.attention: .*flash"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        build_model(ModelOptions(path=str(folder), **change), 0)
    assert "\n" not in str(caught.value)


def empty(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def broken_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nonsense" * 10)


def too_few_weights(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 3}))


def other_shapes(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "intermediate_size": 64}))


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_kind(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')


def no_causal_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "vit"}')


def needs_code(folder: Path) -> None:
    auto_map = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "auto_map": auto_map}))
    for name in ("configuration_x.py", "modeling_x.py"):
        (folder / name).write_text("raise SystemExit('code from the model folder was run')")


@pytest.mark.parametrize(
    "damage",
    [
        empty,
        no_weights,
        broken_weights,
        too_few_weights,
        other_shapes,
        broken_config,
        unknown_kind,
        no_causal_model,
        needs_code,
    ],
)
def test_folder_that_is_no_model_is_refused_in_one_line(folder: Path, damage: Any) -> None:
    damage(folder)
    with pytest.raises(SpecError, match=r"^model\.path: expected .* got .*; .*") as caught:
        build_model(ModelOptions(path=str(folder)), 0)
    print(caught.value)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./nowhere", "a/b/c", "no-such-org/no-such-model", "nosuchmodel", ""]
)
def test_model_that_does_not_exist_is_refused_quickly(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    options = ModelOptions(path=path)
    for call in (
        lambda: build_meta_model(options),
        lambda: build_model(options, 0),
        lambda: load_tokenizer(options, PAIRS),
    ):
        with pytest.raises(SpecError, match=r"^model\.path: expected .* got ") as caught:
            call()
        print(caught.value)
        assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 10


def test_tokenizer_falls_back_to_the_end_of_text_for_padding(folder: Path) -> None:
    save_tokenizer(folder, eos_token="</s>", unk_token="<unk>")
    assert load_tokenizer(ModelOptions(path=str(folder)), PAIRS).pad_token == "</s>"
    save_tokenizer(folder, pad_token="<pad>", eos_token="</s>")
    assert load_tokenizer(ModelOptions(path=str(folder)), PAIRS).pad_token == "<pad>"


def test_tokenizer_without_any_token_to_pad_with_is_refused(folder: Path) -> None:
    save_tokenizer(folder)
    with pytest.raises(SpecError, match=r"model\.path: expected a tokenizer with a pad"):
        load_tokenizer(ModelOptions(path=str(folder)), PAIRS)


def test_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"^model\.path: ") as caught:
        load_tokenizer(ModelOptions(path=str(folder)), PAIRS)
    assert "\n" not in str(caught.value)


def test_chat_template(folder: Path) -> None:
    save_tokenizer(folder, eos_token="</s>")
    options = ModelOptions(path=str(folder))
    assert load_tokenizer(options, PAIRS).chat_template is None
    with pytest.raises(SpecError, match=r"data\.chat_template: expected a chat template for data\.messages_column"):
        load_tokenizer(options, CHAT)
    given = CHAT.model_copy(update={"chat_template": "{{ messages[0].content }}"})
    tokenizer = load_tokenizer(options, given)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"


def test_configuration_alone_is_enough_for_random_weights(tmp_path: Path) -> None:
    config("llama-tied").save_pretrained(tmp_path)
    options = ModelOptions(path=str(tmp_path), weights="random")
    with pytest.raises(SpecError):
        build_model(options.model_copy(update={"weights": "pretrained"}), 0)
    assert find_layers(build_model(options, 0)) == find_layers(build_meta_model(options))
