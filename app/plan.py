"""Plan: what a recorded run would have written and risked under other checkpoint settings, without training."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from app.budget import check_budget
from app.existing_run import existing_run, no_restore_point
from app.spec_problems import problems_of
from storage.catalog import Catalog
from storage.encoding import largest_share
from storage.errors import CorruptObjectError, SpecError
from storage.growth import Growth
from storage.history import History, read_history
from storage.object_store import ObjectStore
from storage.options import CheckpointOptions, Options
from storage.outlook import Outlook, outlook
from storage.recording import Recording
from storage.records import LayerFacts, Record
from storage.replay import Replay, UploadCosts

SHOWN = ("write_budget", "criterion", "threshold", "staleness_bound_steps", "codec")
"""Settings that can be planned."""


_MUCH = 0.02
"""Share of extrapolated ages that is told: a restore point may be a little older than any reference."""


class _Section(Options):
    checkpoint: CheckpointOptions


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Settings, and what comes of them."""

    settings: dict[str, Any]
    outlook: Outlook


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recorded run, the same settings decided anew, which shows how far a replay is off, and other settings."""

    run: str
    recorded: Scenario
    replayed: Scenario
    planned: Scenario
    notes: tuple[str, ...]


def plan_run(store: ObjectStore, changes: Mapping[str, Any]) -> Plan:
    """Replay what the run in `store` has recorded with its checkpoint settings and `changes` to them.

    Raises:
        SpecError: there is no run, or none that has recorded anything; or the settings cannot be.
        CorruptObjectError: its history and its catalog are not of one run.
        StoreError: the store failed.
    """
    claim = existing_run(store)
    present = CheckpointOptions.model_validate(claim.spec["checkpoint"])
    wanted = _changed(present, changes)
    share = largest_share(wanted, claim.spec["model"]["dtype"])
    check_budget(wanted, share)
    record = Catalog(store).newest_record()
    if record is None:
        raise no_restore_point(store)
    history = read_history(store)
    recording, facts = _recording(store, record, history)
    growth = Growth(recording)
    same_codec = (wanted.codec, wanted.delta) == (present.codec, present.delta)

    def replayed(options: CheckpointOptions, encoded_share: float | None) -> Scenario:
        costs = UploadCosts(recording, facts, encoded_share)
        first_guess = largest_share(options, claim.spec["model"]["dtype"])
        standings = Replay(recording, growth, facts, options, costs, first_guess).run()
        return Scenario(settings=_shown(options), outlook=outlook(recording, growth, standings, facts))

    planned = replayed(wanted, None if same_codec else share)
    return Plan(
        run=store.url,
        recorded=Scenario(settings=_shown(present), outlook=outlook(recording, growth, recording.standings(), facts)),
        replayed=replayed(present, None),
        planned=planned,
        notes=tuple(_notes(record, history, planned.outlook, wanted, same_codec=same_codec)),
    )


def _changed(options: CheckpointOptions, changes: Mapping[str, Any]) -> CheckpointOptions:
    merged = options.model_dump(mode="json") | dict(changes)
    if changes.keys() - {"codec"}:
        merged["mode"] = "adaptive"  # in mode full none of the others means anything
    data = {"checkpoint": merged}
    try:
        return _Section.model_validate_json(json.dumps(data), strict=True).checkpoint
    except ValidationError as error:
        raise SpecError("\n".join(problems_of(error, data, _Section))) from None


def _recording(store: ObjectStore, record: Record, history: History) -> tuple[Recording, list[LayerFacts]]:
    """The run's ticks, and its trained layers in their order."""
    if all(tick.held or tick.flush for tick in history.ticks):
        raise SpecError(
            f"RUN: expected a run that has recorded ticks, got {store.url}, which has none"
            f"{': ' + history.problems[0] if history.problems else ' (yet)'}; take another run, or wait a minute"
        )
    facts = [fact for fact in record.facts if not fact.frozen]
    names = [fact.name for fact in facts]
    other = next((tick for tick in history.ticks if list(tick.sums) != names), None)
    if other is not None:
        raise CorruptObjectError(
            f"{store.url}: history of epoch {other.epoch}, step {other.step}: expected the sums of the catalog's "
            f"{len(names)} trained layers, got {len(other.sums)} of others; delete that epoch's history"
        )
    return Recording.of(history.ticks), facts


def _shown(options: CheckpointOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("mode", *SHOWN)}


def _notes(
    record: Record, history: History, planned: Outlook, wanted: CheckpointOptions, *, same_codec: bool
) -> list[str]:
    """What bounds the plan's worth."""
    notes = [f"left out: {problem}" for problem in history.problems]
    told, ticks = len({(tick.attempt, tick.step) for tick in history.ticks}), record.totals.ticks
    if told < ticks:
        notes.append(f"the history tells {told:,} of the run's {ticks:,} ticks")
    if planned.extrapolated > _MUCH:
        notes.append(
            f"{100 * planned.extrapolated:.0f} % of the layers' ages are beyond any that the run recorded: "
            "their drift and impact are extrapolated"
        )
    if not same_codec and wanted.codec != "raw":
        notes.append(f"bytes of codec {wanted.codec} are at most as planned: the run has recorded none of its versions")
    if planned.max_lag + wanted.interval_steps > wanted.max_lag:
        notes.append(f"at {planned.max_lag} steps the lag reaches max_lag = {wanted.max_lag}: training would be held")
    return notes


def plan_table(plan: Plan) -> RenderableType:
    """The recorded run beside the predictions. Fits 80 columns."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", style="bold", no_wrap=True)
    scenarios = {"recorded": plan.recorded, "replayed": plan.replayed, "planned": plan.planned}
    for heading in scenarios:
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [(name.replace("_", " "), [_setting(s.settings[name]) for s in scenarios.values()]) for name in SHOWN]
    figures = [_figures(scenario.outlook) for scenario in scenarios.values()]
    rows += [(name, [of[name] for of in figures]) for name in figures[0]]
    for place, (name, cells) in enumerate(rows):
        table.add_row(name, *(Text(cell) for cell in cells), end_section=place == len(SHOWN) - 1)
    told = "replayed: the recorded settings, decided anew; what it is off by, the plan may be, too"
    return Group(Text(plan.run), table, Text(told), *(Text(note) for note in plan.notes))


def _setting(value: object) -> str:
    return "-" if value is None else str(value)


def _figures(of: Outlook) -> dict[str, str]:
    return {
        "written": decimal(of.bytes_written),
        "less than full checkpoints": "-" if of.reduction is None else f"{of.reduction:.1f}x",
        "age, mean (steps)": f"{of.mean_age:.1f}",
        "age, largest": str(of.max_age),
        "steps a failure redoes, mean": f"{of.mean_lag:.1f}",
        "steps redone, largest": str(of.max_lag),
        "impact, mean (loss)": "-" if of.mean_impact is None else f"{of.mean_impact:.2g}",
        "impact, largest": "-" if of.max_impact is None else f"{of.max_impact:.2g}",
    }


def plan_document(plan: Plan) -> dict[str, Any]:
    """What `plan --json` prints."""
    return asdict(plan)
