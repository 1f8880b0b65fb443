"""A short run of the fuzzer, and that its watchman sees what it is there for. A long one: `python -m tests.fuzz`."""

import subprocess
import sys
from pathlib import Path

import pytest

from storage.errors import CorruptObjectError
from tests.fuzz.__main__ import watch
from tests.fuzz.targets import Case, WrongDataError, case, outcome


def test_thousands_of_hostile_inputs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "4000", "--seed", "3", "--keep", str(tmp_path)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    assert "4,000 inputs" in done.stdout
    assert not list(tmp_path.iterdir())


def test_every_kind_of_input_comes_up_and_is_the_same_again() -> None:
    cases = [case(3, number) for number in range(400)]
    assert len({made.target for made in cases}) == 15
    assert [made.data for made in cases] == [case(3, number).data for number in range(400)]


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import os; os.kill(os.getpid(), 11)", "exit code -11"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("print('fine')", None),
    ],
)
def test_the_watchman_sees_crashes_and_hangs(tmp_path: Path, program: str, problem: str | None) -> None:
    under_way = tmp_path / "number"
    under_way.write_bytes(b"")
    found, _ = watch([sys.executable, "-c", program], under_way, hang_s=1 if "sleep" in program else 60)
    assert (problem is None) == (found is None)
    assert problem is None or problem in str(found)


@pytest.mark.parametrize(
    ("error", "violation"),
    [
        (KeyError("w"), KeyError),
        (CorruptObjectError("x" * 2000), WrongDataError),
        (CorruptObjectError("a\nb"), WrongDataError),
    ],
)
def test_an_error_of_another_kind_or_a_long_one_is_a_violation(error: Exception, violation: type[Exception]) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(violation):
        outcome(Case("t", b"", fails))
