"""Module tree -> layers, for any Hugging Face causal LM."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from storage.errors import SpecError
from storage.records import ElementRange

EMBEDDING = "embedding"
BLOCK = "block"
HEAD = "head"
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # no dot: the name of a layer's part has one


@dataclass(frozen=True)
class Layer:
    """The unit of persistence.

    Tensor names are those of `model.named_parameters()` and `model.named_buffers()`, in that order; a tied weight
    stands once, under the first of its names. `params` are whole parameters, but in a part of a layer (see
    `workers.split`). Buffers are persistent ones only.
    """

    name: str
    params: tuple[ElementRange, ...]
    buffers: tuple[str, ...]


def find_layers(model: PreTrainedModel, override: Mapping[str, Sequence[str]] | None = None) -> tuple[Layer, ...]:
    """Split a model into layers, in model order: `embedding`, `block-00`, `block-01`, ..., `head`.

    Every parameter and every persistent buffer is in exactly one layer. What stands before the blocks in the module
    tree goes with the embedding, what stands after them (the final norm) with the head; a model whose head is tied to
    the embedding has no layer `head`, and the embedding takes it all.

    Args:
        model: on any device, meta included; not wrapped in DDP.
        override: layer name -> prefixes of module or parameter names (whole dotted parts), in place of all this.

    Raises:
        SpecError: no blocks are found, or `override` does not cover everything exactly once.
    """
    owners = _overridden(model, override) if override is not None else _found(model)
    params: dict[str, list[ElementRange]] = {}
    buffers: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        params.setdefault(owners[name], []).append(ElementRange(tensor=name, first=0, count=parameter.numel()))
    for name in persistent_buffers(model):
        buffers.setdefault(owners[name], []).append(name)
    order = dict.fromkeys(owners.values())
    if override is None:
        order = dict.fromkeys(sorted(order, key=lambda layer: (layer == HEAD, layer != EMBEDDING)))
    return tuple(Layer(name, tuple(params.get(name, ())), tuple(buffers.get(name, ()))) for name in order)


def has_prefix(name: str, prefix: str) -> bool:
    """Whether `prefix` is `name`, or its leading dotted parts: `layers.1` is no prefix of `layers.10.weight`."""
    return f"{name}.".startswith(f"{prefix.rstrip('.')}.")


def persistent_buffers(model: nn.Module) -> tuple[str, ...]:
    """Names of the buffers that a state dict holds, each tensor once."""
    saved = model.state_dict().keys()
    return tuple(name for name, _ in model.named_buffers() if name in saved)


def _tensors(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs (module name, parameter or persistent buffer name), in module order, each tensor once."""
    names = {name for name, _ in model.named_parameters()} | set(persistent_buffers(model))
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for leaf in [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]:
            if prefix + leaf in names:
                yield module_name, prefix + leaf


def _found(model: PreTrainedModel) -> dict[str, str]:
    """Tensor name -> layer name, in module order."""
    blocks = _blocks(model)
    width = max(2, len(str(max(blocks.values()))))
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    after = EMBEDDING if tied else HEAD
    owners: dict[str, str] = {}
    past_blocks = False
    for module_name, tensor_name in _tensors(model):
        index = next((index for block, index in blocks.items() if has_prefix(module_name, block)), None)
        if index is not None:
            past_blocks = True
            owners[tensor_name] = f"{BLOCK}-{index:0{width}d}"
            continue
        module = model.get_submodule(module_name)
        if module is embedding:
            owners[tensor_name] = EMBEDDING
        else:
            owners[tensor_name] = after if past_blocks or module is head else EMBEDDING
    return owners


def _blocks(model: PreTrainedModel) -> dict[str, int]:
    """Module name -> block index, for every module that is (a part of) a transformer block.

    The decoder is the smallest module around the token embedding that holds a `ModuleList`, so that the vision tower of
    a multimodal model is none of it. Of the outermost lists in there, those with one entry per hidden layer
    are the blocks; several such lists are parts of the same blocks.
    """
    embedding = model.get_input_embeddings()
    path = next((name for name, module in model.named_modules() if module is embedding), "")
    while path:
        path = path.rpartition(".")[0]
        lists = _outermost_lists(model, path)
        if lists:
            count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
            fitting = {name: size for name, size in lists.items() if size == count} or lists
            return {f"{name}.{index}": index for name, size in fitting.items() for index in range(size)}
    raise SpecError(
        f"model.layers: expected a ModuleList of transformer blocks beside the token embedding, found none in "
        f"{type(model).__name__}; name the layers in model.layers"
    )


def _outermost_lists(model: nn.Module, path: str) -> dict[str, int]:
    """Full name -> length of the non-empty `ModuleList`s under `path` that are in no other `ModuleList`."""
    found: dict[str, int] = {}
    for name, module in model.get_submodule(path).named_modules():
        full = f"{path}.{name}" if path and name else path or name
        if isinstance(module, nn.ModuleList) and len(module) and not any(has_prefix(full, outer) for outer in found):
            found[full] = len(module)
    return found


def _overridden(model: nn.Module, override: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Tensor name -> layer name, in module order; refuses an override that is no partition."""
    names = [tensor_name for _, tensor_name in _tensors(model)]
    for layer, prefixes in override.items():
        if not _SAFE_NAME.fullmatch(layer):
            raise SpecError(
                f"model.layers: expected a layer name of letters, digits, '_' and '-', got {layer!r}; rename it"
            )
        if not prefixes:
            raise SpecError(f"model.layers.{layer}: expected at least one prefix, got none; add one or drop the layer")
        for prefix in prefixes:
            if not any(has_prefix(name, prefix) for name in names):
                raise SpecError(
                    f"model.layers.{layer}: expected a prefix of the model's names (such as {names[0]}), "
                    f"got {prefix!r}, which matches nothing; correct it"
                )
    owners: dict[str, str] = {}
    for name in names:
        takers = [layer for layer, prefixes in override.items() if any(has_prefix(name, prefix) for prefix in prefixes)]
        if len(takers) != 1:
            got = f"it is in {' and '.join(takers)}" if takers else "it is in none"
            raise SpecError(
                f"model.layers: expected every tensor in exactly one layer, got {name}: {got}; correct the prefixes"
            )
        owners[name] = takers[0]
    return owners
