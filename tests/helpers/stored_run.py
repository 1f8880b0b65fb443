"""A simulated run as it lies in a store: claim, record and history, without layers."""

from typing import Any

from storage import keys
from storage.history import SegmentMeta, encode_segment
from storage.object_store import ObjectStore
from storage.options import CheckpointOptions
from storage.records import LayerFacts, Totals, VersionRef
from tests.helpers.records import claim, record
from tests.helpers.simulated_run import SimulatedRun, moving_weights

FACTS = (LayerFacts(name="embedding", bytes=4000), *(LayerFacts(name=f"block.{i}", bytes=500) for i in range(5)))


def store_run(store: ObjectStore, *, steps: int, segments: int = 3, **checkpoint: Any) -> SimulatedRun:
    """Simulate a run and store what it would have left."""
    options = CheckpointOptions.model_validate({"write_budget": "1/5", "staleness_bound_steps": 40} | checkpoint)
    run = SimulatedRun(moving_weights(len(FACTS), steps), FACTS, options, steps)
    spec = {"checkpoint": options.model_dump(mode="json"), "model": {"dtype": "float32"}}
    made = claim().model_copy(update={"epoch": 1, "spec": spec})
    store.put(keys.epoch_claim(1), made.to_bytes())
    stored = {
        fact.name: VersionRef(step=steps, epoch=1, attempt=1, manifest_key="k", manifest_digest="d", bytes=507)
        for fact in FACTS
    }
    told = record(stored, totals=Totals(ticks=steps, bytes_written=run.bytes_written, attempts=1))
    told = told.model_copy(update={"facts": FACTS, "finished": True})
    store.put(keys.record(1, 0), told.to_bytes())
    size = -(-len(run.ticks) // segments)
    for seq in range(segments):
        meta = SegmentMeta(epoch=1, seq=seq, layers=tuple(fact.name for fact in FACTS))
        store.put(keys.history(1, seq), encode_segment(meta, run.ticks[seq * size : (seq + 1) * size]))
    return run
