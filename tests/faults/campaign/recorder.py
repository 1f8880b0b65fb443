"""What really happened, told by the workers: the state of every layer at every step, and after every restore.

Rank 0 hashes each layer when a step is done and before anything is handed over; every rank hashes what it has restored.
"""

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import xxhash

from storage.messages import RestorePlan, Verdict
from storage.records import VersionRef
from workers import checkpointer
from workers.loop_config import LoopConfig
from workers.slices import cut, trainable
from workers.state import STEP, slice_tensors, to_numpy
from workers.train_loop import train

PAUSE_S = 0.02
"""Sleep of every step, so that what strikes from outside finds the run where it was meant to."""


def digest_of_state(state: Mapping[tuple[str, str], np.ndarray[Any, Any]]) -> str:
    """Digest of a layer state, (tensor, kind) -> all elements, without the optimizer's steps.

    A tensor has one, whatever the ages of its parts.
    """
    digest = xxhash.xxh3_128()
    for (name, kind), values in sorted(state.items()):
        if kind == STEP:
            continue
        digest.update(f"{name} {kind} {values.size} ".encode())
        digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    return digest.hexdigest()


def _digests(layers: Any, model: Any, optimizer: Any) -> dict[str, str]:
    found = {}
    for layer in layers:
        if trainable(layer, model):
            parts = slice_tensors(cut(layer, model, 0, 1), layer, model, optimizer)
            found[layer.name] = digest_of_state({(part.name, part.kind): to_numpy(part.tensor) for part in parts})
    return found


def _counts(model: Any, optimizer: Any) -> dict[str, int]:
    """Updates that the optimizer has counted, by parameter. Restored from an older layer it stays behind the step."""
    steps = {name: optimizer.state.get(parameter, {}).get(STEP, 0) for name, parameter in model.named_parameters()}
    return {name: int(step) for name, step in steps.items()}


def _newest_part(layers: Mapping[str, Any], refs: Mapping[str, VersionRef]) -> dict[str, tuple[int, int]]:
    """(step, attempt) of the newest version that holds a part of each parameter; of two as new, the last layer's."""
    newest = {}
    for name, ref in sorted(refs.items(), key=lambda item: (item[1].step, item[0])):
        newest |= {held.tensor: (ref.step, ref.attempt) for held in layers[name].params}
    return newest


def recorded_train(folder: str, config: dict[str, LoopConfig]) -> Verdict | None:
    """`workers.train_loop.train`, with its states told to a file of this process in `folder`."""
    path = Path(folder) / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
    restore, after_step = checkpointer.restore, checkpointer.Checkpointer.after_step

    def tell(**line: Any) -> None:
        with path.open("a") as file:  # written and closed at once: a SIGKILL later takes nothing back
            file.write(json.dumps(line) + "\n")

    def recorded_restore(plan: RestorePlan, store: Any, layers: Any, model: Any, optimizer: Any, *rest: Any) -> Any:
        base = _digests(layers.values(), model, optimizer)
        used = restore(plan, store, layers, model, optimizer, *rest)
        digests = _digests(layers.values(), model, optimizer)
        refs = {name: used.layers[name].ref for name in digests}
        versions = {name: (ref.step, ref.attempt, digests[name]) for name, ref in refs.items()}
        counts, newest = _counts(model, optimizer), _newest_part(layers, refs)
        counted = {tensor: (*version, counts[tensor]) for tensor, version in newest.items()}
        tell(restored=used.step, attempt=used.attempt, versions=versions, base=base, counted=counted)
        return used

    def recorded_after_step(self: Any, step: int, stats: Any) -> None:
        if self._rank == 0:
            layers = _digests(self._layers.values(), self._model, self._optimizer)
            tell(step=step, attempt=self._attempt, layers=layers, counts=_counts(self._model, self._optimizer))
        after_step(self, step, stats)
        time.sleep(PAUSE_S)

    with (
        patch.object(checkpointer, "restore", recorded_restore),
        patch.object(checkpointer.Checkpointer, "after_step", recorded_after_step),
    ):
        return train(config)
