"""Exit codes and streams of the command line, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app import cli
from storage.errors import CorruptObjectError, LayerCheckError, RunLiveError, SpecError, StoreError, TrainingError
from tests.unit.app.specs import GOOD, write_spec

ROOT = Path(__file__).parents[3]


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_schema_is_readable_and_json() -> None:
    plain = run_cli("schema")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "training.learning_rate: number > 0; default 2e-05" in plain.stdout
    document = json.loads(run_cli("schema", "--json").stdout)
    assert {key: value for key, value in document[0].items() if key != "meaning"} == {
        "path": "name",
        "type": "text",
        "required": True,
        "default": None,
    }


def test_a_closed_pipe_is_no_traceback() -> None:
    piped = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m app schema --json | head -1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (piped.stdout, piped.stderr) == ("[\n", "")


def test_bad_input_is_one_line_on_stderr(tmp_path: Path) -> None:
    path = write_spec(tmp_path, GOOD.replace("steps: 60", "stepz: 60"))
    done = run_cli("run", str(path), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: training.stepz: unknown key; expected one of steps, passes")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: the following arguments are required: COMMAND; see `layercheck --help`"),
        (["ru"], None),
        (["status"], "error: the following arguments are required: RUN; see `layercheck status --help`"),
        (["schema", "--jsn"], None),
    ],
)
def test_usage_errors(arguments: list[str], message: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert caught.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    if message:
        assert captured.err == message + "\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("a\nb"), 2),
        (StoreError("a\nb"), 2),
        (RunLiveError("a\nb"), 2),
        (TrainingError("a\nb"), 1),
        (CorruptObjectError("a\nb"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_schema", fail)
    assert cli.main(["schema"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    if isinstance(error, LayerCheckError):
        assert captured.err == "error: a\nerror: b\n"


def test_other_exceptions_are_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_schema", lambda _args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["schema"])


@pytest.mark.parametrize("run", ["s3://bucket", "s3://", "/", ""])
def test_a_run_needs_a_storage_and_a_name(run: str) -> None:
    with pytest.raises(SpecError, match="RUN: expected <storage>/<run name>"):
        cli.split_run(run)


@pytest.mark.parametrize(
    ("run", "parts"),
    [
        ("s3://bucket/x", ("s3://bucket", "x")),
        ("s3://bucket/runs/x/", ("s3://bucket/runs", "x")),
        ("/data/runs/x", ("/data/runs", "x")),
        ("/x", ("/", "x")),
        ("runs/x", (str(Path.cwd() / "runs"), "x")),
        ("../x", (str(Path.cwd().parent), "x")),
    ],
)
def test_a_run_is_split(run: str, parts: tuple[str, str]) -> None:
    assert cli.split_run(run) == parts
