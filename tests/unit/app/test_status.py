"""Figures of a status, and the summary made of them."""

import io
import json

import pytest
from rich.console import Console

from app.status import RunStatus, status_of
from app.summary import layer_table, summary
from storage.records import (
    BASE,
    BaseVersion,
    Incident,
    LayerFacts,
    Phases,
    Progress,
    Record,
    Recovery,
    Totals,
    VersionRef,
)
from storage.retention import Kept

RECORD = Record(
    epoch=2,
    seq=7,
    step=60,
    layers={
        "embed": BASE,
        "block.0": VersionRef(step=40, manifest_key="k0", manifest_digest="d", bytes=1_000_100),
        "block.1": VersionRef(step=60, manifest_key="k1", manifest_digest="d", bytes=1_000_200),
    },
    facts=(
        LayerFacts(name="embed", bytes=5_000_000, frozen=True),
        LayerFacts(name="block.0", bytes=1_000_000),
        LayerFacts(name="block.1", bytes=1_000_000),
    ),
    base=BaseVersion(source="models/tiny", digest="d"),
    spec_fingerprint="f",
    staleness_bound_steps=50,
    totals=Totals(ticks=60, bytes_written=6_000_000, attempts=2),
    progress=Progress(
        step=61,
        loss=2.25,
        eval_losses=((30, 3.0), (60, 2.5)),
        step_seconds_median=1.4,
        tick_seconds_median=0.0021,
        tick_seconds_p99=0.013,
    ),
    recoveries=(
        Recovery(
            attempt=2,
            cause="training worker rank 1 on node 10.0.0.17 died: SIGKILL",
            restore_point=29,
            steps_lost=2,
            max_age=21,
            mean_age=9.54,
            seconds=14.26,
            phases=Phases(
                detect=0.5,
                restart=1.25,
                imports=8.0,
                load_model=2.0,
                plan=0.25,
                read=0.76,
                broadcast=0.5,
                first_step=1.0,
            ),
        ),
        Recovery(attempt=3, cause="still restoring", restore_point=40, steps_lost=1, max_age=2, mean_age=1.0),
    ),
    incidents=(Incident(step=44, kind="writer", what="the ShardWriter of node 3f died while it wrote block.1; " * 2),),
    finished=True,
)


def test_figures_of_a_record() -> None:
    status = status_of("runs/quick", [Kept(RECORD, ("recent",))])
    assert (status.run, status.epoch, status.step, status.restore_point) == ("runs/quick", 2, 61, 60)
    assert (status.max_age, status.mean_age) == (20, 10.0)  # the frozen layer does not age
    assert [(layer.name, layer.step, layer.age, layer.bytes) for layer in status.layers] == [
        ("embed", 0, 0, 0),
        ("block.0", 40, 20, 1_000_100),
        ("block.1", 60, 0, 1_000_200),
    ]
    assert status.full_checkpoint_bytes == 2_000_000
    assert status.reduction == 20.0
    demanded = "run epoch step restore_point staleness_bound_steps max_age mean_age layers ticks bytes_written"
    demanded += " full_checkpoint_bytes reduction recoveries incidents"
    document = json.loads(status.model_dump_json())
    assert set(demanded.split()) <= set(document)
    assert {"cause", "restore_point", "steps_lost", "max_age", "mean_age", "seconds"} <= set(document["recoveries"][0])


def test_nothing_written_yet_has_no_reduction_and_no_ages() -> None:
    empty = RECORD.model_copy(
        update={
            "totals": Totals(),
            "facts": (),
            "layers": {},
            "recoveries": (),
            "incidents": (),
            "progress": Progress(),
        }
    )
    status = status_of("runs/quick", [Kept(empty, ("recent",))])
    assert status.reduction is None
    assert (status.max_age, status.mean_age) == (0, 0.0)
    assert "0 bytes" in _rendered(status, 80)


def _rendered(status: RunStatus, width: int) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(summary(status))
        console.print(layer_table(status))
    return capture.get()


def test_summary_says_it_all_in_80_columns() -> None:
    text = _rendered(status_of("runs/quick", [Kept(RECORD, ("recent",))]), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "…" not in text
    flat = " ".join(text.split())
    for fact in (
        "runs/quick (finished)",
        "61, restore point at 60",
        "mean 10.0, largest 20, bound 50 steps",
        "6.0 MB; full checkpoints at the same 60 ticks: 120.0 MB (20.0x)",
        "final loss 2.2500",
        "held-out loss 2.5000 at step 60",
        "step 1.4 s, tick 2.1 ms (medians; 0.1 %), 99th percentile 13.0 ms",
        "14.3 s",
        "44 writer the ShardWriter",
    ):
        assert fact in flat, fact


def test_the_seconds_of_a_recovery_are_shown_by_phase() -> None:
    lines = _rendered(status_of("r", [Kept(RECORD, ("recent",))]), 80).splitlines()
    (row,) = [line.split() for line in lines if line.split()[-1:] == ["14.26"]]
    assert row == ["2", "0.50", "1.25", "8.00", "2.00", "0.25", "0.76", "0.50", "1.00", "14.26"]


@pytest.mark.parametrize("cell", ["29", "2", "9.5", "21", "14.3 s"])
def test_every_recovery_is_a_row(cell: str) -> None:
    text = _rendered(status_of("runs/quick", [Kept(RECORD, ("recent",))]), 80)
    row = next(line for line in text.splitlines() if "14.3 s" in line)
    assert cell in row


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    told = "cannot write [/data/x]: [bold]no space"
    record = RECORD.model_copy(update={"incidents": (Incident(step=1, kind="store", what=told),)})
    out = io.StringIO()
    Console(file=out, width=200).print(summary(status_of("runs/[x]", [Kept(record, ("recent",))])))
    assert told in out.getvalue()
    assert "runs/[x]" in out.getvalue()
