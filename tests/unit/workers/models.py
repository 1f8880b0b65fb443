"""Tiny random models of many architectures."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from storage.options import CheckpointOptions
from workers.layers import Layer, find_layers
from workers.split import split_layers

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SMALL},
    "llama-tied": {"model_type": "llama", **_SMALL, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_SMALL, "head_dim": 8},
    "gemma3": {"model_type": "gemma3_text", **_SMALL, "head_dim": 8},
    "mistral": {"model_type": "mistral", **_SMALL},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {"model_type": "gpt_neox", **_SMALL},
    "phi3": {"model_type": "phi3", **_SMALL},
    "olmo2": {"model_type": "olmo2", **_SMALL},
    "mixtral": {"model_type": "mixtral", **_SMALL, **_EXPERTS},
    "qwen3_moe": {"model_type": "qwen3_moe", **_SMALL, **_EXPERTS, "head_dim": 8},
    "olmoe": {"model_type": "olmoe", **_SMALL, **_EXPERTS},
    # Persistent buffers in its blocks, and blocks of two kinds.
    "deepseek_v3": {
        "model_type": "deepseek_v3", **_SMALL, "num_key_value_heads": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
    # A second tower with a longer list of blocks, before the decoder.
    "gemma3-vision": {
        "model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **_SMALL, "head_dim": 8},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": 28, "patch_size": 14,
        },
    },
}  # fmt: skip


def config(kind: str) -> Any:
    """Configuration of one of `CONFIGS`."""
    fields = dict(CONFIGS[kind])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def tiny(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model of one of `CONFIGS`."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(kind), dtype=dtype)


def split(model: PreTrainedModel, budget: float | str = "1/30") -> tuple[Layer, ...]:
    """Its layers, as they are under a write budget."""
    return split_layers(find_layers(model), model, CheckpointOptions(write_budget=budget), "float32")


def take_steps(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 0) -> None:
    """Real optimizer steps on random tokens."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # dropout
    for _ in range(steps):
        tokens = torch.randint(3, 90, (2, 12), generator=generator).to(next(model.parameters()).device)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
