"""The main job on a real model: one run left alone, one whose worker is killed from outside with `kill -9`.

    python -m benchmarks.main_job --model models/smollm2 --data .../gsm8k/train.jsonl

Prints both summaries and how far the held-out loss of the killed run is from that of the run left alone, and writes a
record. The step that is under way when the worker is killed is not chosen exactly: the kill follows the progress that
the catalog tells.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from benchmarks.record import write_record
from storage.catalog import Catalog
from storage.object_store import open_object_store
from storage.options import StorageOptions

SPEC = "jobs/smollm2-gsm8k.yaml"
PAPER = {"deviation_percent": 0.54, "reduction": 22.6}


def main() -> None:
    """Run, compare, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder (benchmarks/smollm2_from_wheel.py makes one)")
    parser.add_argument("--data", required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--kill-step", type=int, default=80, help="step after which a worker is killed")
    parser.add_argument("--storage", help="folder for the two runs (default: a temporary one)")
    parser.add_argument("--set", action="append", default=[], help="more overrides of the spec")
    args = parser.parse_args()
    overrides = [f"model.path={args.model}", f"data.path={args.data}", *args.set]
    with tempfile.TemporaryDirectory(prefix="layercheck-bench-") as scratch:
        storage = args.storage or scratch
        alone = run(storage, "alone", overrides, kill_after=None)
        killed = run(storage, "killed", overrides, kill_after=args.kill_step)
    report(args, alone, killed)


def run(storage: str, name: str, overrides: list[str], *, kill_after: int | None) -> dict[str, Any]:
    """Run the job to its end, killing one training worker once step `kill_after` is done; returns `status --json`."""
    settings = [f"name={name}", f"storage.url={storage}", *overrides]
    command = [sys.executable, "-m", "app", "run", SPEC, "--json", *(part for s in settings for part in ("--set", s))]
    began = time.monotonic()
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    victim = None
    if kill_after is not None:
        wait_for_step(storage, name, kill_after, driver)
        victim = train_workers(driver.pid)[-1]
        os.kill(victim.pid, signal.SIGKILL)
    output, _ = driver.communicate()
    if driver.returncode:
        raise SystemExit(f"run {name!r} ended with exit code {driver.returncode}")
    status: dict[str, Any] = json.loads(output)
    if victim is not None and not status["recoveries"]:
        raise SystemExit(f"killed process {victim.pid}, but the run recorded no recovery")
    return {**status, "wall_seconds": round(time.monotonic() - began, 1)}


def wait_for_step(storage: str, name: str, step: int, driver: subprocess.Popen[str]) -> None:
    """Wait until the run's newest record says that `step` is done."""
    catalog = Catalog(open_object_store(StorageOptions(url=storage), name))
    while driver.poll() is None:
        record = catalog.newest_record()
        if record is not None and record.progress.step >= step:
            return
        time.sleep(0.2)
    raise SystemExit(f"run {name!r} ended with exit code {driver.returncode} before step {step}")


def train_workers(driver: int) -> list[psutil.Process]:
    """Ray Train's worker processes below the driver, in order of their process ids."""
    family = psutil.Process(driver).children(recursive=True)
    workers = [process for process in family if "TrainWorker" in " ".join(process.cmdline())]
    return sorted(workers, key=lambda process: process.pid)


def deviation_percent(alone: dict[str, Any], killed: dict[str, Any]) -> dict[int, float]:
    """Held-out loss of the killed run against the run left alone, by step, in per cent of the latter."""
    reference = dict(alone["eval_losses"])
    return {step: 100 * (loss / reference[step] - 1) for step, loss in killed["eval_losses"] if step in reference}


def report(args: argparse.Namespace, alone: dict[str, Any], killed: dict[str, Any]) -> None:
    """Print the comparison and write the record."""
    deviations = deviation_percent(alone, killed)
    runs = {"alone": alone, "killed": killed}
    share = {name: 100 * run["tick_seconds_median"] / run["step_seconds_median"] for name, run in runs.items()}
    for step, percent in deviations.items():
        print(f"held-out loss at step {step}: alone {dict(alone['eval_losses'])[step]:.4f}, deviation {percent:+.3f} %")
    for name, status in runs.items():
        tick_ms, worst_ms = 1000 * status["tick_seconds_median"], 1000 * status["tick_seconds_p99"]
        print(
            f"{name}: {status['reduction']:.1f}x fewer bytes; tick {tick_ms:.1f} ms median, {worst_ms:.1f} ms p99, "
            f"{share[name]:.2f} % of a step; {status['wall_seconds']:.0f} s in all"
        )
    for recovery in killed["recoveries"]:
        print(f"recovery: {json.dumps(recovery)}")
    values = {
        "arguments": vars(args),
        "paper": PAPER,
        "deviation_percent_by_step": deviations,
        "tick_share_of_step_percent": share,
        "alone": alone,
        "killed": killed,
    }
    print(f"record: {write_record('main-job', values)}")


if __name__ == "__main__":
    main()
