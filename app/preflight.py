"""Everything that can be known to be wrong before anything is started or written, the cheapest first.

`check_spec`, `check_run`, `prepare`, `check_store`: only the last one writes, and leaves nothing behind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app.budget import check_budget
from app.job_spec import JobSpec
from app.resources import check_cluster, check_gpus
from app.spec_identity import differing_fields, public_dump
from storage.catalog import Catalog
from storage.encoding import encoding_of, largest_share
from storage.errors import RunLiveError, SpecError
from storage.liveness import is_alive
from storage.object_store import ObjectStore
from storage.options import CheckpointOptions
from storage.probe import probe_store
from storage.records import Record
from workers.data import TokenizedData, load_data
from workers.layers import Layer, find_layers
from workers.model import build_meta_model, load_tokenizer
from workers.slices import trained_bytes
from workers.state import planned_layer_bytes

WORKING_DIR_COPIES = "/runtime_resources/working_dir_files/"
"""Part of the path of every copy of a submitted working directory, below Ray's session directory."""


@dataclass(frozen=True)
class Prepared:
    """What the checks found out on the way."""

    data: TokenizedData
    pad_id: int
    total_steps: int
    full_bytes: int
    """Size of the full state: parameters, optimizer state and buffers of every trained layer."""
    base_bytes: int
    """Size of the base version that stays in the nodes' object stores; 0 if the codec needs none."""


def check_spec(spec: JobSpec) -> None:
    """Check what needs neither the store nor the model.

    Raises:
        SpecError: the budget cannot keep the bound, or this machine cannot run the job.
    """
    check_budget(spec.checkpoint, largest_share(spec.checkpoint, spec.model.dtype))
    check_gpus(spec.scaling)
    check_cluster()


def check_run(spec: JobSpec, store: ObjectStore) -> Record | None:
    """Check what the store holds of the run; returns the run's newest record.

    Raises:
        StoreError: the store cannot be read.
        SpecError: the run was started with another spec; one line for each field that differs.
    """
    store.check_reachable()
    catalog = Catalog(store)
    claim = catalog.newest_claim()
    if claim is None:
        return None
    differing = differing_fields(claim.spec, public_dump(spec))
    if differing:
        what = f"as run {spec.name!r} was started; restore it, or give the run another name"
        raise SpecError("\n".join(f"{line}, {what}" for line in differing))
    return catalog.newest_record()


def fleeting_paths(resolved: JobSpec) -> list[str]:
    """One warning for each local path to write that lies in the copy which `ray job submit --working-dir` makes."""
    return [
        f"{field}: {path} lies in Ray's temporary copy of the working directory, and is lost with it; "
        "give an absolute path or an s3:// URL"
        for field, path in (("storage.url", resolved.storage.url), ("export", resolved.export))
        if path is not None and WORKING_DIR_COPIES in path
    ]


def prepare(spec: JobSpec) -> Prepared:
    """Check the model and the data, and tokenize the data once for all attempts.

    Raises:
        SpecError: something the spec names cannot be used.
    """
    model = build_meta_model(spec.model)
    layers = find_layers(model, spec.model.layers)
    full_bytes = sum(planned_layer_bytes(layer, model) for layer in layers)
    if spec.checkpoint.in_flight_bytes is not None:
        check_in_flight(spec.checkpoint, full_bytes, spec.checkpoint.in_flight_bytes)
    tokenizer = load_tokenizer(spec.model, spec.data)
    data = load_data(spec.data, tokenizer, spec.storage.s3)
    return Prepared(
        data=data,
        pad_id=_pad_id(tokenizer),
        total_steps=total_steps(spec, len(data.train)),
        full_bytes=full_bytes,
        base_bytes=_base_bytes(spec, model, layers),
    )


def check_store(spec: JobSpec, store: ObjectStore, prepared: Prepared, *, takeover: bool) -> None:
    """Check that nobody else works on the run, that it goes on with its own data, and what the store can do.

    Raises:
        SpecError: the run began with other data.
        RunLiveError: another driver works on the run.
        StoreError: the store cannot be used.
    """
    claim = Catalog(store).newest_claim()
    if claim is not None and claim.data_fingerprint != prepared.data.fingerprint:
        raise SpecError(
            f"data.path: {spec.data.path}: expected the examples that run {spec.name!r} began with (digest "
            f"{claim.data_fingerprint}), got others (digest {prepared.data.fingerprint}); restore them, or give the "
            "run another name"
        )
    if claim is not None and not takeover and is_alive(store, claim):
        raise RunLiveError(
            f"{store.url}: epoch {claim.epoch} of this run is alive (pid {claim.where.pid} on {claim.where.host}); "
            "wait for it, stop it, or give --takeover to take the run over from it"
        )
    probe_store(store, spec.storage.allow_unsafe_create)


def _base_bytes(spec: JobSpec, model: PreTrainedModel, layers: Sequence[Layer]) -> int:
    if not encoding_of(spec.checkpoint).needs_base:
        return 0
    return sum(trained_bytes(layer, model) for layer in layers)


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return int(tokenizer.pad_token_id or 0)


def total_steps(spec: JobSpec, examples: int) -> int:
    """Optimizer steps of the whole run."""
    training = spec.training
    if training.steps is not None:
        return training.steps
    assert training.passes is not None
    return max(1, math.ceil(training.passes * examples / training.global_batch))


def check_in_flight(options: CheckpointOptions, full_bytes: int, limit_bytes: int) -> None:
    """Refuse a limit on bytes in flight that a full checkpoint would break."""
    milestones = options.milestone_every_steps
    if (options.mode == "full" or milestones is not None) and full_bytes > limit_bytes:
        field = "mode: full" if options.mode == "full" else f"milestone_every_steps: {milestones}"
        raise SpecError(
            f"checkpoint.{field} hands over {full_bytes} bytes at once, the limit per node is {limit_bytes} "
            "(half of Ray's object store unless checkpoint.in_flight_bytes says otherwise); start Ray with a larger "
            "object store"
        )


def check_base(base_bytes: int, store_bytes: int, nodes: int) -> None:
    """Refuse codec `delta` where the base version, spread over all nodes, takes more than half their object stores.

    `store_bytes`: size of the smallest one.
    """
    if 2 * base_bytes > store_bytes * nodes:
        raise SpecError(
            f"checkpoint.codec: delta keeps the weights the run began with ({base_bytes} bytes) in Ray's object store, "
            f"expected at least twice as much there, got {nodes} node(s) with {store_bytes} bytes; start Ray with a "
            "larger object store, or choose raw or lossless"
        )
