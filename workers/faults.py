"""Fault injection in a training worker, see `storage.fault_points`."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from storage.fault_points import FaultOptions, FaultPoints, Point
from storage.object_store import ObjectStore
from workers.layers import Layer


class InjectedFaultError(RuntimeError):
    """Raised on purpose by the job spec's `fault_injection` section."""


class FaultInjector:
    """Faults of one rank in one attempt."""

    def __init__(self, faults: Sequence[FaultOptions], rank: int, store: ObjectStore) -> None:
        self._faults = FaultPoints([fault for fault in faults if fault.action != "nan"], "worker", store)
        self._poison = FaultPoints([fault for fault in faults if fault.action == "nan"], "worker", store)
        self._rank = rank
        self._attempt = 0
        self._step = 0

    def begin(self, attempt: int) -> None:
        """The attempt's number is known."""
        self._attempt = attempt

    def at_step(self, step: int) -> None:
        """Training is about to do `step`."""
        self._step = step

    def strike(self, point: Point, step: int | None = None) -> None:
        """Fire the fault addressed to this point of `step` (default: the one that training does), if there is one."""
        step = self._step if step is None else step
        fault = self._due(self._faults, point, step)
        if fault is None:
            return
        if fault.action == "raise":
            raise InjectedFaultError(f"injected at step {step}, point {point}")
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        """Strike inside the passes: when the middle block has run, and when its output's gradient arrives.

        `layers` are whole ones.
        """
        if self._faults or self._poison:
            middle = layers[len(layers) // 2]
            block = os.path.commonpath([held.tensor.replace(".", "/") for held in middle.params]).replace("/", ".")
            model.get_submodule(block).register_forward_hook(self._after_block)

    def _after_block(self, _block: nn.Module, _inputs: Any, output: Any) -> None:
        self.strike("forward")
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        self.strike("backward")
        if self._due(self._poison, "backward", self._step):
            return torch.full_like(gradient, float("nan"))
        return gradient

    def _due(self, faults: FaultPoints, point: Point, step: int) -> FaultOptions | None:
        return faults.due(point, step=step, attempt=self._attempt, rank=self._rank)
