"""The job spec: one YAML file that says everything about a run."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, model_validator

from app.spec_problems import problems_of
from app.yaml_text import parse_yaml
from storage.errors import SpecError
from storage.fault_points import FaultOptions
from storage.options import CheckpointOptions, Options, StorageOptions
from workers.options import DataOptions, ModelOptions, TrainingOptions


class ScalingOptions(Options):
    """Training workers and what each of them gets. May change between submissions of a run."""

    workers: Annotated[int, Field(ge=1)] = 1
    """Training workers, one rank each."""

    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] = 0
    """GPUs of each worker: 1, or 0 to train on the CPU."""

    cpus_per_worker: Annotated[float, Field(gt=0)] = 1
    """CPUs that Ray reserves for each worker; a fraction lets workers share one."""


class FailureOptions(Options):
    """How often a run may fail before it ends. May change between submissions of a run."""

    max_failures: Annotated[int, Field(ge=-1)] = -1
    """Restarts of the worker group over the whole run; -1 sets no limit, because a long run on spot machines outlives
    any number, and `attempts_without_progress` already ends one that only fails."""

    attempts_without_progress: Annotated[int, Field(ge=1)] = 5
    """The run ends after this many attempts in a row that committed nothing new."""

    store_outage_s: Annotated[float, Field(gt=0)] = 600.0
    """The run ends when storage has failed for this many seconds without a success in between."""


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name):
        hint = "; folders belong into storage.url" if "/" in name or "\\" in name else ""
        raise ValueError(
            "expected at most 100 letters, digits, `.`, `_` or `-`, the first of them not `.`, "
            f"got {json.dumps(name[:60])}{hint}"
        )
    return name


class JobSpec(Options):
    """One run: what is trained, on what, how, and how it survives failures."""

    name: Annotated[str, AfterValidator(_checked_name)]
    """Run name: letters, digits, `.`, `_`, `-`, not starting with `.`; the run is stored in `<storage.url>/<name>`."""

    storage: StorageOptions = StorageOptions()
    """Where runs are stored. May change between submissions of a run (then the run must have been moved there)."""

    model: ModelOptions
    """Which model is post-trained."""

    data: DataOptions
    """Training and held-out examples."""

    training: TrainingOptions
    """Optimization."""

    scaling: ScalingOptions = ScalingOptions()
    """Training workers and what each of them gets. May change between submissions of a run."""

    checkpoint: CheckpointOptions = CheckpointOptions()
    """What is persisted, when, and how stale a restored layer may be."""

    failures: FailureOptions = FailureOptions()
    """How often a run may fail before it ends. May change between submissions of a run."""

    export: str | None = None
    """Local folder for the finished model in Hugging Face format; null: none (`export` writes it any time)."""

    fault_injection: list[FaultOptions] = []
    """Faults that strike this run on purpose; empty: none. May change between submissions of a run."""

    @model_validator(mode="after")
    def _sections_fit(self) -> "JobSpec":
        misfits = list(_misfits(self))
        if misfits:
            raise ValueError("\n".join(misfits))
        return self


def _misfits(spec: JobSpec) -> Iterator[str]:
    """What each section allows and the others forbid, one line each."""
    training, workers, steps = spec.training, spec.scaling.workers, spec.training.steps
    if training.global_batch < workers:
        yield (
            f"training.global_batch: expected at least one example for each of scaling.workers = {workers}, "
            f"got {training.global_batch}"
        )
    if steps is not None and training.warmup_steps > steps:
        yield f"training.warmup_steps: expected at most training.steps = {steps}, got {training.warmup_steps}"
    if training.eval_every_steps is not None and spec.data.eval_path is None and not spec.data.eval_examples:
        yield (
            f"training.eval_every_steps: expected null without held-out examples, got {training.eval_every_steps}; "
            "set data.eval_path or data.eval_examples"
        )
    if spec.model.attention == "flash_attention_2" and not spec.scaling.gpus_per_worker:
        yield (
            "model.attention: flash_attention_2 runs on GPUs only, got scaling.gpus_per_worker = 0; "
            "set model.attention to sdpa or give each worker a GPU"
        )
    addresses = [fault.address for fault in spec.fault_injection]
    for index, fault in enumerate(spec.fault_injection):
        if fault.rank is not None and fault.rank >= workers:
            yield f"fault_injection.{index}.rank: expected less than scaling.workers = {workers}, got {fault.rank}"
        if steps is not None and fault.step > steps:
            yield f"fault_injection.{index}.step: expected at most training.steps = {steps}, got {fault.step}"
        twin = addresses.index(fault.address)
        if twin != index:
            yield f"fault_injection.{index}: expected another address than fault_injection.{twin}: a fault fires once"


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read the spec at `path` and apply `overrides`.

    Args:
        path: a YAML file.
        overrides: `a.b.c=value` each, the value written as in YAML; a number in the path is a list's index.

    Raises:
        SpecError: one line for each problem found.
    """
    data = _read(Path(path))
    for override in overrides:
        data = _overridden(data, override)
    try:
        # Strict JSON: `steps: true` or `steps: "60"` is refused, while a list may still fill a tuple.
        return JobSpec.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        # `from None`: the cause would print what was read, secrets included.
        raise SpecError("\n".join(problems_of(error, data, JobSpec))) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; expected the path of a job spec") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: not UTF-8 text; expected a YAML file") from None
    except OSError as error:
        raise SpecError(f"{path}: {(error.strerror or str(error)).lower()}; expected a readable YAML file") from error
    data = parse_yaml(text, str(path))
    if data is None:
        raise SpecError(f"{path}: empty; expected a job spec; `python -m app schema` lists its fields")
    if not isinstance(data, dict):
        raise SpecError(f"{path}: expected a mapping of keys to values at the top level")
    return data


def _overridden(data: dict[str, Any], override: str) -> dict[str, Any]:
    """`data` with one override applied; whether the key exists is left to validation."""
    path, equals, text = override.partition("=")
    if not equals or not all(path.split(".")):
        raise SpecError(f"--set {path}: expected KEY=VALUE, for example training.steps=60")
    *parents, last = path.split(".")
    root: dict[str, Any] = dict(data)
    here: Any = root  # a section or a list
    for position, part in enumerate(parents):
        key = _key_in(here, part, path, ".".join(parents[:position]))
        here[key] = _copy_or_new(here[key] if isinstance(here, list) else here.get(key))
        here = here[key]
    here[_key_in(here, last, path, ".".join(parents))] = parse_yaml(text, f"--set {path}")
    return root


def _key_in(container: Any, part: str, path: str, parent: str) -> Any:
    if isinstance(container, dict):
        return part
    if not isinstance(container, list):
        raise SpecError(f"--set {path}: {parent} is a single value, it has no `{part}`; set {parent} itself")
    if not (part.isdecimal() and int(part) < len(container)):
        raise SpecError(
            f"--set {path}: {parent} is a list of {len(container)}, it has no `{part}`; set {parent} itself"
        )
    return int(part)


def _copy_or_new(value: Any) -> Any:
    return {} if value is None else value.copy() if isinstance(value, dict | list) else value
