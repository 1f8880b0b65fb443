"""Export: the newest restore point as a folder that `AutoModelForCausalLM.from_pretrained` loads."""

import tempfile
from pathlib import Path

from torch import nn

from app.existing_run import existing_run, no_restore_point
from storage.catalog import Catalog
from storage.errors import SpecError
from storage.object_store import ObjectStore
from storage.records import Record
from storage.shard_reader import read_shard
from workers.layers import find_layers
from workers.model import base_digest, build_model, load_tokenizer
from workers.options import DataOptions, ModelOptions
from workers.state import BUFFER, PARAM, fill, from_numpy, model_base


def export_run(store: ObjectStore, folder: Path) -> int:
    """Write the newest restore point's weights, configuration and tokenizer to `folder`; returns its step.

    The folder appears whole or not at all.

    Raises:
        SpecError: the run has no restore point, or `folder` holds something.
        CorruptObjectError, ObjectNotFoundError: a shard cannot be read.
    """
    check_export_folder("DIR", folder)
    claim, catalog = existing_run(store), Catalog(store)
    record = catalog.newest_record()
    if record is None:
        raise no_restore_point(store)
    options = ModelOptions.model_validate({**claim.spec["model"], "path": record.base.source})
    model = build_model(options, int(claim.spec["training"]["seed"]))
    digest = base_digest(model, find_layers(model, options.layers))
    if digest != record.base.digest:
        raise SpecError(
            f"model.path: {record.base.source}: expected the weights the run began with ({record.base.digest}), "
            f"got {digest}; restore them"
        )
    _fill(model, catalog, record)
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


def _fill(model: nn.Module, catalog: Catalog, record: Record) -> None:
    base = model_base(model)  # no two shards hold the same elements, so what one of them needs is not filled yet
    stored = [catalog.read_manifest(ref) for ref in record.layers.values() if ref.manifest_key is not None]
    for shard in (shard for manifest in stored for shard in manifest.shards):
        for tensor in read_shard(catalog.store, shard.key, shard.bytes, shard.digest, base).tensors:
            if tensor.kind in (PARAM, BUFFER):
                fill(model, None, tensor.name, tensor.kind, tensor.first, from_numpy(tensor.data, tensor.dtype))
