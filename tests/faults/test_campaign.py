"""A short campaign: random faults, by a fixed seed, on every process of a job over a cluster of several nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cluster import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # restarts of worker groups take most of it

FAULTS = 20


def test_twenty_random_faults_lose_nothing(tmp_path: Path) -> None:
    """It runs in a process of its own: its cluster would clash with the Ray session that other tests share."""
    told = tmp_path / "campaign.json"
    options = ["--faults", str(FAULTS), "--seed", "5", "--storage", str(tmp_path / "runs"), "--json", str(told)]
    command = [sys.executable, "-m", "tests.faults.campaign", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    runs = json.loads(told.read_text())["runs"]
    assert sum(count for run in runs for count in run["fired"].values()) >= FAULTS
    assert {kind.split()[0] for run in runs for kind in run["fired"]} >= {"worker", "writer", "actor", "driver"}
    assert sum(run["restores_checked"] for run in runs) > len(runs), "nothing was recovered from: a test of nothing"
    assert sum(len(run["recoveries"]) for run in runs) >= 5
