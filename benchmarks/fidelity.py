"""What a restart from the composite costs in held-out loss, by policy: many failures, simulated in one process.

    python -m benchmarks.fidelity --model models/smollm2 --data .../gsm8k/train.jsonl --seeds 0 1 2 --failures 60 90

One failure-free run is trained for each seed. Beside it each policy keeps what it would have persisted, by the
project's own decision, sampled deltas and codecs, with a decision carried out one tick after it was taken and a
snapshot durable one tick later. At each failure step every policy's composite is restored and trained on
for `--after` steps; its held-out loss is then compared with the failure-free run's at the same step. Everything that
is not the policy (data, seeds, arithmetic) is the same, so the difference is the policy's.
"""

import argparse
import copy
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from app.job_spec import JobSpec, load_spec
from benchmarks.fidelity_report import report
from benchmarks.record import write_record
from storage.codecs import codec_named, decode
from storage.decision import Candidate, Facts, decide
from storage.encoding import encoding_of, largest_share
from storage.messages import LayerSums
from storage.options import CheckpointOptions, S3Options, parse_write_budget
from storage.shard_format import CODEC_RAW
from workers.data import load_data
from workers.delta import DeltaMeter
from workers.layers import find_layers
from workers.model import build_model, load_tokenizer
from workers.optimizer import build_optimizer, learning_rate, set_learning_rate
from workers.prediction import Judgement, predict_if_better
from workers.slices import cut
from workers.split import split_layers
from workers.state import StateTensor, dtype_name, from_numpy, layer_bytes, model_base, slice_tensors, to_numpy
from workers.train_step import Trainee, clipped_gradient_norm, forward_backward, held_out_loss

CHUNK = 2**21
"""Elements encoded at once: 8 MiB, as in a shard."""

LATENCY = 2
"""Steps from a decision to durable."""

State = dict[str, list[Tensor]]
"""Layer -> its tensors, in the order of `slice_tensors`."""


class Lab:
    """One model in training, with views of its layer states."""

    def __init__(self, spec: JobSpec, threads: int) -> None:
        torch.set_num_threads(threads)
        self.training = spec.training
        data = load_data(spec.data, load_tokenizer(spec.model, spec.data), S3Options())
        self.examples, self.held_out = data.train, data.held_out
        model = build_model(spec.model, spec.training.seed)
        self.optimizer = build_optimizer(model, spec.training)
        # Split as at any budget that passes a block in a tick.
        self.layers = split_layers(find_layers(model, spec.model.layers), model, CheckpointOptions(), spec.model.dtype)
        self.slices = [cut(layer, model, 0, 1) for layer in self.layers]
        self.views: dict[str, list[StateTensor]] = {
            layer.name: slice_tensors(part, layer, model, self.optimizer)
            for layer, part in zip(self.layers, self.slices, strict=True)
        }
        self.bytes = {layer.name: layer_bytes(layer, model, self.optimizer) for layer in self.layers}
        self._copies: dict[str, list[Tensor]] = {}
        self.base = self.save()
        self.base_elements = model_base(copy.deepcopy(model))
        self.trainee = Trainee(
            DistributedDataParallel(model), self.optimizer, spec.training, torch.device("cpu"), pad_id=0
        )
        self.total_steps = spec.training.steps or 0

    def save(self) -> State:
        """A copy of every layer state."""
        return {name: self.copy_of(name) for name in self.views}

    def copy_of(self, layer: str) -> list[Tensor]:
        """A copy of one layer state as it is now; all who ask at the same step share it, and nobody may change it."""
        if layer not in self._copies:
            self._copies[layer] = [_in_file(part.tensor) for part in self.views[layer]]
        return self._copies[layer]

    def load(self, state: State) -> None:
        """Fill model and optimizer in place."""
        self._copies = {}
        for name, parts in state.items():
            for view, part in zip(self.views[name], parts, strict=True):
                view.tensor.copy_(part)

    def predict(self, restored: dict[str, int]) -> Judgement | None:
        """Carry stale layers on, as a restart does."""
        return predict_if_better(restored, self.layers, self.trainee, self.examples, self.learning_rate, None)

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step."""
        return learning_rate(step, self.total_steps, self.training)

    def step(self, step: int) -> float:
        """One optimizer step; returns the mean loss of its label tokens."""
        self._copies = {}
        loss, labels, _ = forward_backward(self.trainee, self.examples, step)
        clipped_gradient_norm(self.trainee)
        set_learning_rate(self.optimizer, self.learning_rate(step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss / labels

    def evaluate(self) -> float:
        """Held-out loss."""
        return held_out_loss(self.trainee, self.held_out, None)

    def meter(self, options: CheckpointOptions) -> DeltaMeter:
        """A meter of its own for one policy."""
        model = self.trainee.model.module
        return DeltaMeter(
            self.layers, self.slices, model, self.optimizer, options.reference_fraction, self.training.seed
        )


def _in_file(tensor: Tensor) -> Tensor:
    """A copy that the kernel may move to the disk: the states that ten policies keep do not fit in memory."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(max(1, tensor.nbytes))
        kept = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return kept.view(tensor.shape).copy_(tensor)


@dataclass
class Replica:
    """What one policy has persisted of the run that it watches."""

    name: str
    lab: Lab
    options: CheckpointOptions
    full_every: int | None = None
    """A full checkpoint every so many steps, instead of layers: what users have today."""
    durable: dict[str, tuple[int, list[Tensor]]] = field(init=False)
    bytes_written: int = 0
    ticks: int = 0

    def __post_init__(self) -> None:
        self.durable = {name: (0, parts) for name, parts in self.lab.base.items()}
        self._flying: dict[str, tuple[int, list[Tensor]]] = {}
        self._issued = dict.fromkeys(self.lab.bytes, 0)
        self._chosen: tuple[str, ...] = ()
        self._tokens = 0.0
        self._meter = self.lab.meter(self.options)
        self._encoding = encoding_of(self.options)
        self._share = largest_share(self.options, "float32")
        self._sizes: dict[str, int] = {}

    @property
    def newest(self) -> dict[str, tuple[int, list[Tensor]]]:
        """What a failure now leaves: what was accepted still lands."""
        return self.durable | self._flying

    @property
    def restore_point(self) -> int:
        """Step after which training would resume."""
        return max(step for step, _ in self.newest.values())

    def ages(self) -> list[int]:
        """Of each layer, in steps."""
        return [self.restore_point - step for step, _ in self.newest.values()]

    def tick(self, step: int) -> None:
        """Land what was snapshot at the tick before, snapshot what was chosen then, decide for the next tick."""
        self.ticks += 1
        self.durable |= self._flying
        self._flying = {name: (step, self.lab.copy_of(name)) for name in self._chosen}
        self._meter.rebase(self._chosen)
        self.bytes_written += sum(self._size(name) for name in self._chosen)
        if self.full_every is not None:
            self._chosen = tuple(self.lab.bytes) if (step + 1) % self.full_every == 0 else ()
        else:
            self._chosen = self._decide(step)
        self._issued |= dict.fromkeys(self._chosen, step + 1)

    def _decide(self, step: int) -> tuple[str, ...]:
        sums = dict(zip(self.lab.bytes, self._meter.measure().tolist(), strict=True))
        measured = {name: LayerSums(*row) for name, row in sums.items()}
        candidates = tuple(
            Candidate(
                name=name,
                bytes=self._sizes.get(name, math.ceil(size * self._share)),
                step=self._issued[name],
                drift=measured[name].drift,
                impact=measured[name].impact,
                in_flight=name in self._flying,
            )
            for name, size in self.lab.bytes.items()
        )
        _, share = parse_write_budget(self.options.write_budget)
        decision = decide(
            Facts(
                step=step + 1,
                interval_steps=1,
                layers=candidates,
                staleness_bound_steps=self.options.staleness_bound_steps,
                max_lag=self.options.max_lag,
                latency_steps=LATENCY,
                newest_step=max(self._issued.values()),
                tokens=self._tokens,
                refill_bytes=share * sum(self.lab.bytes.values()),
                criterion=self.options.criterion,
                threshold=self.options.threshold,
            )
        )
        self._tokens = decision.tokens
        return decision.layers

    def composite(self) -> State:
        """Every layer's newest durable version, as the codec gives it back; the newest last, as a restore has them."""
        versions = sorted(self.newest.items(), key=lambda version: version[1][0])
        return {name: self._decoded(name, parts) if step else parts for name, (step, parts) in versions}

    def restore(self) -> Judgement | None:
        """Restart from the composite."""
        self.lab.load(self.composite())
        if not self.options.weight_prediction:
            return None
        return self.lab.predict({name: step for name, (step, _) in self.newest.items()})

    def failed(self) -> None:
        """The training processes are gone: what was chosen is never snapshot."""
        self.durable, self._flying, self._chosen = self.newest, {}, ()
        self._issued = {name: step for name, (step, _) in self.durable.items()}

    def restarted(self) -> None:
        """W_ref after a restart is what was restored."""
        self._meter.rebase(tuple(self.lab.bytes))

    def _size(self, layer: str) -> int:
        if layer not in self._sizes:
            self._sizes[layer] = sum(len(payload) for _, payload in self._encoded(layer, self.lab.copy_of(layer)))
        return self._sizes[layer]

    def _encoded(self, layer: str, parts: list[Tensor]) -> Iterator[tuple[tuple[int, int, str], bytes]]:
        for index, (view, part) in enumerate(zip(self.lab.views[layer], parts, strict=True)):
            name, values = self._encoding.codec_of(view.kind), to_numpy(part)
            for first in range(0, values.size, CHUNK):
                chunk = np.ascontiguousarray(values[first : first + CHUNK])
                payload = None
                if name != CODEC_RAW:
                    codec = codec_named(name)
                    payload = codec.encode(
                        chunk, dtype_name(part), self._base_of(view, first, chunk.size, codec.needs_base)
                    )
                yield (index, first, name), chunk.tobytes() if payload is None else payload

    def _base_of(self, view: StateTensor, first: int, count: int, needed: bool) -> Any:
        return self.lab.base_elements(view.name, view.first + first, count) if needed else None

    def _decoded(self, layer: str, parts: list[Tensor]) -> list[Tensor]:
        if not self._encoding.needs_base:  # raw and lossless give back every bit
            return parts
        found = [part.clone() for part in parts]
        for (index, first, name), payload in self._encoded(layer, parts):
            if name == CODEC_RAW:
                continue
            view, part = self.lab.views[layer][index], parts[index]
            count = min(CHUNK, part.numel() - first)
            base = self._base_of(view, first, count, codec_named(name).needs_base)
            values = decode(memoryview(payload), name, dtype_name(part), count, base)
            found[index][first : first + count] = from_numpy(values, dtype_name(part))
        return found


@dataclass(frozen=True)
class Policy:
    """A policy by name, and how its replica is made."""

    name: str
    checkpoint: dict[str, Any] = field(default_factory=dict)
    full_every: int | None = None

    def watch(self, lab: Lab) -> Replica:
        """Begin to persist the run of `lab`."""
        return Replica(self.name, lab, CheckpointOptions(**self.checkpoint), self.full_every)


def policy_named(name: str) -> Policy:
    """The policy that the words of `name` describe: codec (with its bits), write budget, criterion and so on.

    `raw 1/22.6 impact`, `delta 4/2/4 1/100 oldest`, `raw 1/22.6 drift threshold=5e-4`; `stored`: no weight prediction;
    `full 23`: a full checkpoint every 23 steps.

    Raises:
        ValueError: a word means nothing.
    """
    words = name.split()
    if words[0] == "full":
        return Policy(name, full_every=int(words[1]))
    checkpoint: dict[str, Any] = {"codec": words[0]}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if word in ("drift", "impact", "oldest"):
            checkpoint["criterion"] = word
        elif word == "stored":
            checkpoint["weight_prediction"] = False
        elif key == "threshold":
            checkpoint["threshold"] = float(value)
        elif word.count("/") == 2:
            kinds = ("weight_bits", "exp_avg_bits", "exp_avg_sq_bits")
            checkpoint["delta"] = dict(zip(kinds, map(int, word.split("/")), strict=True))
        else:
            checkpoint["write_budget"] = word
    return Policy(name, checkpoint)


POLICIES = (
    "raw 1/22.6 impact stored",
    "raw 1/22.6 drift stored",
    "raw 1/22.6 oldest stored",
    "raw 1/22.6 impact threshold=5e-4 stored",
    "raw 1/22.6 impact",
    "raw 1/22.6 drift",
    "raw 1/22.6 oldest",
    "delta 4/4/8 1/22.6 oldest stored",
    "delta 4/4/8 1/22.6 oldest",
    "delta 4/4/8 1/22.6 impact",
    "delta 4/4/8 1/100 oldest stored",
    "delta 4/4/8 1/100 oldest",
    "delta 4/4/8 1/100 impact",
    "full 23",
)


@dataclass
class Recovery:
    """One simulated failure."""

    policy: str
    seed: int
    failure: int
    restore_point: int
    max_age: int
    mean_age: float
    reduction: float
    restored_loss: float
    """Held-out loss of the composite, before any further step."""
    judged: tuple[float, float] | None = None
    """Loss of the next samples with the weights as stored and as predicted, which decides between them."""
    losses: dict[int, float] = field(default_factory=dict)
    """Held-out loss by step, after the restart."""


def study(
    spec: JobSpec, policies: list[Policy], failures: list[int], chained: list[int], after: int, threads: int
) -> dict[str, Any]:
    """One seed: the failure-free run, and every policy's recovery at every failure step.

    It goes on and is evaluated as far as `chain` needs to compare with.
    """
    lab = Lab(spec, threads)
    replicas = [policy.watch(lab) for policy in policies]
    last = max([*failures, *chained]) + after
    checks = {0, last, *range(5, last, 5), *(f + after // 2 for f in failures), *(f + after for f in failures)}
    alone: dict[int, float] = {0: lab.evaluate()}
    training: dict[int, float] = {}
    recoveries = []
    for step in range(1, last + 1):
        training[step] = lab.step(step)
        for replica in replicas:
            replica.tick(step)
        if step in checks:
            alone[step] = lab.evaluate()
            say(f"seed {spec.training.seed} step {step}: training {training[step]:.4f}, held out {alone[step]:.4f}")
        if step in failures:
            here = lab.save()
            recoveries += [recover(lab, replica, step, after, spec.training.seed) for replica in replicas]
            lab.load(here)
    return {
        "seed": spec.training.seed,
        "alone": alone,
        "training": training,
        "recoveries": [vars(r) for r in recoveries],
    }


def recover(lab: Lab, replica: Replica, failure: int, after: int, seed: int) -> Recovery:
    """Restore a policy's composite and train on; the replica goes on watching the failure-free run."""
    judgement = replica.restore()
    point, ages = replica.restore_point, replica.ages()
    written = replica.bytes_written or 1
    found = Recovery(
        policy=replica.name,
        seed=seed,
        failure=failure,
        restore_point=point,
        max_age=max(ages),
        mean_age=statistics.mean(ages),
        reduction=replica.ticks * sum(lab.bytes.values()) / written,
        restored_loss=lab.evaluate(),
        judged=(judgement.stored, judgement.predicted) if judgement else None,
    )
    for step in range(point + 1, failure + after + 1):
        lab.step(step)
        if step in (failure + after // 2, failure + after):
            found.losses[step] = lab.evaluate()
    ages_told = f"ages {found.mean_age:.1f}/{found.max_age}"
    losses = f"{found.restored_loss:.4f} {found.losses}, judged {found.judged}"
    say(f"  {replica.name}: restored {point}, {ages_told}, {found.reduction:.1f}x, {losses}")
    return found


def chain(spec: JobSpec, policy: Policy, failures: list[int], after: int, threads: int) -> dict[str, Any]:
    """One run that fails at each of `failures` and goes on from its own composite each time; its loss at the end."""
    lab = Lab(spec, threads)
    replica = policy.watch(lab)
    last = max(failures) + after
    step, left = 0, sorted(failures)
    while step < last:
        step += 1
        lab.step(step)
        replica.tick(step)
        if left and step == left[0]:
            left.pop(0)
            replica.failed()
            replica.restore()
            replica.restarted()
            step = replica.restore_point
    reduction, loss = replica.ticks * sum(lab.bytes.values()) / replica.bytes_written, lab.evaluate()
    say(f"{policy.name}, {len(failures)} failures in one run: {reduction:.1f}x, {loss:.4f}")
    return {
        "policy": policy.name,
        "seed": spec.training.seed,
        "failures": failures,
        "reduction": reduction,
        "last_step": last,
        "loss": loss,
    }


def say(text: str) -> None:
    """Progress, with the time: a study takes an hour on two cores."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> None:
    """Parse, study, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="jobs/smollm2-gsm8k.yaml", help="job spec with everything else")
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--data", required=True, help="JSONL of questions and answers, or of messages")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--failures", type=int, nargs="+", default=[60, 90], help="steps at which every policy fails")
    parser.add_argument("--after", type=int, default=20, help="steps trained after a failure")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="as `policy_named` reads them")
    parser.add_argument("--chain", nargs="*", type=int, default=[], help="also fail at all these steps in one run")
    parser.add_argument("--chain-policies", nargs="+", help="with these policies (default: all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="more settings, as FIELD=VALUE of the job spec")
    parser.add_argument("--name", default="fidelity", help="name of the record")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policies = [policy_named(name) for name in args.policies]
    chained = [policy_named(name) for name in args.chain_policies or args.policies] if args.chain else []
    studies, chains = [], []
    for seed in args.seeds:
        spec = spec_of(args, seed)
        studies.append(study(spec, policies, args.failures, args.chain, args.after, args.threads))
        chains += [chain(spec, policy, args.chain, args.after, args.threads) for policy in chained]
        report(studies, chains)
        print(f"record: {write_record(args.name, {'arguments': vars(args), 'studies': studies, 'chains': chains})}")


def spec_of(args: argparse.Namespace, seed: int) -> JobSpec:
    """The job whose model, data and training are studied."""
    where = [f"model.path={args.model}", f"data.path={args.data}"]
    return load_spec(args.spec, [*where, f"training.seed={seed}", *args.set])


if __name__ == "__main__":
    main()
