"""The training loop's only door to checkpoints: `restore`, `after_step`, `finish`.

Every rank calls the same methods in the same order; only rank 0 talks to the CheckpointActor, and never waits for it
except where training must stand still.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn

from storage.encoding import encoding_of
from storage.errors import LayerCheckError
from storage.messages import AttemptFacts, Order, Reply, Report, RestorePlan, Verdict
from storage.object_store import ObjectStore
from storage.options import CheckpointOptions
from storage.records import BaseVersion, LayerFacts
from storage.shard_format import ShardTensor
from storage.worker_group import WorkerGroup
from workers.delta import DeltaMeter
from workers.exchange import Told, exchange
from workers.faults import FaultInjector
from workers.hand_over import HandOvers
from workers.layers import Layer
from workers.restore import restore
from workers.slices import Slice, cut, trainable
from workers.snapshot import Snapshotter, on_host
from workers.state import PARAM, layer_bytes, slice_tensors
from workers.stopwatch import Stopwatch
from workers.together import STANDING_WAIT_S, ask_together


class RunStoppedError(LayerCheckError):
    """The CheckpointActor has ended the run; all ranks raise it at the same point."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What a step did, summed over this rank's samples."""

    loss_sum: float
    label_tokens: int
    input_tokens: int
    seconds: float
    eval_loss: float | None = None


@dataclass
class _Untold:
    """What rank 0 has to tell the CheckpointActor: it gathers while the report before is not answered."""

    loss: float | None = None
    eval_losses: tuple[tuple[int, float], ...] = ()
    step_seconds: float | None = None
    failed_hand_overs: frozenset[str] = frozenset()
    unacknowledged: frozenset[str] = frozenset()
    """As of the last all-reduce."""


class Checkpointer:
    """Measures, hands over and restores one rank's slices."""

    def __init__(
        self,
        *,
        actor: Any,
        store: ObjectStore,
        run: str,
        options: CheckpointOptions,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[Layer],
        base: BaseVersion,
        device: torch.device,
        group: dist.ProcessGroup | None,
        faults: FaultInjector,
        seed: int,
        stopwatch: Stopwatch,
    ) -> None:
        self._actor, self._store, self._run, self._options = actor, store, run, options
        self._model, self._optimizer, self._base, self._device, self._group = model, optimizer, base, device, group
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._layers = {layer.name: layer for layer in layers}
        self._trained = [layer for layer in layers if trainable(layer, model)]
        self._slices: dict[str, Slice] = {
            layer.name: cut(layer, model, self._rank, self._world_size) for layer in self._trained
        }
        self._views = {
            layer.name: slice_tensors(self._slices[layer.name], layer, model, optimizer) for layer in self._trained
        }
        self._faults = faults
        self._seed = seed
        self._stopwatch = stopwatch
        self._snapshotter = Snapshotter(device)
        self._encoding = encoding_of(options)
        self._base_slices = self._put_base() if self._encoding.needs_base else {}
        self._attempt_facts: AttemptFacts | None = None
        self._attempt = 0
        self._restore_point = 0
        self.restored: dict[str, int] = {}
        """Step of each layer's restored version."""
        self._pending: ray.ObjectRef[Reply] | None = None
        self._carried: tuple[Order, int] | None = None
        self._needs_attempt_facts = False
        self._whole_at: int | None = None
        self._tokens = self._ticks = self._tokens_of_all = 0
        self._untold = self._told = _Untold()
        self._tick_seconds: float | None = None

    def _put_base(self) -> dict[str, ray.ObjectRef[list[ShardTensor]]]:
        """Keep what this rank owns of the base version in Ray's object store, for as long as this process lives.

        The model still holds it: it has been built and nothing has been restored.
        """
        return {
            name: ray.put([on_host(part) for part in views if part.kind == PARAM])
            for name, views in self._views.items()
        }

    # --- restore

    def restore(self) -> int:
        """Restore the newest composite; returns the step to go on after.

        Raises:
            RunStoppedError: the run cannot go on.
        """
        model, optimizer = self._model, self._optimizer
        self._attempt_facts = self._facts()
        self._stopwatch.lap("load_model")
        answer = ask_together(self._actor, self._group, "begin_attempt", self._attempt_facts)
        self._stopwatch.lap("plan")
        if not isinstance(answer, RestorePlan):
            raise RunStoppedError(answer)
        self._attempt = answer.attempt
        node = ray.get_runtime_context().get_node_id()
        self._hand_overs = HandOvers(
            answer.writers[node],
            self._run,
            self._slices,
            self._encoding,
            self._base_slices,
            WorkerGroup.of(self._attempt_facts).bytes_on(node),
            self._faults,
        )
        self._faults.begin(answer.attempt)
        self._faults.at_step(answer.step)
        self._faults.strike("restore")
        plan = restore(
            answer, self._store, self._layers, model, optimizer, self._device, self._group, self._ask_for_replacement
        )
        self.restored = {name: planned.ref.step for name, planned in plan.layers.items()}
        self._stopwatch.lap("broadcast")
        self._restore_point = plan.step
        slices = list(self._slices.values())
        self._meter = DeltaMeter(self._trained, slices, model, optimizer, self._options.reference_fraction, self._seed)
        return plan.step

    def _facts(self) -> AttemptFacts:
        node = ray.get_runtime_context().get_node_id()
        owned = {name: sum(part.tensor.nbytes for part in views) for name, views in self._views.items()}
        told: list[tuple[str, dict[str, int]] | None] = [None] * self._world_size
        dist.all_gather_object(told, (node, owned), group=self._group)
        ranks = [message for message in told if message is not None]
        return AttemptFacts(
            node_of_rank=tuple(home for home, _ in ranks),
            facts=tuple(
                LayerFacts(
                    name=layer.name,
                    bytes=layer_bytes(layer, self._model, self._optimizer),
                    frozen=layer.name not in self._slices,
                )
                for layer in self._layers.values()
            ),
            shard_bytes={layer.name: tuple(sizes[layer.name] for _, sizes in ranks) for layer in self._trained},
            base=self._base,
        )

    def _ask_for_replacement(self, bad: dict[str, str], outage: str | None) -> RestorePlan | None:
        answer = ask_together(self._actor, self._group, "restored", self._attempt, bad, outage)
        if isinstance(answer, Verdict):
            raise RunStoppedError(answer)
        assert answer is None or isinstance(answer, RestorePlan)
        if answer is None:
            self._stopwatch.lap("read")
        return answer

    # --- ticks

    def before_optimizer_step(self) -> None:
        """Keep the optimizer from changing what a snapshot is still copying."""
        began = time.perf_counter()
        self._snapshotter.before_optimizer_step()
        if self._tick_seconds is not None:  # the wait is the last tick's doing
            self._tick_seconds += time.perf_counter() - began

    def after_step(self, step: int, stats: StepStats) -> None:
        """Measure, persist what was decided, and hold while the restore point is too far behind.

        Raises:
            RunStoppedError: the run must stop.
        """
        self._stopwatch.stepped()
        self._tokens += stats.input_tokens
        if stats.eval_loss is not None:
            self._untold.eval_losses = (*self._untold.eval_losses, (step, stats.eval_loss))
        if step % self._options.interval_steps:
            if self._rank == 0:
                self._actor.reached.remote(self._attempt, step)
            return
        began = time.perf_counter()
        self._tick(step, stats)
        self._tick_seconds = time.perf_counter() - began
        while step + self._options.interval_steps - self._restore_point > self._options.max_lag:
            self._tick(step, None, wait_s=STANDING_WAIT_S, hold=True)

    def finish(self, step: int) -> None:
        """Persist every layer at `step`, the last one, and mark the run finished.

        Raises:
            RunStoppedError: the run must stop.
        """
        while self._whole_at != step:
            self._tick(step, None, wait_s=STANDING_WAIT_S, flush=True)
        self._snapshotter.close()
        verdict = ask_together(self._actor, self._group, "finish", step)
        if verdict is not None:
            raise RunStoppedError(verdict)

    def _tick(
        self, step: int, stats: StepStats | None, *, wait_s: float = 0.0, hold: bool = False, flush: bool = False
    ) -> None:
        heard = self._exchange(stats, self._answer(wait_s))
        if heard.reply is not None:
            self._take(heard.reply, step)
        if self._rank == 0 and self._pending is None:
            self._pending = self._actor.report.remote(self._report(step, heard.sums, hold=hold, flush=flush))

    def _exchange(self, stats: StepStats | None, reply: Reply | None) -> Told:
        """What all ranks tell; what the CheckpointActor has to hear of it is left untold."""
        told = Told(
            sums=self._meter.measure().cpu(),
            failed=frozenset(self._hand_overs.failed()),
            unacknowledged=frozenset(self._hand_overs.unacknowledged),
            loss_sum=stats.loss_sum if stats else 0.0,
            label_tokens=stats.label_tokens if stats else 0,
            input_tokens=self._tokens if stats else 0,
            reply=reply,
        )
        heard = exchange(told, [layer.name for layer in self._trained], self._group)
        if stats:
            self._tokens = 0
            self._ticks += 1
            self._tokens_of_all += heard.input_tokens
            self._untold.loss = heard.loss_sum / heard.label_tokens if heard.label_tokens else None
            self._untold.step_seconds = stats.seconds
        self._untold.failed_hand_overs |= heard.failed
        self._untold.unacknowledged = heard.unacknowledged
        return heard

    def _take(self, reply: Reply, step: int) -> None:
        """Do what the CheckpointActor says; all ranks at the same step."""
        if reply.verdict is not None:
            raise RunStoppedError(reply.verdict)
        self._restore_point, self._whole_at = reply.restore_point, reply.whole_at
        self._needs_attempt_facts = reply.needs_attempt_facts
        if reply.order is not None:
            self._carry_out(reply.order, step)

    def _report(self, step: int, sums: Tensor, *, hold: bool, flush: bool) -> Report:
        """What rank 0 tells the actor. `sums` are those of all ranks."""
        assert self._attempt_facts is not None
        untold, self._untold, self._told = self._untold, _Untold(), self._untold
        order, carried_out_step = self._carried or (None, 0)
        report = Report(
            attempt=self._attempt,
            step=step,
            sums=sums.numpy(),
            failed_hand_overs=tuple(sorted(untold.failed_hand_overs)),
            # What has just been carried out is not in the sums of this tick yet.
            unacknowledged=tuple(sorted(untold.unacknowledged.union(order.layers if order else ()))),
            carried_out=order,
            carried_out_step=carried_out_step,
            hold=hold,
            flush=flush,
            loss=untold.loss,
            ticks=self._ticks,
            tokens=self._tokens_of_all,
            eval_losses=untold.eval_losses,
            tick_seconds=self._tick_seconds,
            step_seconds=untold.step_seconds,
            attempt_facts=self._attempt_facts if self._needs_attempt_facts else None,
            comeback=self._stopwatch.comeback(),
        )
        self._carried = self._tick_seconds = None
        return report

    def _answer(self, wait_s: float) -> Reply | None:
        """The actor's answer to the last report, on rank 0 and if it is there."""
        if self._pending is None or not ray.wait([self._pending], timeout=wait_s)[0]:
            return None
        pending, self._pending = self._pending, None
        try:
            return ray.get(pending)
        except ray.exceptions.RayActorError:  # it is being restarted; the next report reaches its successor
            self._untold.eval_losses = self._told.eval_losses + self._untold.eval_losses
            self._untold.failed_hand_overs |= self._told.failed_hand_overs
            time.sleep(wait_s)
            return None

    def _carry_out(self, order: Order, step: int) -> None:
        """Snapshot this rank's slices of the chosen layers and hand them over."""
        self._faults.strike("snapshot")
        self._hand_overs.expect(order.layers)
        self._meter.rebase(order.layers)
        self._snapshotter.take(
            (self._views[name], partial(self._hand_overs.give, order, name, step)) for name in order.layers
        )
        self._carried = (order, step)
