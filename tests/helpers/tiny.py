"""A model folder and data so small that a test makes its own, without a network, in well under a second."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.configuration_utils import PretrainedConfig

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, plus pad (0), start (1), end (2) and the `special` tokens."""
    tokens = [PAD, START, END, *special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*tokens, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens(tokens)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=START, eos_token=END, chat_template=chat_template
    )


def tiny_llama_config(**changes: Any) -> LlamaConfig:
    """Two blocks of width 16 with tied embeddings, for `tiny_tokenizer`."""
    settings: dict[str, Any] = {
        "vocab_size": len(tiny_tokenizer()),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**(settings | changes))


def write_tiny_model(
    folder: Path, *, weights: bool = False, seed: int = 0, config: PretrainedConfig | None = None
) -> Path:
    """Write config and tokenizer, with `weights` also random float32 weights; returns `folder`.

    `config` may be of any architecture; by default it is `tiny_llama_config()`.
    """
    config = config or tiny_llama_config()
    tiny_tokenizer().save_pretrained(folder)
    if weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def tiny_conversations(rows: int) -> list[list[dict[str, str]]]:
    """Chat examples of different lengths, all different."""
    return [
        [
            {"role": "user", "content": f"{index} + {index % 7}?"},
            {"role": "assistant", "content": f"{index + index % 7}" + "!" * (index % 5)},
        ]
        for index in range(rows)
    ]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write one JSON value a line; returns `path`."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tiny_chat(path: Path, rows: int = 32) -> Path:
    """Write `rows` chat examples in column `messages`, each under 48 tokens; returns `path`."""
    return write_jsonl(path, [{"messages": messages} for messages in tiny_conversations(rows)])
