"""Live progress with and without a terminal."""

import dataclasses
import io

from rich.console import Console

from app.progress import LiveProgress, ProgressDisplay, progress_line

FULL = LiveProgress(
    step=31,
    total_steps=600,
    loss=2.3456,
    tokens_per_s=1234.5,
    restore_point=29,
    max_age=21,
    bytes_per_s=3_400_000.0,
    state="recovering",
)


def test_the_line_holds_what_is_known() -> None:
    expected = "step 31/600 | loss 2.346 | 1,234 tok/s | restore point 29 | age <= 21 | 3.4 MB/s | recovering"
    assert progress_line(FULL) == expected
    assert len(progress_line(dataclasses.replace(FULL, state="training"))) <= 80
    assert progress_line(LiveProgress(step=0, total_steps=60)) == "step 0/60"


def test_plain_lines_are_few() -> None:
    now = 0.0
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, width=80), clock=lambda: now) as display:
        for step in range(1, 101):
            now += 0.1
            state = "recovering" if step in (33, 34) else "training"
            display.update(LiveProgress(step=step, total_steps=100, loss=1.0, state=state))
        display.update(LiveProgress(step=100, total_steps=100, loss=1.0))
    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps == [1, 11, 21, 31, 33, 35, 45, 55, 65, 75, 85, 95, 100]
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_a_slow_run_prints_every_ten_seconds() -> None:
    now = 0.0
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, width=80), clock=lambda: now) as display:
        for step in range(1, 10):
            now += 4.0
            display.update(LiveProgress(step=step, total_steps=1000))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/1000", "4/1000", "7/1000"]


def test_a_terminal_line_is_replaced_in_place_and_gone_at_the_end() -> None:
    out = io.StringIO()
    with ProgressDisplay(Console(file=out, width=60, force_terminal=True)) as display:
        for step in (31, 32):
            display.update(dataclasses.replace(FULL, step=step))
    text = out.getvalue()
    assert "step 31/600" in text
    assert "step 32/600" in text
    assert "\x1b[2K" in text  # the line was erased, not scrolled
    assert "…" in text  # cut at the width rather than wrapped
    assert text.count("\n") == 1
    assert text.endswith("\n\x1b[?25h\r\x1b[1A\x1b[2K")  # and erased once more at the end
