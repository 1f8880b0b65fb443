"""A run made up by tests: the layers written longest ago first, as a budget passes, and failures."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from app.report.page import RunStory
from app.status import status_of
from storage import keys
from storage.catalog import Catalog
from storage.history import Durable, History, SegmentMeta, Tick, encode_segment
from storage.messages import LayerSums
from storage.object_store import open_object_store
from storage.options import CheckpointOptions, StorageOptions
from storage.records import Incident, LayerFacts, Phases, Progress, Record, Recovery, Totals
from storage.retention import Kept
from tests.helpers import records

LAYERS = {"embedding": 4_000_000, **{f"block-{number}": 1_000_000 for number in range(8)}, "head": 4_000_000}
"""Bytes of each layer of a small model."""

STEP_S = 0.25
RESTART_S = 12.0
LATENCY = 2
"""Ticks from a version's snapshot to its being durable."""

_PHASES = {"detect": 0.27, "restart": 0.44, "imports": 14.09, "load_model": 0.34, "plan": 0.14, "read": 0.14}


class MadeUpRun:
    """A finished run of one epoch with a tick a step."""

    def __init__(
        self,
        sizes: Mapping[str, int] = LAYERS,
        *,
        steps: int = 60,
        budget: float = 0.1,
        failures: Sequence[int] = (),
        name: str = "quickstart",
        seed: int = 0,
    ) -> None:
        """`budget`: share of all layers a tick; `failures`: steps after which the group dies; `seed`: of the loss."""
        self.sizes, self.steps, self.name = sizes, steps, name
        self.ticks = _ticks(sizes, steps, budget, sorted(failures), seed)
        self.record = _record(self)

    def store(self, folder: Path) -> str:
        """Store catalog and history below `folder`, as the CheckpointActor would; return the run's URL."""
        store = open_object_store(StorageOptions(url=str(folder)), self.name)
        spec = {"checkpoint": json.loads(CheckpointOptions().model_dump_json())}
        catalog = Catalog(store)
        catalog.claim(records.claim().model_copy(update={"spec": spec}))
        catalog.commit(self.record)
        meta = SegmentMeta(epoch=1, seq=0, layers=tuple(self.sizes))
        store.put(keys.history(1, 0), encode_segment(meta, self.ticks))
        return f"{folder}/{self.name}"

    @property
    def story(self) -> RunStory:
        """What the report page is made of."""
        return RunStory(status_of(f"runs/{self.name}", [Kept(self.record, ("recent",))]), History(self.ticks))


def _ticks(sizes: Mapping[str, int], steps: int, budget: float, failures: Sequence[int], seed: int) -> list[Tick]:
    durable, taken = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)  # newest step of each layer
    on_the_way: list[tuple[str, int]] = []
    attempt, step, seconds, tokens, restore_point = 1, 0, 9.0, 0.0, 0
    ticks: list[Tick] = []
    while step < steps:
        step, seconds = step + 1, seconds + STEP_S
        landed = [(layer, at) for layer, at in on_the_way if at + LATENCY <= step or step == steps]
        tokens = min(tokens + budget * sum(sizes.values()), sum(sizes.values()) / 2)
        chosen = []
        for layer in sorted(sizes, key=lambda layer: taken[layer]):
            if sizes[layer] > tokens:
                break
            tokens -= sizes[layer]
            chosen.append(layer)
        taken |= dict.fromkeys(chosen, step)
        on_the_way = [version for version in on_the_way if version not in landed] + [(layer, step) for layer in chosen]
        ticks.append(
            Tick(
                epoch=1,
                attempt=attempt,
                step=step,
                seconds=seconds,
                loss=_loss(step, steps, seed),
                restore_point=restore_point,
                flush=step == steps,
                sums={layer: LayerSums(1e-6 * step, 1.0, 1e-4) for layer in sizes},
                chosen=tuple(chosen),
                durable=tuple(Durable(layer, at, sizes[layer], seconds - 0.05) for layer, at in landed),
            )
        )
        durable |= dict(landed)
        restore_point = max(durable.values())
        if attempt <= len(failures) and step == failures[attempt - 1]:
            attempt, step, seconds = attempt + 1, restore_point, seconds + RESTART_S
            taken, on_the_way = dict(durable), []
    return ticks


def _loss(step: int, steps: int, seed: int) -> float:
    return 2 + 4 * math.exp(-5 * step / steps) + random.Random(f"{seed}-{step}").gauss(0, 0.15)


def _record(run: MadeUpRun) -> Record:
    falls = [(before, after) for before, after in pairwise(run.ticks) if before.attempt != after.attempt]
    evaluated = range(run.steps // 6, run.steps + 1, run.steps // 6)
    layers = {
        layer: records.ref(layer, run.steps).model_copy(update={"bytes": run.sizes[layer]}) for layer in run.sizes
    }
    told = records.record(
        layers,
        bound=60,
        totals=Totals(
            ticks=len(run.ticks),
            attempts=len(falls) + 1,
            bytes_written=sum(version.bytes for tick in run.ticks for version in tick.durable),
        ),
        progress=Progress(
            step=run.steps,
            loss=run.ticks[-1].loss,
            eval_losses=tuple((step, _loss(step, run.steps, -1)) for step in evaluated),
            step_seconds_median=0.195,
            tick_seconds_median=0.0167,
            tick_seconds_p99=0.0519,
        ),
        recoveries=tuple(
            Recovery(
                attempt=after.attempt,
                cause="rank 1: worker process died",
                restore_point=after.restore_point,
                steps_lost=before.step - after.restore_point,
                max_age=20,
                mean_age=8.4,
                seconds=16.09,
                phases=Phases(**_PHASES, broadcast=0.11, first_step=0.56),
            )
            for before, after in falls
        ),
        incidents=tuple(
            Incident(step=before.step, kind="fault injected", what=f"worker-1-{before.step}-backward-any-kill")
            for before, _ in falls
        ),
        finished=True,
    )
    sizes = tuple(LayerFacts(name=layer, bytes=size) for layer, size in run.sizes.items())
    return told.model_copy(update={"facts": sizes})
