"""The report page as text: everything escaped, nothing asked for, and what is missing is said."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from app import cli
from app.report.page import RunStory, render
from app.status import RunStatus, status_of
from storage.history import History
from storage.records import BASE, Incident, LayerFacts, Recovery
from storage.retention import Kept
from tests.helpers.made_up_run import LAYERS, MadeUpRun
from tests.helpers.records import record, ref

HOSTILE = "</script><img src=x onerror=alert(1)> \"'& $\\frac{1}{0}$ {{ 7 * 7 }} \x07漢字"


class Page(HTMLParser):
    """Tags with their attributes, and the text of `<data>` elements by field."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.fields: dict[str, str] = {}
        self._field: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._field = dict(attrs).get("data-field") if tag == "data" else self._field

    def handle_endtag(self, tag: str) -> None:
        self._field = None if tag == "data" else self._field

    def handle_data(self, data: str) -> None:
        if self._field is not None:
            self.fields[self._field] = self.fields.get(self._field, "") + data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def story() -> RunStory:
    return MadeUpRun(failures=(31,)).story


@pytest.fixture(scope="module")
def html(story: RunStory) -> str:
    return render(story)


@pytest.fixture(scope="module")
def other() -> RunStory:
    return MadeUpRun(steps=30, name="calm", seed=1).story


@pytest.fixture(scope="module")
def html_beside(story: RunStory, other: RunStory) -> str:
    return render(story, other)


def test_the_page_needs_nothing_and_runs_nothing(html_beside: str) -> None:
    page = Page(html_beside)
    for tag in ("script", "link", "iframe", "object", "embed", "form"):
        assert page.of(tag) == []
    attributes = [pair for _, attributes in page.tags for pair in attributes.items()]
    links = [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
    assert [link for link in links if not link.startswith(("#", "data:image/png;base64,"))] == []
    assert len(links) > 10
    assert [name for name, _ in attributes if name.startswith("on")] == []
    assert "default-src 'none'" in html_beside
    assert not re.search(r"url\((?!#)|@import", html_beside)
    assert len(html_beside) < 200_000


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = MadeUpRun(steps=6).store(tmp_path), MadeUpRun(steps=6, name="calm").store(tmp_path)
    written = tmp_path / "page.html"
    assert cli.main(["report", run, "-o", str(written), "--against", other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(written), "bytes": written.stat().st_size}
    assert Page(written.read_text()).fields["against.run"] == other
    for arguments, problem in (
        (
            [run, "-o", str(tmp_path / "none" / "page.html")],
            f"error: -o {tmp_path}/none/page.html: no such file or dir",
        ),
        ([run, "--against", str(tmp_path / "none")], "error: RUN: expected the storage URL of a run"),
    ):
        assert cli.main(["report", *arguments]) == 2
        assert capsys.readouterr().err.startswith(problem)


def test_ids_are_unique_and_figures_have_titles(html: str) -> None:
    page = Page(html)
    counted = Counter(attributes["id"] for _, attributes in page.tags if attributes.get("id"))
    assert [name for name, times in counted.items() if times > 1] == []
    references = re.findall(r'url\(#([^)]+)\)|xlink:href="#([^"]+)"', html)
    assert {first or second for first, second in references} <= counted.keys()
    assert [attributes.get("role") for attributes in page.of("svg")] == ["img"] * 5
    assert len(re.findall(r"<svg[^>]*>\s*<title>[^<]{20,}</title>", html)) == 5


def test_untrusted_text_is_text() -> None:
    hostile = MadeUpRun({HOSTILE: 10, "block": 10}, steps=10, name=HOSTILE).story
    told = hostile.status.model_copy(
        update={
            "recoveries": (Recovery(attempt=2, cause=HOSTILE, restore_point=1, steps_lost=0, max_age=0, mean_age=0),),
            "incidents": (Incident(step=1, kind=HOSTILE, what=HOSTILE),),
        }
    )
    html = render(replace(hostile, status=told, history=History(hostile.ticks, [HOSTILE])), hostile)
    page = Page(html)
    assert not page.of("script")
    assert not page.of("img")
    for field in ("run", "layers.0.name", "recoveries.0.cause", "incidents.0.kind", "incidents.0.what"):
        assert page.fields[field].endswith(HOSTILE), field
    assert "{{ 7 * 7 }}" in html


def test_a_run_without_history_says_what_is_missing(story: RunStory) -> None:
    html = render(RunStory(story.status, History()))
    assert "holds no history" in html
    assert "held out, quickstart" in html  # from the record
    for heading in ("Write rate", "Age of each layer", "What was persisted"):
        assert f"<h2>{heading}" not in html
    for heading in ("Recoveries", "Incidents", "Layers"):
        assert f"<h2>{heading}" in html


def test_a_run_that_has_hardly_begun_has_a_page() -> None:
    begun = record({layer: ref(layer, 0) for layer in LAYERS})
    html = render(RunStory(status_of("runs/new", [Kept(begun, ("recent",))]), History()))
    assert "No finite loss has been recorded." in html
    assert "None: no worker group has failed." in html


def test_losses_that_are_not_finite_are_no_figure() -> None:
    run = MadeUpRun(steps=6)
    ticks = [replace(tick, loss=math.nan) for tick in run.ticks]
    status = run.story.status.model_copy(update={"loss": None, "eval_losses": ((6, None),)})
    assert "No finite loss has been recorded." in render(RunStory(status, History(ticks)))


def test_damaged_and_lost_segments_are_named(story: RunStory, html: str) -> None:
    damaged = render(RunStory(story.status, History(story.ticks[:30], ["catalog/history/x.arrow: its digest differs"])))
    assert "Left out of the history: catalog/history/x.arrow: its digest differs" in damaged
    assert "tells of 30 ticks" in damaged
    assert "never became whole" in damaged
    assert "never became whole" not in html


def test_the_other_run_stands_beside(story: RunStory, other: RunStory, html_beside: str) -> None:
    fields = Page(html_beside).fields
    assert fields["against.bytes_written"] != fields["bytes_written"]
    both = [step for step, _ in story.status.eval_losses if step in dict(other.status.eval_losses)]
    assert both
    assert [int(step) for step in re.findall(r"held-out loss at step (\d+)", html_beside)] == both
    assert "training, calm" in html_beside
    without = render(story, RunStory(other.status, History()))
    assert "held out, calm" in without
    assert "training, calm" not in without


def test_frozen_layers_are_no_rows_of_the_figures() -> None:
    run = MadeUpRun({"a": 10}, steps=6)
    facts = (*run.record.facts, LayerFacts(name="ice", bytes=10, frozen=True))
    layers = {**run.record.layers, "ice": BASE}
    whole = run.record.model_copy(update={"facts": facts, "layers": layers})
    html = render(RunStory(status_of("runs/x", [Kept(whole, ("recent",))]), History(run.ticks)))
    assert "Which of 1 layers" in html
    assert ">frozen<" in html


def field_names(status: RunStatus) -> set[str]:
    """Paths of all values of a status."""

    def walk(value: object, path: str) -> set[str]:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        return {path} if items is None else {name for key, part in items for name in walk(part, f"{path}.{key}")}

    return {name.removeprefix(".") for name in walk(status.model_dump(mode="json"), "")}


def test_the_page_tells_everything_that_the_status_tells(story: RunStory, html: str) -> None:
    untold = field_names(story.status) - Page(html).fields.keys()
    assert {re.sub(r"\d+", "N", name) for name in untold} == {"finished", "restore_points.N.kinds.N"}  # as words
