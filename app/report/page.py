"""The report page: assembled from a run's status and history, written as one file that needs nothing else."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.filesize import decimal

from app.report.figures import (
    LossLines,
    age_figure,
    loss_figure,
    marks_of,
    phases_figure,
    rate_figure,
    stored_figure,
)
from app.report.series import Bins, layer_ages, loss_curves, loss_difference, stored_versions, write_rate
from app.status import RunStatus, read_status
from app.summary import seconds
from storage.errors import SpecError
from storage.history import History, Tick, read_history
from storage.object_store import ObjectStore
from storage.records import Phases

_FORMS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": "{:,}".format,
    "tenths": "{:.1f}".format,
    "times": "{:.1f}×".format,
    "loss": "{:.4f}".format,
    "hundredths": "{:.2f}".format,
    "bytes": decimal,
    "seconds": seconds,
}


@dataclass(frozen=True)
class RunStory:
    """What the page tells of one run."""

    status: RunStatus
    history: History

    @classmethod
    def read(cls, store: ObjectStore) -> "RunStory":
        """The story of the run that `store` holds.

        Raises:
            SpecError: there is no run, or none that has committed anything yet.
            StoreError: the store cannot be read.
        """
        return cls(read_status(store), read_history(store))

    @property
    def ticks(self) -> list[Tick]:
        """What was recorded, oldest first."""
        return self.history.ticks

    @property
    def name(self) -> str:
        """The run's name: the last part of its URL."""
        return self.status.run.rstrip("/").rpartition("/")[2]

    @property
    def last_step(self) -> int:
        """Newest step that anything is known of."""
        return max([self.status.step, *(tick.step for tick in self.ticks)])


def write_report(store: ObjectStore, path: Path, against: ObjectStore | None = None) -> int:
    """Write the page of the run in `store`, beside it the run in `against`; return its size in bytes.

    Raises:
        SpecError: there is no such run, or `path` cannot be written.
        StoreError: a store cannot be read.
    """
    page = render(RunStory.read(store), RunStory.read(against) if against else None).encode()
    try:
        path.write_bytes(page)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"-o {path}: {reason}; expected the name of a file in an existing folder") from error
    return len(page)


def render(run: RunStory, other: RunStory | None = None) -> str:
    """The page as HTML. Each value of the status stands in a `<data>` element, with the path it has in `status --json`.

    What comes from the run is escaped; the page holds no script and asks for nothing.
    """
    environment = Environment(
        loader=PackageLoader("app.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    told = _Told(run) if run.ticks else None
    return environment.get_template("page.html").render(
        run=run,
        other=other,
        status=run.status,
        datum=_datum_of(run.status),
        other_datum=_datum_of(other.status, "against.") if other else None,
        held_out=_held_out(run.status, other.status) if other else [],
        phases=list(Phases.model_fields),
        told=told,
        figures=_figures_of(run, told, other),
        decimal=decimal,
    )


def _datum_of(status: RunStatus, prefix: str = "") -> Callable[[str, str], Markup]:
    """A function that shows the value at a path of the status in a form; a dash where there is none."""
    document = status.model_dump(mode="json")

    def datum(path: str, form: str) -> Markup:
        value: Any = document
        for part in path.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        shown = "–" if value is None else _FORMS[form](value)
        return Markup('<data data-field="{}{}" value="{}">{}</data>').format(prefix, path, json.dumps(value), shown)

    return datum


def _held_out(run: RunStatus, other: RunStatus) -> list[tuple[int, float, float, float]]:
    """(step, loss, the other run's, difference in percent) where both were evaluated, with finite losses."""
    others = {step: loss for step, loss in other.eval_losses if loss}
    both = [(step, loss, others[step]) for step, loss in run.eval_losses if loss is not None and step in others]
    return [(step, loss, beside, 100 * (loss / beside - 1)) for step, loss, beside in both]


@dataclass(frozen=True)
class _LayerTold:
    versions: int
    bytes: int
    mean_age: float
    greatest_age: float


class _Told:
    """What the history tells beyond the status."""

    def __init__(self, run: RunStory) -> None:
        # A frozen layer has age 0 at its base version; it is in no history.
        self.layers = [x.name for x in run.status.layers if x.age == run.status.restore_point - x.step]
        self.bins = Bins.of(run.ticks, run.last_step)
        self.stored = stored_versions(run.ticks, self.layers, self.bins)
        self.ages = layer_ages(run.ticks, self.layers, self.bins)
        self.rate = write_rate(run.ticks)
        self.bytes = int(self.stored.bytes.sum())

    def of_layers(self) -> dict[str, _LayerTold]:
        """Numbers of each trained layer."""
        counts = self.stored.versions.sum(axis=1)
        columns = (counts, self.stored.bytes, self.ages.mean_of_layer, self.ages.greatest_of_layer)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {layer: _LayerTold(*row) for layer, row in zip(self.layers, rows, strict=True)}


def _figures_of(run: RunStory, told: _Told | None, other: RunStory | None) -> dict[str, Markup]:
    """The figures for which there is something to show, by name."""
    status, others = run.status, other.ticks if other else []
    marks = marks_of(status.recoveries)
    drawn: dict[str, str] = {}
    bins = Bins.of(run.ticks or others, max(run.last_step, other.last_step if other else 0))
    lines, other_lines = _lines(run, bins), _lines(other, bins) if other else None
    if any(some and (some.training or some.finite_held_out) for some in (lines, other_lines)):
        drawn["loss"] = loss_figure(lines, other_lines, loss_difference(run.ticks, others, bins), bins, marks)
    if any(recovery.phases for recovery in status.recoveries):
        drawn["phases"] = phases_figure(status.recoveries)
    if told:
        numbers = {recovery.attempt: number for number, recovery in enumerate(status.recoveries, 1)}
        drawn["stored"] = stored_figure(told.stored, told.layers, told.bins, marks)
        drawn["ages"] = age_figure(told.ages, told.layers, told.bins, status.staleness_bound_steps, marks)
        drawn["rate"] = rate_figure(told.rate, numbers)
    return {name: Markup(svg) for name, svg in drawn.items()}


def _lines(story: RunStory, bins: Bins) -> LossLines:
    return LossLines(story.name, loss_curves(story.ticks, bins), story.status.eval_losses)
