"""What must hold when a run is over, whatever has struck it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from app.gc import collect
from app.verify import verify_run
from storage.catalog import Catalog
from storage.errors import CorruptObjectError, ObjectNotFoundError
from storage.keys import EPOCHS, FAULTS, HISTORY, LAYERS, RECORDS
from storage.object_store import ObjectStore
from tests.faults.campaign.recorder import digest_of_state
from tests.helpers.runs import joined, tensors_of
from workers.state import STEP

KNOWN = (EPOCHS, RECORDS, FAULTS, HISTORY, LAYERS, "catalog/life/")


@dataclass
class Told:
    """What the workers told, see `recorder`."""

    states: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    """(attempt, step) -> layer -> digest."""
    counts: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    """(attempt, step) -> parameter -> updates that the optimizer has counted."""
    restores: list[dict] = field(default_factory=list)

    @property
    def base(self) -> dict[str, str]:
        return self.restores[0]["base"]

    def steps_lost(self) -> dict[int, int]:
        """Steps that each attempt after the first has to redo."""
        reached = 0
        lost = {}
        for attempt, point in sorted({(line["attempt"], line["restored"]) for line in self.restores}):
            lost[attempt] = max(0, reached - point)
            reached = max((step for of, step in self.states if of == attempt), default=point)
        return lost


def read_states(folder: Path) -> Told:
    """Read every file; a torn last line belongs to a killed process."""
    told = Told()
    for path in folder.iterdir():
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue
            line = json.loads(text)
            if "restored" in line:
                told.restores.append(line)
            else:
                told.states[line["attempt"], line["step"]] = line["layers"]
                told.counts[line["attempt"], line["step"]] = line["counts"]
    return told


def violations(store: ObjectStore, steps: int, max_lag: int, told: Told) -> list[str]:
    """Every promise that was broken, one line each."""
    record = Catalog(store).newest_record()
    if record is None:
        return ["there is no record"]
    found = []
    if not record.finished or record.step != steps or record.progress.step != steps:
        found.append(f"expected finished at step {steps}, got {record.step}, finished: {record.finished}")
    return found + _bounds(store, max_lag, told) + _restores(told) + _versions(store, told) + _store(store)


def _bounds(store: ObjectStore, max_lag: int, told: Told) -> list[str]:
    records = Catalog(store).restorable().records
    bound = records[0].staleness_bound_steps
    ages = [(record, max(record.ages().values())) for record in records]
    found = [f"record {record.epoch}.{record.seq}: age {age} > {bound}" for record, age in ages if age > bound]
    for line in told.restores:
        age = line["restored"] - min(step for step, _, _ in line["versions"].values())
        if age > bound:
            found.append(f"restore of attempt {line['attempt']}: age {age} > {bound}")
    if not any(i.kind in ("unreadable version", "previous restore point") for i in records[0].incidents):
        too_many = {attempt: lost for attempt, lost in told.steps_lost().items() if lost > max_lag}
        found += [f"attempt {attempt} lost {lost} steps, max_lag {max_lag}" for attempt, lost in too_many.items()]
    return found


def _truth(told: Told, layer: str, step: int, attempt: int) -> str | None:
    return told.base[layer] if step == 0 else told.states.get((attempt, step), {}).get(layer)


def _true_count(told: Told, tensor: str, step: int, attempt: int) -> int | None:
    return 0 if step == 0 else told.counts.get((attempt, step), {}).get(tensor)


def _restores(told: Told) -> list[str]:
    found = []
    for line in told.restores:
        if line["base"] != told.base:
            found.append(f"attempt {line['attempt']} began with other base weights")
        for layer, (step, attempt, digest) in line["versions"].items():
            if digest != _truth(told, layer, step, attempt):
                found.append(
                    f"attempt {line['attempt']} restored {layer} of step {step}, attempt {attempt}: not its state"
                )
        for tensor, (step, attempt, count) in line["counted"].items():
            if count != _true_count(told, tensor, step, attempt):
                found.append(
                    f"attempt {line['attempt']} restored {tensor} with {count} updates: not its optimizer's step"
                )
    return found


def _versions(store: ObjectStore, told: Told) -> list[str]:
    """Stored versions that a retained record names are the state of their step."""
    found = []
    for layer, ref in {item for r in Catalog(store).restorable().records for item in _named(r)}:
        try:
            state = joined(tensors_of(store, ref))
        except (CorruptObjectError, ObjectNotFoundError):
            continue  # `verify_run` says so
        if digest_of_state(state) != _truth(told, layer, ref.step, ref.attempt):
            found.append(f"{ref.manifest_key}: stored is not the state of its step")
        counts = {name: values[0] for (name, kind), values in state.items() if kind == STEP}
        if any(count != _true_count(told, name, ref.step, ref.attempt) for name, count in counts.items()):
            found.append(f"{ref.manifest_key}: its optimizer's step is another")
    return found


def _named(record):
    return [(name, ref) for part in (record.layers, record.previous) for name, ref in part.items() if ref.manifest_key]


def _store(store: ObjectStore) -> list[str]:
    """Catalog and store agree, and nothing unnamed is left."""
    found = list(verify_run(store).problems)
    found += [f"unnamed: {key}" for key in collect(store, dry_run=True).keys]
    found += [f"unknown: {info.key}" for info in store.list("") if not info.key.startswith(KNOWN)]
    found += [f"unfinished: {begun.key}" for begun in store.unfinished()]
    return found
