"""What a person reads of a run at a glance."""

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from app.status import RunStatus
from storage.records import Phases


def summary(status: RunStatus) -> RenderableType:
    """Outcome of a run: figures, every recovery, incidents. Fits 80 columns, needs no terminal.

    What comes from outside goes in as `Text`: rich would read `[/tmp]` in it as markup.
    """
    parts: list[RenderableType] = [_figures(status)]
    if status.recoveries:
        parts += [Text(), _recoveries(status)]
    if any(recovery.phases for recovery in status.recoveries):
        parts += [Text(), _phases(status)]
    if status.incidents:
        parts += [Text(), _incidents(status)]
    return Group(*parts)


def layer_table(status: RunStatus) -> RenderableType:
    """Step and age of every layer in the restore point."""
    table = Table(title="Layers in the restore point", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("layer", overflow="fold")
    for heading in ("step", "age", "stored"):
        table.add_column(heading, justify="right")
    for layer in status.layers:
        stored = decimal(layer.bytes) if layer.bytes else "base"
        table.add_row(Text(layer.name), str(layer.step), str(layer.age), stored)
    return table


def _figures(status: RunStatus) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("run", Text(f"{status.run} ({'finished' if status.finished else 'not finished'})"))
    grid.add_row("steps", f"{status.step:,}, restore point at {status.restore_point:,}")
    grid.add_row(
        "layer age",
        f"mean {status.mean_age:.1f}, largest {status.max_age}, bound {status.staleness_bound_steps} steps",
    )
    if kept := _kept_for_good(status):
        grid.add_row("kept", kept)
    grid.add_row("written", _written(status))
    grid.add_row("recoveries", str(len(status.recoveries)))
    if status.loss is not None:
        grid.add_row("final loss" if status.finished else "loss", f"{status.loss:.4f}")
    if status.eval_losses:
        step, loss = status.eval_losses[-1]
        shown = "not finite" if loss is None else f"{loss:.4f}"
        grid.add_row("held-out loss", f"{shown} at step {step:,}")
    if status.step_seconds_median is not None and status.tick_seconds_median is not None:
        grid.add_row("time", _times(status, status.step_seconds_median, status.tick_seconds_median))
    return grid


def _kept_for_good(status: RunStatus) -> str:
    """Milestones and best restore points, or nothing."""
    by_kind = {
        kind: [f"{point.step:,}" for point in reversed(status.restore_points) if kind in point.kinds]
        for kind in ("milestone", "best")
    }
    return "; ".join(f"{kind}: step {', '.join(steps)}" for kind, steps in by_kind.items() if steps)


def _written(status: RunStatus) -> str:
    full = decimal(status.ticks * status.full_checkpoint_bytes)
    less = f" ({status.reduction:.1f}x)" if status.reduction is not None else ""
    return f"{decimal(status.bytes_written)}; full checkpoints at the same {status.ticks:,} ticks: {full}{less}"


def _times(status: RunStatus, step_s: float, tick_s: float) -> str:
    worst = f", 99th percentile {seconds(status.tick_seconds_p99)}" if status.tick_seconds_p99 is not None else ""
    held = f"; held {seconds(status.held_seconds)} for storage" if status.held_seconds else ""
    return f"step {seconds(step_s)}, tick {seconds(tick_s)} (medians; {100 * tick_s / step_s:.1f} %){worst}{held}"


def seconds(value: float) -> str:
    """A duration with three digits or so."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def _recoveries(status: RunStatus) -> Table:
    table = Table(title="Recoveries", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("cause", overflow="fold")
    for heading in ("restore\npoint", "steps\nlost", "mean\nage", "largest\nage", "death to\nnext step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for recovery in status.recoveries:
        table.add_row(
            Text(recovery.cause),
            f"{recovery.restore_point:,}",
            str(recovery.steps_lost),
            f"{recovery.mean_age:.1f}",
            str(recovery.max_age),
            "-" if recovery.seconds is None else seconds(recovery.seconds),
        )
    return table


def _phases(status: RunStatus) -> Table:
    table = Table(
        title="Seconds from death to next step", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    headings = {name: name.replace("_", "\n") for name in Phases.model_fields}
    for heading in ("attempt", *headings.values(), "sum"):
        table.add_column(heading, justify="right", no_wrap=True)
    for recovery in status.recoveries:
        if recovery.phases is not None:
            spent = [getattr(recovery.phases, name) for name in headings]
            table.add_row(str(recovery.attempt), *(f"{value:.2f}" for value in (*spent, recovery.phases.total)))
    return table


def _incidents(status: RunStatus) -> Table:
    table = Table(title="Incidents", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("step", justify="right")
    table.add_column("kind", no_wrap=True)
    table.add_column("what", overflow="fold")
    for incident in status.incidents:
        table.add_row(f"{incident.step:,}", incident.kind, Text(incident.what))
    return table
