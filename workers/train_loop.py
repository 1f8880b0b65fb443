"""The training loop of one worker, as Ray Train runs it."""

import math
import time

import ray
import ray.train
import ray.train.torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from storage.errors import TrainingError
from storage.messages import Verdict
from storage.object_store import open_object_store
from storage.records import BaseVersion
from workers import collector
from workers.checkpointer import Checkpointer, RunStoppedError, StepStats
from workers.data import Examples
from workers.faults import FaultInjector
from workers.layers import find_layers
from workers.loop_config import LoopConfig
from workers.model import base_digest, build_model
from workers.optimizer import build_optimizer, learning_rate, set_learning_rate
from workers.prediction import predict_if_better
from workers.split import split_layers
from workers.stopwatch import Stopwatch
from workers.together import ask_together
from workers.train_step import Trainee, clipped_gradient_norm, forward_backward, held_out_loss


def train(config: dict[str, LoopConfig]) -> Verdict | None:
    """Train to the last step. Returns why the run must stop, or None when it is finished.

    Fatal verdicts are returned, not raised: Ray would retry them.
    """
    try:
        _Loop(config["job"]).run()
    except RunStoppedError as stopped:
        return stopped.verdict
    except TrainingError as error:  # raised by all ranks at the same step
        return Verdict(kind=type(error).__name__, message=str(error))
    return None


class _Loop:
    """One attempt of one worker."""

    def __init__(self, config: LoopConfig) -> None:
        stopwatch = Stopwatch()
        self.config = config
        self.device = ray.train.torch.get_device()
        self.group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        verdict = ask_together(config.actor, self.group, "group_starts")
        if verdict is not None:
            raise RunStoppedError(verdict)
        self.data = ray.get(config.data)
        training = config.training
        model = build_model(config.model, training.seed)
        whole = find_layers(model, config.model.layers)
        base = BaseVersion(source=config.model.path, digest=base_digest(model, whole) if dist.get_rank() == 0 else "")
        self.layers = split_layers(whole, model, config.checkpoint, config.model.dtype)
        model.to(self.device)  # type: ignore[arg-type]  # transformers' wrapper hides the method's own types
        optimizer = build_optimizer(model, training)
        store = open_object_store(config.storage, config.run)
        self.faults = FaultInjector(config.faults, dist.get_rank(), store)
        self.faults.watch(model, whole)
        self.checkpointer = Checkpointer(
            actor=config.actor,
            store=store,
            run=config.run,
            options=config.checkpoint,
            model=model,
            optimizer=optimizer,
            layers=self.layers,
            base=base,
            device=self.device,
            group=self.group,
            faults=self.faults,
            seed=training.seed,
            stopwatch=stopwatch,
        )
        self.start = self.checkpointer.restore()
        on_gpu = self.device.type == "cuda"
        parallel = DistributedDataParallel(
            model, device_ids=[self.device] if on_gpu else None, gradient_as_bucket_view=True
        )
        self.trainee = Trainee(parallel, optimizer, training, self.device, config.pad_id)

    def run(self) -> None:
        total = self.config.total_steps
        if self.config.checkpoint.weight_prediction:
            self._predict()
        self._warm_up(min(self.start + 1, total))
        collector.resume()
        for step in range(self.start + 1, total + 1):
            self.checkpointer.after_step(step, self._step(step))
        self.checkpointer.finish(total)

    def _predict(self) -> None:
        """Carry stale layers on, if that lowers the loss."""
        restored, group = self.checkpointer.restored, self.group
        found = predict_if_better(restored, self.layers, self.trainee, self.examples, self._learning_rate, group)
        if found is not None and not found.is_better and dist.get_rank() == 0:
            what = f"loss {found.stored:.4f} as stored, {found.predicted:.4f} as predicted, at step {self.start}"
            self.config.actor.note_incident.remote("weights not predicted", what)

    def _warm_up(self, step: int) -> None:
        """One discarded forward and backward pass.

        DDP's first backward orders its buckets differently from the next ones, so without this the first step after a
        restart would sum gradients in another order than the failure-free run did.
        """
        forward_backward(self.trainee, self.examples, step)
        self.trainee.optimizer.zero_grad(set_to_none=False)

    def _step(self, step: int) -> StepStats:
        trainee, began = self.trainee, time.perf_counter()
        self.faults.at_step(step)
        loss_sum, label_tokens, input_tokens = forward_backward(trainee, self.examples, step)
        norm = clipped_gradient_norm(trainee)
        set_learning_rate(trainee.optimizer, self._learning_rate(step))
        if math.isfinite(norm):
            self.checkpointer.before_optimizer_step()
            trainee.optimizer.step()
        else:
            self._nonfinite(step, norm)
        trainee.optimizer.zero_grad(set_to_none=False)
        self.faults.strike("before_tick")
        seconds = time.perf_counter() - began
        return StepStats(
            loss_sum=loss_sum,
            label_tokens=label_tokens,
            input_tokens=input_tokens,
            seconds=seconds,
            eval_loss=self._evaluate(step),
        )

    def _learning_rate(self, step: int) -> float:
        return learning_rate(step, self.config.total_steps, self.config.training)

    @property
    def examples(self) -> Examples:
        return self.data.train

    def _nonfinite(self, step: int, norm: float) -> None:
        """Every rank sees the same norm, so all of them skip the update, or all of them stop."""
        if self.config.training.on_nonfinite == "fail":
            raise TrainingError(
                f"step {step}: expected a finite loss and gradient norm, got a norm of {norm}; the last restore "
                "point is intact: lower training.learning_rate, or set training.on_nonfinite: skip"
            )
        if dist.get_rank() == 0:
            self.config.actor.note_incident.remote("skipped step", f"step {step}: gradient norm {norm}")

    def _evaluate(self, step: int) -> float | None:
        every, last = self.config.training.eval_every_steps, self.config.total_steps
        due = step == last or (every is not None and step % every == 0)
        if not due or len(self.data.held_out) == 0:
            return None
        return held_out_loss(self.trainee, self.data.held_out, self.group)
