"""Benchmark records: what was measured, on which commit, with which versions, on which machine."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("ray", "torch", "transformers", "pyarrow", "s3fs", "pydantic", "numpy", "numba")


def write_record(name: str, values: dict[str, Any]) -> Path:
    """Write `values` with everything needed to judge them; returns the file.

    Raises:
        RuntimeError: the commit cannot be told, so the record would be of an unknown program.
    """
    record = {
        "name": name,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "hardware": _hardware(),
        **values,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{record['measured_at'].replace(':', '')}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip()}; run benchmarks in a git checkout")
    return done.stdout.strip()


def _hardware() -> dict[str, Any]:
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": cpus[0] if cpus else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kb / 2**20, 1),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
    }
