"""Model and tokenizer from the spec's options."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not in its __all__
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from storage.errors import SpecError
from workers.layers import Layer, has_prefix
from workers.options import DataOptions, ModelOptions
from workers.state import dtype_name, to_numpy

_PROBE_TIMEOUT_S = 5.0


def build_model(options: ModelOptions, seed: int) -> PreTrainedModel:
    """The model as training starts from it, on the CPU, every tensor contiguous, in training mode.

    Random weights are a function of the configuration and `seed` alone. Code that comes with a model is never run.

    Raises:
        SpecError: the model does not exist or cannot be loaded, its weights do not fit it, or `freeze` does not.
    """
    source = _source(options)
    model: PreTrainedModel
    with _as_spec_error(options):
        if options.weights == "random":
            config = AutoConfig.from_pretrained(options.path, **source)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(
                    config, dtype=getattr(torch, options.dtype), attn_implementation=options.attention
                )
        else:
            model = _pretrained(options, source)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    if options.gradient_checkpointing:
        # The re-entrant kind clashes with DDP's hooks.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    _freeze(model, options.freeze)
    model.train()
    return model


def _pretrained(options: ModelOptions, source: dict[str, Any]) -> PreTrainedModel:
    """Load the weights, and refuse what `transformers` only warns of: tensors that it made up."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        options.path,
        dtype=getattr(torch, options.dtype),
        attn_implementation=options.attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **source,
    )
    model: PreTrainedModel
    model, report = loaded
    mismatched = [name for name, *_ in report["mismatched_keys"]]
    made_up = sorted({*report["missing_keys"], *mismatched})
    if made_up:
        raise SpecError(
            f"model.path: expected fitting weights for all of {type(model).__name__}, got {len(made_up)} tensors "
            f"without in {options.path!r}, such as {made_up[0]}; complete the folder, or set model.weights to random"
        )
    return model


def build_meta_model(options: ModelOptions) -> PreTrainedModel:
    """A model with the names, shapes, types and frozen parameters of `build_model`'s, on the meta device.

    Needs the configuration only. Flash attention is not asked for, as the driver may have no GPU.

    Raises:
        SpecError: as `build_model`, but for what only the weights can tell.
    """
    source = _source(options)
    attention = "eager" if options.attention == "flash_attention_2" else options.attention
    with _as_spec_error(options), torch.device("meta"):
        config = AutoConfig.from_pretrained(options.path, **source)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.dtype), attn_implementation=attention
        )
    _freeze(model, options.freeze)
    return model


def load_tokenizer(model: ModelOptions, data: DataOptions) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a pad token, and with `data.chat_template` if one is given.

    Padding falls back to the end-of-text token (it is masked, so its value does not matter). Without any chat template,
    only prompt and answer columns can be used; `chat_template` of the result is then None.

    Raises:
        SpecError: there is no tokenizer, no token to pad with, or no chat template for `data.messages_column`.
    """
    source = _source(model)
    with _as_spec_error(model, "with a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(model.path, **source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise SpecError(
            f"model.path: expected a tokenizer with a pad, end-of-text or unknown token, got none in {model.path!r}; "
            "add one to its tokenizer_config.json"
        )
    if data.chat_template is not None:
        tokenizer.chat_template = data.chat_template
    if tokenizer.chat_template is None and data.messages_column is not None:
        raise SpecError(
            f"data.chat_template: expected a chat template for data.messages_column, got none, and the tokenizer of "
            f"{model.path!r} has none; give one, or use data.prompt_column and data.answer_column"
        )
    return tokenizer


def base_digest(model: PreTrainedModel, layers: Sequence[Layer]) -> str:
    """XXH3-128 (hexadecimal) of name, type, shape and bytes of all parameters and persistent buffers, by layer.

    `layers` are whole ones.
    """
    digest = xxhash.xxh3_128()
    for layer in layers:
        tensors: dict[str, Tensor] = {held.tensor: model.get_parameter(held.tensor) for held in layer.params}
        tensors |= {name: model.get_buffer(name) for name in layer.buffers}
        for name, tensor in tensors.items():
            digest.update(f"{layer.name} {name} {dtype_name(tensor)} {tuple(tensor.shape)}\n".encode())
            digest.update(to_numpy(tensor.detach().cpu().contiguous().view(-1)).data)
    return digest.hexdigest()


def _source(options: ModelOptions) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where from; without a network, the cache only.

    Seen: `transformers` retries an unreachable hub for 23 s for each file it looks for, so one short probe decides.
    """
    folder = Path(options.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SpecError(
                f"model.path: expected a model folder with a config.json, got {options.path!r} without one; "
                "correct the path"
            )
        return {"local_files_only": True}
    try:
        validate_repo_id(options.path)
    except ValueError as error:
        raise SpecError(
            f"model.path: expected a model folder or a hub id such as org/name, got {options.path!r}, "
            "which is neither; correct the path"
        ) from error
    return {"revision": options.revision or "main", "local_files_only": not _hub_answers()}


def _hub_answers() -> bool:
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@contextmanager
def _as_spec_error(options: ModelOptions, what: str = "of a causal language model") -> Iterator[None]:
    """Say in one line what `transformers` says in many, also in its log."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except ImportError as error:
        raise SpecError(
            f"model.attention: expected an implementation that is installed, got {options.attention!r}: "
            f"{_first_line(error)}; install it or choose sdpa"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError, StrictDataclassError) as error:
        raise SpecError(
            f"model.path: expected a folder or hub id {what} that transformers can load, got "
            f"{options.path!r}: {_first_line(error)}; correct the path, or make the hub reachable"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _freeze(model: PreTrainedModel, prefixes: Sequence[str]) -> None:
    named = list(model.named_parameters(remove_duplicate=False))
    for prefix in prefixes:
        matched = [parameter for name, parameter in named if has_prefix(name, prefix)]
        if not matched:
            raise SpecError(
                f"model.freeze: expected a prefix of the parameter names (such as {named[0][0]}), got {prefix!r}, "
                "which matches nothing; correct it"
            )
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise SpecError(
            f"model.freeze: expected something left to train, got all frozen by {list(prefixes)}; freeze less"
        )
