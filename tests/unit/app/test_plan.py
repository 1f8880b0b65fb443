"""`plan`: from a stored history to a prediction, on the command line."""

import json
from pathlib import Path

import pytest

from app import cli
from storage import keys
from storage.object_store import ObjectStore, open_object_store
from storage.options import StorageOptions
from storage.records import Record
from tests.helpers.simulated_run import SimulatedRun
from tests.helpers.stored_run import FACTS, store_run

STEPS = 60
FULL_BYTES = sum(fact.bytes for fact in FACTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> SimulatedRun:
    return store_run(store(folder, "r"), steps=STEPS)


def store(folder: Path, name: str) -> ObjectStore:
    return open_object_store(StorageOptions(url=str(folder)), name)


def plan(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str, name: str = "r") -> dict:
    assert cli.main(["plan", f"{folder}/{name}", "--json", *arguments]) == 0
    told: dict = json.loads(capsys.readouterr().out)
    return told


def test_other_settings_beside_the_recorded_ones(folder: Path, run: SimulatedRun, capsys) -> None:
    told = plan(folder, capsys, "--write-budget", "1/15", "--criterion", "drift")
    recorded, replayed, planned = (told[name]["outlook"] for name in ("recorded", "replayed", "planned"))
    assert recorded["bytes_written"] == replayed["bytes_written"] == run.bytes_written
    assert recorded["ticks"] == STEPS
    assert recorded["reduction"] == STEPS * FULL_BYTES / run.bytes_written
    assert planned["bytes_written"] < 0.55 * run.bytes_written
    assert planned["mean_age"] > recorded["mean_age"]
    assert planned["mean_impact"] > recorded["mean_impact"]
    assert told["planned"]["settings"]["write_budget"] == "1/15"
    assert (told["recorded"]["settings"]["criterion"], told["planned"]["settings"]["criterion"]) == ("oldest", "drift")


def test_with_nothing_changed_the_plan_is_the_replay(folder: Path, run: SimulatedRun, capsys) -> None:
    told = plan(folder, capsys)
    assert told["planned"] == told["replayed"]
    assert told["notes"] == []


def test_a_threshold_may_be_set_and_taken_away(folder: Path, run: SimulatedRun, capsys) -> None:
    calm = plan(folder, capsys, "--threshold", "0.02")
    assert calm["planned"]["outlook"]["bytes_written"] < run.bytes_written / 2
    assert plan(folder, capsys, "--threshold", "none")["planned"]["settings"]["threshold"] is None


def test_another_codec_is_at_most_so_large(folder: Path, run: SimulatedRun, capsys) -> None:
    told = plan(folder, capsys, "--codec", "delta", "--write-budget", "1/50", "--staleness-bound-steps", "50")
    assert told["planned"]["outlook"]["bytes_written"] < run.bytes_written / 2
    assert any("at most" in note for note in told["notes"])


def test_it_is_a_table_of_80_columns(folder: Path, run: SimulatedRun, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["plan", f"{folder}/r", "--write-budget", "1/15", "--staleness-bound-steps", "45"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    for text in ("recorded", "replayed", "planned", "write budget", "1/15", "impact, mean (loss)", "replayed: "):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--write-budget", "1/1000"], "checkpoint.write_budget: expected at least 1/37"),
        (["--write-budget", "much"], "checkpoint.write_budget: expected a share"),
        (["--criterion", "newest"], "checkpoint.criterion: expected one of"),
        (["--codec", "zip"], "checkpoint.codec: expected one of"),
        (["--staleness-bound-steps", "2"], "staleness_bound_steps must be at least 4"),
        (["--threshold", "nan"], "checkpoint.threshold: expected a finite number"),
        (["--threshold", "-1"], "checkpoint.threshold: "),
    ],
)
def test_bad_settings_are_one_line(folder: Path, run: SimulatedRun, capsys, arguments: list[str], message: str) -> None:
    assert cli.main(["plan", f"{folder}/r", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_number_that_is_none_is_a_usage_error(folder: Path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", f"{folder}/r", "--threshold", "x"])
    assert "expected a number or none, got 'x'" in capsys.readouterr().err


def test_runs_that_cannot_be_planned(folder: Path, capsys) -> None:
    for name, what in (
        ("absent", "holds none"),
        ("silent", "has none (yet)"),
        ("broken", "is not what its digest says"),
    ):
        if name != "absent":
            store_run(store(folder, name), steps=12, segments=1)
        history = [info.key for info in store(folder, name).list(keys.HISTORY)]
        if name == "silent":
            store(folder, name).delete(history)
        if name == "broken":
            path = folder / name / history[0]
            path.write_bytes(path.read_bytes().replace(b"block.4", b"block.x"))
        assert cli.main(["plan", f"{folder}/{name}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert what in line


def test_a_lost_segment_is_told(folder: Path, capsys) -> None:
    store_run(store(folder, "gap"), steps=STEPS)
    store(folder, "gap").delete([keys.history(1, 1)])
    told = plan(folder, capsys, name="gap")
    assert any(f"of the run's {STEPS} ticks" in note for note in told["notes"])


def test_a_history_of_other_layers_is_refused(folder: Path, capsys) -> None:
    mixed = store(folder, "mixed")
    store_run(mixed, steps=12)
    told = Record.from_bytes(keys.record(1, 0), mixed.read(keys.record(1, 0)))
    layers = {name.replace("4", "9"): ref for name, ref in told.layers.items()}
    facts = tuple(fact.model_copy(update={"name": fact.name.replace("4", "9")}) for fact in told.facts)
    mixed.put(keys.record(1, 0), told.model_copy(update={"layers": layers, "facts": facts}).to_bytes())
    assert cli.main(["plan", f"{folder}/mixed"]) == 1
    assert "expected the sums of the catalog's 6 trained layers" in capsys.readouterr().err
