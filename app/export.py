"""Export: a restore point as a folder that `AutoModelForCausalLM.from_pretrained` loads."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from app.existing_run import existing_run, no_restore_point, rule_of
from storage.catalog import Catalog
from storage.codecs import Base
from storage.errors import ObjectNotFoundError, SpecError
from storage.object_store import ObjectStore
from storage.records import Record, VersionRef
from storage.retention import Rule, retained
from storage.shard_reader import read_shard
from workers.layers import find_layers
from workers.model import base_digest, build_model, load_tokenizer
from workers.options import DataOptions, ModelOptions
from workers.state import BUFFER, PARAM, fill, from_numpy, model_base

_TRIES = 5
"""How often a restore point may be swept while it is read; each try reads only the layers that changed."""


def export_run(store: ObjectStore, folder: Path, step: int | None = None) -> int:
    """Write a restore point's weights, configuration and tokenizer to `folder`; returns its step.

    The folder appears whole or not at all. Safe beside a live run.

    Args:
        store: what holds the run.
        folder: absent or empty.
        step: of the restore point; None: the newest.

    Raises:
        SpecError: the run has no such restore point, or `folder` holds something.
        CorruptObjectError, ObjectNotFoundError: a shard cannot be read.
    """
    check_export_folder("DIR", folder)
    claim, catalog = existing_run(store), Catalog(store)
    rule = rule_of(claim)
    record = _find(catalog, rule, step)
    options = ModelOptions.model_validate({**claim.spec["model"], "path": record.base.source})
    build = partial(build_model, options, int(claim.spec["training"]["seed"]))
    model = build()
    digest = base_digest(model, find_layers(model, options.layers))
    if digest != record.base.digest:
        raise SpecError(
            f"model.path: {record.base.source}: expected the weights the run began with ({record.base.digest}), "
            f"got {digest}; restore them"
        )
    record = _fill_from_kept(model, build, catalog, rule, step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        whole = Path(scratch) / "export"
        model.config.use_cache = True  # it was off for training
        model.save_pretrained(whole)
        load_tokenizer(options, DataOptions.model_validate(claim.spec["data"])).save_pretrained(whole)
        if folder.exists():
            folder.rmdir()
        whole.rename(folder)
    return record.step


def check_export_folder(field: str, folder: Path) -> None:
    """Raise `SpecError`, naming `field`, unless `folder` is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(
            f"{field}: expected an absent or empty folder, got {folder}, which holds something; "
            "name another, or remove it"
        )


def _find(catalog: Catalog, rule: Rule, step: int | None) -> Record:
    """Restore point of `step`, or the newest one.

    Raises:
        SpecError: there is none.
    """
    kept = [point.record for point in retained(catalog.restorable().records, rule)]
    if not kept:
        raise no_restore_point(catalog.store)
    found = next((record for record in kept if step in (None, record.step)), None)
    if found is None:
        steps = ", ".join(str(record.step) for record in kept)
        raise SpecError(f"--step: expected the step of a restore point that is kept ({steps}), got {step}")
    return found


def _fill_from_kept(
    model: nn.Module, build: Callable[[], nn.Module], catalog: Catalog, rule: Rule, step: int | None
) -> Record:
    """Fill `model` from a restore point; when it is swept meanwhile, from the one that has taken its place.

    `build` makes another model like it, which no layer has been filled in.
    """
    filled: dict[str, VersionRef] = {}
    base, unfilled = model_base(model), None
    for _ in range(_TRIES):
        record = _find(catalog, rule, step)
        try:
            _fill(model, base, catalog, record, filled)
        except ObjectNotFoundError as error:
            missing, last = error, record
            if _find(catalog, rule, step) == record:  # nobody has swept it
                raise
            unfilled = unfilled or build()
            base = model_base(unfilled)
        else:
            return record
    raise SpecError(
        f"RUN: {catalog.store.url}: restore point after restore point was swept while it was read, the last at step "
        f"{last.step}; try again when the run is over, export a milestone, or raise checkpoint.keep_restore_points"
    ) from missing


def _fill(model: nn.Module, base: Base, catalog: Catalog, record: Record, filled: dict[str, VersionRef]) -> None:
    """Fill the layers of `record` that are not `filled` from the same version yet."""
    for layer, ref in record.layers.items():
        if ref.manifest_key is None or filled.get(layer) == ref:
            continue
        for shard in catalog.read_manifest(ref).shards:
            for tensor in read_shard(catalog.store, shard.key, shard.bytes, shard.digest, base).tensors:
                if tensor.kind in (PARAM, BUFFER):
                    fill(model, None, tensor.name, tensor.kind, tensor.first, from_numpy(tensor.data, tensor.dtype))
        filled[layer] = ref
