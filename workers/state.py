"""The layer state as named flat views of the live tensors, and back."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from storage.codecs import Base
from storage.errors import CorruptObjectError, LayerCheckError
from workers.layers import Layer
from workers.slices import Slice, cut, trainable, trained_bytes

PARAM = "param"
BUFFER = "buffer"
STEP = "step"
_STEP_BYTES = 4  # torch keeps AdamW's `step` as one float32 per parameter
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class StateTensor(NamedTuple):
    """A flat run of elements of one tensor of a layer state.

    `name` is the parameter's or buffer's name; `kind` is `param`, `buffer`, or the name of the optimizer's state for
    this parameter; `first` is the index of the first element in the flattened tensor; `tensor` is 1-D and shares
    memory with the model or the optimizer.
    """

    name: str
    kind: str
    first: int
    tensor: Tensor


def slice_tensors(slice: Slice, layer: Layer, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[StateTensor]:
    """Views of everything that `slice` owns, without copying.

    Raises:
        LayerCheckError: a tensor is not contiguous, or the optimizer keeps something that is no tensor.
    """
    found: list[StateTensor] = []
    for owned in slice.ranges:
        parameter = model.get_parameter(owned.tensor)
        parts = {PARAM: parameter.detach(), **_elementwise(owned.tensor, parameter, optimizer)}
        for kind, tensor in parts.items():
            flat = _flat(owned.tensor, kind, tensor)
            found.append(StateTensor(owned.tensor, kind, owned.first, flat[owned.first : owned.first + owned.count]))
    if slice.owns_scalars:
        for name in (held.tensor for held in trainable(layer, model)):
            parameter = model.get_parameter(name)
            whole = _elementwise(name, parameter, optimizer)
            state = _optimizer_state(name, parameter, optimizer)
            found += [StateTensor(name, kind, 0, _flat(name, kind, t)) for kind, t in state if kind not in whole]
        found += [StateTensor(name, BUFFER, 0, _flat(name, BUFFER, model.get_buffer(name))) for name in layer.buffers]
    return found


def model_base(model: nn.Module) -> Base:
    """The base version, read from a model that has just been built: element by element, wherever nothing was filled."""
    parameters = dict(model.named_parameters())

    def elements(name: str, first: int, count: int) -> np.ndarray[Any, Any]:
        if name not in parameters:
            raise ValueError(f"the model has no parameter {name!r:.80}")
        return to_numpy(_flat(name, PARAM, parameters[name].detach())[first : first + count].cpu())

    return elements


def part_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    name: str,
    kind: str,
    first: int,
    count: int,
    dtype: str,
) -> Tensor:
    """Elements `[first, first + count)` of one tensor of the state, as a flat view.

    Without an optimizer there are only parameters and buffers.

    Raises:
        LayerCheckError: the model or the optimizer has no such tensor, or it is not of type `dtype`.
        CorruptObjectError: the tensor has no such elements.
    """
    whole = _flat(name, kind, _target(model, optimizer, name, kind))
    if dtype != dtype_name(whole):
        raise LayerCheckError(
            f"{name} ({kind}): expected {dtype_name(whole)}, got {dtype} from storage; "
            "use the model.dtype that the run was started with"
        )
    if first < 0 or first + count > whole.numel():
        raise CorruptObjectError(
            f"{name} ({kind}): expected a run of its {whole.numel()} elements, got {count} from element {first}; "
            "the stored layer belongs to another model"
        )
    return whole[first : first + count]


@torch.no_grad()
def fill(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str, kind: str, first: int, values: Tensor
) -> None:
    """Write `values` (1-D) in place over `part_of` the state; raises as that does."""
    part = part_of(model, optimizer, name, kind, first, values.numel(), dtype_name(values))
    if part.is_cpu:
        np.copyto(to_numpy(part), to_numpy(values))  # torch's own copy wakes all its threads, for a piece of a few MB
    else:
        part.copy_(values)


def layer_bytes(layer: Layer, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Size in bytes of the layer state; 0 for a frozen layer."""
    return sum(part.tensor.nbytes for part in slice_tensors(cut(layer, model, 0, 1), layer, model, optimizer))


def planned_layer_bytes(layer: Layer, model: nn.Module) -> int:
    """What `layer_bytes` will be with AdamW, from shapes alone (`model` may be on the meta device)."""
    held = trainable(layer, model)
    if not held:
        return 0
    buffers = sum(model.get_buffer(name).nbytes for name in layer.buffers)
    return 3 * trained_bytes(layer, model) + len(held) * _STEP_BYTES + buffers


def dtype_name(tensor: Tensor) -> str:
    """Name of a tensor's type, e.g. `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as an array on the same memory; a type that numpy lacks as unsigned integers of its width."""
    try:
        return tensor.detach().numpy()
    except TypeError:
        return tensor.detach().view(_BITS[tensor.dtype.itemsize]).numpy()


def from_numpy(array: np.ndarray[Any, Any], dtype: str) -> Tensor:
    """Inverse of `to_numpy`, on the same memory. The array may be read-only; then so must be the use of the tensor.

    Raises:
        CorruptObjectError: `dtype` names no torch type of the array's element width.
    """
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or wanted.itemsize != array.dtype.itemsize:
        raise CorruptObjectError(
            f"stored tensor: expected elements of {array.dtype.itemsize} bytes, got type {dtype!r:.40}; "
            "the object was written by something else"
        )
    with warnings.catch_warnings():
        # Views of Ray's object store are read-only, and torch has no such tensors: it warns once a process.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)


def _flat(name: str, kind: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise LayerCheckError(
            f"{name} ({kind}): expected a contiguous tensor, got strides {tensor.stride()}; "
            "make it contiguous before training"
        )
    return tensor.view(-1)


def _optimizer_state(name: str, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for kind, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor):
            yield kind, value
        elif value is not None:
            raise LayerCheckError(
                f"{name} ({kind}): expected the optimizer to keep tensors, got {type(value).__name__} from "
                f"{type(optimizer).__name__}; use an optimizer of torch.optim"
            )


def _elementwise(name: str, parameter: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state with one element per parameter element. `step` never is, though a 0-d parameter has its shape."""
    state = _optimizer_state(name, parameter, optimizer)
    return {kind: tensor for kind, tensor in state if kind != STEP and tensor.shape == parameter.shape}


def _target(model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str, kind: str) -> Tensor:
    try:
        if kind == BUFFER:
            return model.get_buffer(name)
        parameter = model.get_parameter(name)
    except AttributeError as error:
        raise LayerCheckError(
            f"{name} ({kind}): expected a tensor of this model, got one it lacks; use the run's model"
        ) from error
    if kind == PARAM:
        return parameter.detach()
    state = dict(_optimizer_state(name, parameter, optimizer)) if optimizer else {}
    if kind not in state:
        held = ", ".join(state) or "nothing"
        raise LayerCheckError(
            f"{name} ({kind}): expected state that {type(optimizer).__name__} keeps of it ({held}), got {kind!r}; "
            "use the run's optimizer, with its state allocated, and the run's model.freeze"
        )
    return state[kind]
