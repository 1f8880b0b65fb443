"""Fault injection: strikes at an addressed point (rank, step, point, attempt), and tells the CheckpointActor first."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import ray
import torch
from torch import Tensor, nn

from workers.layers import Layer
from workers.options import FaultOptions


class InjectedFaultError(RuntimeError):
    """Raised on purpose by the job spec's `fault_injection` section."""


class FaultInjector:
    """Faults of one rank in one attempt."""

    def __init__(self, faults: Sequence[FaultOptions], rank: int, actor: Any) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._actor = actor
        self._attempt = 0
        self._step = 0

    def begin(self, attempt: int) -> None:
        """The attempt's number is known."""
        self._attempt = attempt

    def at_step(self, step: int) -> None:
        """Training is about to do `step`."""
        self._step = step

    def strike(self, point: str) -> None:
        """Fire the fault addressed to this point, if there is one."""
        for fault in self._faults:
            here = fault.point == point and fault.attempt == self._attempt
            if here and fault.step == self._step and fault.action != "nan":
                self._fire(fault)

    def watch(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        """Strike inside the passes: when the middle block has run, and when its output's gradient arrives."""
        if self._faults:
            middle = layers[len(layers) // 2]
            block = os.path.commonpath([name.replace(".", "/") for name in middle.params]).replace("/", ".")
            model.get_submodule(block).register_forward_hook(self._after_block)

    def _after_block(self, _block: nn.Module, _inputs: Any, output: Any) -> None:
        self.strike("forward")
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        self.strike("backward")
        poison = [f for f in self._faults if f.action == "nan" and (f.step, f.attempt) == (self._step, self._attempt)]
        if poison:
            self._tell(poison[0])
            return torch.full_like(gradient, float("nan"))
        return gradient

    def _tell(self, fault: FaultOptions) -> None:
        what = f"{fault.action} of rank {fault.rank} at step {self._step}, point {fault.point}"
        ray.get(self._actor.note_incident.remote("fault injected", what))

    def _fire(self, fault: FaultOptions) -> None:
        self._tell(fault)
        if fault.action == "raise":
            raise InjectedFaultError(f"injected at step {self._step}, point {fault.point}")
        os.kill(os.getpid(), signal.SIGKILL)
