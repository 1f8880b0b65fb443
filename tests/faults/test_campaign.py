"""A short campaign: random faults, by a fixed seed, on every process of a job over a cluster of several nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from storage.object_store import open_object_store
from storage.options import StorageOptions
from tests.faults.campaign.checks import read_states, violations
from tests.faults.campaign.plan import MAX_LAG
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
    check_that_checks_can_fail(runs[0], tmp_path / "runs")


def check_that_checks_can_fail(run: dict, root: Path) -> None:
    """The same checks find a state, a restore, an object or an end that is not as it should be."""
    store, told = (
        open_object_store(StorageOptions(url=str(root)), run["name"]),
        read_states(Path(run["folder"]) / "states"),
    )
    assert violations(store, run["steps"], MAX_LAG, told) == []
    assert "expected finished" in violations(store, run["steps"] + 1, MAX_LAG, told)[0]
    states, versions = told.states[max(told.states)], told.restores[-1]["versions"]
    layer = min(states)
    true_state, (step, attempt, restored) = states[layer], versions[layer]
    states[layer] = "another"
    assert any("stored is not the state" in found for found in violations(store, run["steps"], MAX_LAG, told))
    states[layer], versions[layer] = true_state, (step, attempt, "another")
    assert "not its state" in violations(store, run["steps"], MAX_LAG, told)[0]
    versions[layer] = (step, attempt, restored)
    store.put("layers/x/0000000001/00000001.000001/00000of00001.arrow", b"x")
    assert violations(store, run["steps"], MAX_LAG, told)[0].startswith("unnamed: layers/x/")
