"""The report's figures. Each takes what it shows as arrays and returns the text of an `<svg>` element."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.filesize import decimal

from app.report.series import Ages, Bins, Curve, Floats, Stored, WriteRate
from app.report.svg import GRID, INK, MUTED, OTHER, RECOVERY, RUN, SURFACE, WIDTH_IN, drawing, svg_of
from storage.records import Phases, Recovery

PHASE_COLOURS = {
    "detect": "#999999", "restart": "#e69f00", "imports": "#56b4e9", "load_model": "#009e73",
    "plan": "#f0e442", "read": "#0072b2", "broadcast": "#d55e00", "first_step": "#cc79a7",
}  # fmt: skip
"""Okabe and Ito, Color Universal Design (2008): told apart with any kind of colour vision."""

_STORED_RGB = (0.0, 0.45, 0.70)
_AGE_COLOURS = "Blues"
"""Paper stays white where layers are fresh. The page turns images round in its dark scheme."""
_ROW_IN, _LEAST_ROW_IN, _MOST_ROWS = 0.24, 0.16, 60
_LONGEST_NAME = 24
_NUMBERS_APART = 0.05  # of the axis: room for two numbers of two digits

Losses = Sequence[tuple[int, float | None]]


@dataclass(frozen=True)
class Mark:
    """A recovery, numbered as in the page's table: training fell back from step `died` to step `resumed`."""

    number: int
    resumed: int
    died: int


def marks_of(recoveries: Sequence[Recovery]) -> list[Mark]:
    """Where recoveries stand on an axis of steps."""
    return [
        Mark(number, recovery.restore_point, recovery.restore_point + recovery.steps_lost)
        for number, recovery in enumerate(recoveries, 1)
    ]


@dataclass(frozen=True)
class LossLines:
    """One run's losses: training loss by attempt, and held out as (step, loss); None: not finite."""

    name: str
    training: Sequence[Curve]
    held_out: Losses

    @property
    def finite_held_out(self) -> list[tuple[int, float]]:
        """What of `held_out` can be drawn."""
        return [(step, loss) for step, loss in self.held_out if loss is not None]


def loss_figure(run: LossLines, other: LossLines | None, difference: Curve, bins: Bins, marks: Sequence[Mark]) -> str:
    """Losses over steps, the other run's beside them, and the difference in percent below."""
    with drawing():
        rows = 2 if difference.steps.size else 1
        figure = Figure((WIDTH_IN, 3.2 + 1.2 * (rows - 1)), layout="constrained")
        panels = figure.subplots(rows, sharex=True, squeeze=False, height_ratios=[2.6, 1][:rows])[:, 0]
        _draw_losses(panels[0], run, RUN, {"linestyle": "-"}, {"marker": "o", "markersize": 5.5}, on_top=True)
        if other is not None:
            hollow = {"marker": "s", "markersize": 7.5, "markerfacecolor": "none"}
            _draw_losses(panels[0], other, OTHER, {"linestyle": "--"}, hollow, on_top=False)
        panels[0].set_ylabel("loss")
        figure.legend(loc="outside upper left", ncols=2)
        if rows == 2:
            _draw_curve(panels[1], difference, color=RUN)
            panels[1].axhline(0, color=MUTED, linewidth=0.8)
            panels[1].set_ylabel("difference, %")
        for panel in panels:
            _step_axis(panel, bins, marks, numbers=panel is panels[0])
        panels[-1].set_xlabel("step")
        return svg_of(figure, "loss", f"Loss over {bins.last} steps of {run.name}")


def _draw_losses(
    axes: Axes, lines: LossLines, colour: str, line: dict[str, Any], marker: dict[str, Any], *, on_top: bool
) -> None:
    look: dict[str, Any] = {"color": colour, "zorder": 3 if on_top else 2}
    for place, curve in enumerate(lines.training):
        _draw_curve(axes, curve, label=f"training, {short(lines.name)}" if place == 0 else None, **line, **look)
    if lines.finite_held_out:
        label = f"held out, {short(lines.name)}"
        axes.plot(*zip(*lines.finite_held_out, strict=True), linestyle="", clip_on=False, label=label, **marker, **look)


def _draw_curve(axes: Axes, curve: Curve, **look: Any) -> None:
    if (curve.low < curve.high).any():
        axes.fill_between(curve.steps, curve.low, curve.high, color=look["color"], alpha=0.2, linewidth=0)
    axes.plot(curve.steps, curve.mean, **look)


def stored_figure(stored: Stored, layers: Sequence[str], bins: Bins, marks: Sequence[Mark]) -> str:
    """Layers over steps: which versions were persisted; beside them the bytes of each layer."""
    with drawing():
        figure, (heat, side), _ = _layer_panels(layers)
        most = max(int(stored.versions.max(initial=0)), 1)
        rgba = np.zeros((*stored.versions.shape, 4))
        rgba[..., :3] = _STORED_RGB
        rgba[..., 3] = np.where(stored.versions > 0, 0.3 + 0.7 * stored.versions / most, 0.0)
        _heat(heat, rgba, bins)
        of = "a step" if bins.width == 1 else f"{bins.width} steps"
        heat.set_title(f"versions stored; each cell is {of}" + (f" (darkest: {most} versions)" if most > 1 else ""))
        _step_axis(heat, bins, marks)
        heat.set_xlabel("step of the version")
        side.barh(np.arange(len(layers)), stored.bytes, color=RUN, height=0.7)
        side.set_title("bytes stored")
        _bytes_axis(side.xaxis, 2)
        return svg_of(figure, "stored", f"Which of {len(layers)} layers were persisted at which of {bins.last} steps")


def age_figure(ages: Ages, layers: Sequence[str], bins: Bins, bound: int, marks: Sequence[Mark]) -> str:
    """Ages over steps: of all layers together, and of each."""
    with drawing():
        figure, (heat, side), (over_time, corner) = _layer_panels(layers, above_in=1.7)
        over_time.axhline(bound, color=INK, linestyle=":", label="bound")
        over_time.plot(ages.greatest.steps, ages.greatest.high, color=RUN, label="largest age")
        over_time.plot(ages.mean.steps, ages.mean.mean, color=RUN, linestyle="--", label="mean age")
        over_time.plot(ages.lag.steps, ages.lag.high, color=OTHER, linewidth=1.0, label="lag")
        over_time.set_ylim(0, bound * 1.08 + 1)
        over_time.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        over_time.set_ylabel("steps")
        corner.legend(*over_time.get_legend_handles_labels(), loc="upper left")
        _step_axis(over_time, bins, marks)

        image = _heat(
            heat, ages.binned, bins, cmap=_AGE_COLOURS, vmin=0, vmax=max(ages.greatest_of_layer, default=0) or 1
        )
        heat.set_facecolor(GRID)  # shows where nothing was recorded
        heat.set_title("age of each layer, steps")
        _step_axis(heat, bins, marks, numbers=False)
        heat.set_xlabel("step")
        scale = figure.colorbar(image, ax=heat, location="bottom", aspect=60, shrink=0.5, pad=0.02)
        if scale.solids is not None:
            scale.solids.set_rasterized(True)  # an image like the heat map
        rows = np.arange(len(layers))
        side.hlines(rows, ages.mean_of_layer, ages.greatest_of_layer, color=MUTED, linewidth=1.2)
        side.plot(ages.mean_of_layer, rows, "o", color=RUN, markersize=4.5)
        side.plot(ages.greatest_of_layer, rows, "|", color=RUN, markersize=7, markeredgewidth=1.6)
        side.set_xlim(0, max(1.1 * max(ages.greatest_of_layer, default=0), 1))
        side.xaxis.set_major_locator(MaxNLocator(3, integer=True, prune="lower"))
        side.set_title("● mean   | largest")
        return svg_of(figure, "ages", f"Age of each of {len(layers)} layers over {bins.last} steps; bound {bound}")


def rate_figure(rate: WriteRate, numbers: dict[int, int]) -> str:
    """Bytes that became durable over time. `numbers`: of the recovery that began each attempt."""
    with drawing():
        figure = Figure((WIDTH_IN, 2.3), layout="constrained")
        axes = figure.subplots()
        unit, unit_s = ("h", 3600) if rate.end_s > 10800 else ("min", 60) if rate.end_s > 180 else ("s", 1)
        edges = np.arange(len(rate.bytes) + 1) * rate.width_s / unit_s
        paced = (rate.bytes - rate.bytes_of_last_step) / rate.width_s
        axes.stairs(paced, edges, fill=True, color=RUN, label="while training")
        if rate.bytes_of_last_step.any():
            total = rate.bytes / rate.width_s
            axes.stairs(total, edges, baseline=paced, fill=True, color=OTHER, label="versions of the last step")
            figure.legend(loc="outside upper left", ncols=2)
        for pause in rate.pauses:
            axes.axvspan(pause.start / unit_s, pause.end / unit_s, color=RECOVERY, alpha=0.18, linewidth=0)
            axes.axvline(pause.end / unit_s, color=RECOVERY, linewidth=1.0)
        middles = [((pause.start + pause.end) / 2 / unit_s, numbers.get(pause.attempt)) for pause in rate.pauses]
        _number(axes, middles, rate.end_s / unit_s)
        axes.set_xlim(0, max(rate.end_s / unit_s, 0.1))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("bytes/s")
        axes.set_xlabel(f"time, {unit}")
        _bytes_axis(axes.yaxis, 4)
        return svg_of(figure, "rate", f"Bytes per second that became durable, over {rate.end_s:.0f} seconds")


def phases_figure(recoveries: Sequence[Recovery]) -> str:
    """Where the seconds of each recovery went."""
    told = [(number, recovery.phases) for number, recovery in enumerate(recoveries, 1) if recovery.phases is not None]
    with drawing():
        figure = Figure((WIDTH_IN, 0.95 + 0.3 * len(told)), layout="constrained")
        axes = figure.subplots()
        left = np.zeros(len(told))
        for name in Phases.model_fields:
            spent = np.array([getattr(phases, name) for _, phases in told])
            axes.barh(
                np.arange(len(told)), spent, left=left, height=0.65, color=PHASE_COLOURS[name],
                edgecolor=SURFACE, linewidth=0.6, label=name.replace("_", " "),
            )  # fmt: skip
            left += spent
        axes.set_yticks(np.arange(len(told)), [f"recovery {number}" for number, _ in told])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("s")
        figure.legend(loc="outside upper left", ncols=len(Phases.model_fields), columnspacing=1.2, handlelength=1.0)
        return svg_of(figure, "phases", f"Seconds of {len(told)} recoveries by phase")


def short(name: str) -> str:
    """A name as a figure shows it: printable, at most 24 characters."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    half = _LONGEST_NAME // 2
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: half - 1]}…{shown[-half:]}"


def _layer_panels(layers: Sequence[str], above_in: float = 0.0) -> tuple[Figure, Sequence[Axes], Sequence[Axes]]:
    """A wide and a narrow panel with a row for each layer, the first one on top; and, asked for, two above these."""
    rows = min(len(layers), _MOST_ROWS)
    rows_in = max(rows, 3) * max(_LEAST_ROW_IN, min(_ROW_IN, 3.2 / max(rows, 1)))
    figure = Figure((WIDTH_IN, 0.9 + rows_in + above_in), layout="constrained")
    heights = [above_in, rows_in + 0.6] if above_in else [1.0]
    places = figure.add_gridspec(len(heights), 2, width_ratios=[5, 1.4], height_ratios=heights)
    above = [figure.add_subplot(places[0, column]) for column in range(2) if above_in]
    for corner in above[1:]:
        corner.axis("off")
    heat = figure.add_subplot(places[-1, 0])
    side = figure.add_subplot(places[-1, 1], sharey=heat)
    every = max(1, -(-len(layers) // _MOST_ROWS))
    heat.set_yticks(range(0, len(layers), every), [short(layer) for layer in layers[::every]])
    heat.set_ylim(len(layers) - 0.5, -0.5)
    for axes in (heat, side):
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    side.tick_params(axis="y", labelleft=False)
    return figure, (heat, side), above


def _heat(axes: Axes, cells: Floats, bins: Bins, **colours: Any) -> AxesImage:
    """Cells of layers x bins over the steps they stand for."""
    last = len(bins) * bins.width
    axes.grid(visible=False)
    extent = (0.5, last + 0.5, len(cells) - 0.5, -0.5)
    return axes.imshow(cells, extent=extent, aspect="auto", interpolation="none", **colours)


def _step_axis(axes: Axes, bins: Bins, marks: Sequence[Mark], *, numbers: bool = True) -> None:
    """Steps from 1 on; recoveries are numbered lines where training resumed, and the steps made twice are shaded."""
    axes.set_xlim(0.5, max(bins.last, 1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    for mark in marks:
        axes.axvline(mark.resumed + 0.5, color=RECOVERY, linewidth=1.0)
        if mark.died > mark.resumed:
            axes.axvspan(mark.resumed + 0.5, mark.died + 0.5, color=RECOVERY, alpha=0.18, linewidth=0)
    if numbers:
        _number(axes, [(mark.resumed + 0.5, mark.number) for mark in marks], bins.last)


def _number(axes: Axes, places: Iterable[tuple[float, int | None]], length: float) -> None:
    """Recoveries' numbers above the axis; those that would touch share one label."""
    groups: list[list[tuple[float, int]]] = []
    for at, number in sorted((at, number) for at, number in places if number is not None):
        if groups and at - groups[-1][0][0] < _NUMBERS_APART * length:
            groups[-1].append((at, number))
        else:
            groups.append([(at, number)])
    for group in groups:
        middle = sum(at for at, _ in group) / len(group)
        numbers = sorted(number for _, number in group)
        label = str(numbers[0]) if len(group) == 1 else f"{numbers[0]}–{numbers[-1]}"
        axes.annotate(
            label, (middle, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
            ha="center", va="bottom", color=RECOVERY, fontweight="bold",
        )  # fmt: skip


def _bytes_axis(axis: Any, ticks: int) -> None:
    axis.set_major_locator(MaxNLocator(ticks, prune="lower"))
    axis.set_major_formatter(FuncFormatter(lambda value, _: decimal(round(value))))
