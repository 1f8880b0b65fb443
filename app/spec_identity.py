"""What makes two specs the same job, and what the catalog keeps of a spec.

Only `name`, `model`, `data`, `training` and `checkpoint` count: they define the result. `storage`, `scaling`,
`failures`, `fault_injection` and `export` may change between two submissions of a run.

A path counts as seen from the current directory if it lies below it, and absolute otherwise, so that neither writing
the same path in another way nor another checkout of the project makes another job.
"""

import json
import os
from pathlib import Path
from typing import Any

from app.job_spec import JobSpec
from storage.records import digest_of

COUNTED = ("name", "model", "data", "training", "checkpoint")
_SECRETS = {"storage": {"s3": {"access_key", "secret_key"}}}
_SHOWN_CHARACTERS = 60


def resolve_paths(spec: JobSpec) -> JobSpec:
    """Make every local path absolute, because Ray's workers run in another directory.

    `model.path` is a path only if such a folder exists; otherwise it is a hub id and stays as it is.
    """
    model, data = spec.model, spec.data
    if _absolute(model.path).is_dir():
        model = model.model_copy(update={"path": str(_absolute(model.path))})
    updates = {"path": _resolved(data.path), "eval_path": data.eval_path and _resolved(data.eval_path)}
    storage = spec.storage.model_copy(update={"url": _resolved(spec.storage.url)})
    sections = {"model": model, "data": data.model_copy(update=updates), "storage": storage}
    return spec.model_copy(update={**sections, "export": spec.export and _resolved(spec.export)})


def public_dump(spec: JobSpec) -> dict[str, Any]:
    """JSON-able form of `spec` for the catalog: no secrets, paths as they count.

    The same before and after `resolve_paths`.
    """
    dump = spec.model_dump(mode="json", exclude=_SECRETS)
    for section, field in (("model", "path"), ("data", "path"), ("data", "eval_path")):
        if dump[section][field] is not None:
            dump[section][field] = _as_counted(dump[section][field])
    return dump


def fingerprint(dump: dict[str, Any]) -> str:
    """Digest of everything that counts in a result of `public_dump`; equal exactly when `differing_fields` is empty."""
    counted = {section: dump[section] for section in COUNTED}
    return digest_of(json.dumps(counted, sort_keys=True).encode())


def differing_fields(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Fields that count and differ between two results of `public_dump`: `training.steps: expected 60, got 80`."""
    before, after = _leaves(old), _leaves(new)
    return [
        f"{path}: expected {_shortened(before.get(path, 'nothing'))}, got {_shortened(after.get(path, 'nothing'))}"
        for path in {**before, **after}
        if path.split(".")[0] in COUNTED and before.get(path) != after.get(path)
    ]


def _leaves(value: Any, path: str = "") -> dict[str, str]:
    """JSON text of every value that is not itself a mapping, by path."""
    if not isinstance(value, dict) or not value:
        return {path: json.dumps(value, ensure_ascii=False)}
    leaves: dict[str, str] = {}
    for key, inner in value.items():
        leaves |= _leaves(inner, f"{path}.{key}".removeprefix("."))
    return leaves


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _resolved(path: str) -> str:
    return path if "://" in path else str(_absolute(path))


def _as_counted(path: str) -> str:
    if "://" in path:
        return path
    absolute = _absolute(path)
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)
