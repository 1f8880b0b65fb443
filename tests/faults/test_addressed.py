"""Faults that the job spec addresses strike every process of the protocol, once each, and leave their evidence."""

import subprocess
import sys

import pytest

from storage.fault_points import FaultOptions, fired_faults
from tests.faults.test_processes import check_consistent
from tests.helpers.cluster import ROOT
from tests.helpers.runs import Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # start-ups of Ray take most of it

FAULTS = [
    {"who": "writer", "step": 3, "point": "before_upload"},
    {"who": "writer", "step": 9, "point": "during_upload"},
    {"who": "writer", "step": 15, "point": "after_upload", "rank": 1},
    {"who": "actor", "step": 20, "point": "before_commit"},
    {"who": "actor", "step": 30, "point": "after_commit"},
    {"who": "actor", "step": 40, "point": "report"},
    {"rank": 1, "step": 50, "point": "forward"},
    {"who": "actor", "step": 40, "point": "begin_attempt", "attempt": 2},
    {"who": "driver", "step": 60},
    {"who": "actor", "step": 80, "point": "finish"},
]


def test_every_process_is_struck_where_it_is_addressed(runs: Runs) -> None:
    spec = runs.spec("addressed", training={"steps": 80}, fault_injection=FAULTS)
    path = runs.folder / "addressed.yaml"
    path.write_text(spec.model_dump_json(exclude_none=True))
    command = [sys.executable, "-m", "app", "run", str(path)]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert died.returncode == -9, died.stderr
    resumed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    store = runs.store("addressed")
    assert {incident.what for incident in fired_faults(store)} == {FaultOptions(**fault).address for fault in FAULTS}
    record = check_consistent(store)
    assert record.epoch == 7, "one for each submission and each actor that was struck"
    assert record.step == 80
