"""The report page in headless Chromium, as a reader sees it on a screen and on paper."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from app import cli
from tests.helpers.made_up_run import MadeUpRun

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")

LARGE = {"embedding": 800, **{f"block-{number:02d}": 100 for number in range(38)}, "head": 800}

LAPTOP, A4_WITHOUT_MARGINS = 1280, 718  # CSS pixels
SCHEMES = [("light", "screen", LAPTOP), ("dark", "screen", LAPTOP), ("dark", "print", A4_WITHOUT_MARGINS)]

CHECKS = (Path(__file__).parent / "page_checks.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> str:
    return MadeUpRun(failures=(31,)).store(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, quickstart: str) -> dict[str, Path]:
    """Two reports: of a run like the quickstart, and of a large one beside the same without failures."""
    folder = tmp_path_factory.mktemp("pages")
    large = MadeUpRun(LARGE, steps=2000, budget=0.03, failures=(400, 410, 1100, 1103, 1500), name="large")
    calm = MadeUpRun(LARGE, steps=2000, budget=0.03, name="calm", seed=1)
    paths = {name: folder / f"{name}.html" for name in ("quickstart", "large")}
    assert cli.main(["report", quickstart, "-o", str(paths["quickstart"])]) == 0
    urls = [run.store(folder) for run in (large, calm)]
    assert cli.main(["report", urls[0], "-o", str(paths["large"]), "--against", urls[1]]) == 0
    return paths


def opened(browser: Browser, path: Path, scheme: Any = "light", width: int = LAPTOP) -> tuple[Page, list[str]]:
    """The page, and everything it complained of or asked for."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("request", lambda request: troubles.append(f"request: {request.url[:80]}"))
    page.goto(path.as_uri())
    return page, [told for told in troubles if told != f"request: {path.as_uri()[:80]}" and "data:" not in told]


def test_numbers_equal_those_of_status(
    browser: Browser, pages: dict[str, Path], quickstart: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status", quickstart, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    page, _ = opened(browser, pages["quickstart"])
    data = "() => [...document.querySelectorAll('data')].map(e => [e.dataset.field, JSON.parse(e.value), e.innerText])"
    shown = page.evaluate(data)
    assert len(shown) > 80
    for field, value, text in shown:
        expected: Any = status
        for part in field.split("."):
            expected = expected[int(part)] if isinstance(expected, list) else expected[part]
        assert value == expected, field
        if isinstance(expected, str):
            assert text == expected, field
        elif isinstance(expected, int):  # a float is rounded, bytes are told in MB
            assert text == f"{expected:,}" or text.endswith(("B", "bytes")), field
    page.close()


@pytest.mark.parametrize("name", ["quickstart", "large"])
def test_it_renders_alone_and_can_be_read(browser: Browser, pages: dict[str, Path], name: str) -> None:
    for scheme, media, width in SCHEMES:
        page, troubles = opened(browser, pages[name], scheme, width)
        page.emulate_media(media=media)  # type: ignore[arg-type]
        assert troubles == [], (scheme, media)
        assert page.locator("svg").count() == 5
        found = page.evaluate(CHECKS)
        assert len(found) == 6
        assert {kind: wrong for kind, wrong in found.items() if wrong} == {}, (scheme, media)
        page.close()
