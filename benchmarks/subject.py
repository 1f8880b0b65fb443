"""What the benchmark trains: a model, data and options, as a job spec says; and its state after a few real steps."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from app.job_spec import JobSpec, load_spec
from benchmarks.piece import Profile
from storage.shard_format import ShardTensor
from workers.data import Examples, load_data
from workers.layers import Layer, find_layers
from workers.model import build_model, load_tokenizer
from workers.optimizer import build_optimizer
from workers.slices import cut
from workers.snapshot import on_host
from workers.split import split_layers
from workers.state import slice_tensors, to_numpy
from workers.train_step import Trainee, clipped_gradient_norm, forward_backward

CPU = torch.device("cpu")


def job_spec(profile: Profile, *overrides: str) -> JobSpec:
    """SmolLM2 on GSM8K if the profile names its folder, else the quickstart's random Llama on made-up chats."""
    path, settings = job_file(profile)
    return load_spec(path, [*settings, *overrides])


def job_file(profile: Profile) -> tuple[str, list[str]]:
    """The spec's file, and the overrides that make it the profile's."""
    if profile.model is None:
        return "jobs/quickstart.yaml", ["fault_injection=[]", "export=null"]
    # CPUs without bfloat16 in hardware are many times slower in it.
    named = [f"model.path={profile.model}", f"data.path={profile.data}", "training.precision=float32"]
    return "jobs/smollm2-gsm8k.yaml", named


@dataclass
class Trained:
    """A model and its optimizer after a few steps, and the parameters as they were before the first."""

    spec: JobSpec
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    layers: tuple[Layer, ...]
    base: dict[str, torch.Tensor]
    trainee: Trainee
    examples: Examples
    step_seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Make one real step."""
        began = time.perf_counter()
        forward_backward(self.trainee, self.examples, len(self.step_seconds) + 1)
        clipped_gradient_norm(self.trainee)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_seconds.append(time.perf_counter() - began)

    def base_elements(self, name: str, first: int, count: int) -> Any:
        """The base version, as `storage.codecs.Base` gives it."""
        return to_numpy(self.base[name].view(-1)[first : first + count])

    def tensors(self, layer: Layer) -> list[ShardTensor]:
        """The state of one layer; views, not copies."""
        whole = cut(layer, self.model, 0, 1)
        return [on_host(part) for part in slice_tensors(whole, layer, self.model, self.optimizer)]


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group whose only rank is this process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def train(spec: JobSpec, steps: int) -> Trained:
    """Make `steps` real steps, in a `group_of_one`."""
    tokenizer = load_tokenizer(spec.model, spec.data)
    examples = load_data(spec.data, tokenizer, spec.storage.s3).train
    model = build_model(spec.model, spec.training.seed)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, spec.training)
    trainee = Trainee(DistributedDataParallel(model), optimizer, spec.training, CPU, int(tokenizer.pad_token_id or 0))
    layers = split_layers(find_layers(model), model, spec.checkpoint, spec.model.dtype)
    trained = Trained(spec, model, optimizer, layers, base, trainee, examples)
    for _ in range(steps):
        trained.step()
    return trained


def layers_up_to(trained: Trained, most_bytes: int) -> Sequence[Layer]:
    """Layers of which the states together take at most `most_bytes`: blocks first; at least one."""
    chosen, total = [], 0
    for layer in sorted(trained.layers, key=lambda layer: not layer.name.startswith("block")):
        total += sum(part.data.nbytes for part in trained.tensors(layer))
        if chosen and total > most_bytes:
            break
        chosen.append(layer)
    return chosen
