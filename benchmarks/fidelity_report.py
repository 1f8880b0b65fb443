"""What records of `benchmarks.fidelity` tell together: by policy, bytes, deviation, and the progress a failure costs.

python -m benchmarks.fidelity_report benchmarks/results/fidelity-gsm8k-*.json --figure fidelity-gsm8k.svg
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def deviations(study: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(policy, deviation in per cent) at every step that was evaluated after a restart."""
    for recovery in study["recoveries"]:
        for step, loss in recovery["losses"].items():
            yield recovery["policy"], 100 * (loss / study["alone"][step] - 1)


def progress_lost(study: dict[str, Any], recovery: dict[str, Any]) -> float:
    """Steps of the failure-free run between where its held-out loss was the composite's and where it failed.

    The loss of few examples goes up and down, so it is read from a curve that never rises: midway between the lowest
    loss so far and the highest one to come. The state that failed has lost nothing.
    """
    steps, losses = np.array(sorted(study["alone"].items())).T
    falling = (np.minimum.accumulate(losses) + np.maximum.accumulate(losses[::-1])[::-1]) / 2
    failed = losses[steps == recovery["failure"]].item()
    before, after = np.interp([-recovery["restored_loss"], -failed], -falling, steps)
    return max(0.0, float(after - before))


def report(studies: list[dict[str, Any]], chains: list[dict[str, Any]]) -> None:
    """By policy, over seeds, failures and steps after: bytes, deviation, and the progress that a failure costs."""
    found: dict[str, list[float]] = {}
    for one in studies:
        for policy, percent in deviations(one):
            found.setdefault(policy, []).append(percent)
    for policy, percents in found.items():
        recoveries = [(one, r) for one in studies for r in one["recoveries"] if r["policy"] == policy]
        lost = [progress_lost(one, recovery) for one, recovery in recoveries]
        reduction = min(recovery["reduction"] for _, recovery in recoveries)
        print(f"{policy:36} {reduction:6.1f}x {spread(percents)}  lost {statistics.mean(lost):.1f} steps "
              f"(each: {', '.join(f'{steps:.1f}' for steps in lost)})")  # fmt: skip
    alone = {one["seed"]: one["alone"] for one in studies}
    for policy in dict.fromkeys(chain["policy"] for chain in chains):
        runs = [chain for chain in chains if chain["policy"] == policy]
        percents = [100 * (run["loss"] / alone[run["seed"]][run["last_step"]] - 1) for run in runs]
        print(f"{policy:36} {min(run['reduction'] for run in runs):6.1f}x {spread(percents)}  "
              f"{len(runs[0]['failures'])} failures in one run")  # fmt: skip


def spread(percents: list[float]) -> str:
    """Mean, spread and largest of deviations."""
    deviation = statistics.stdev(percents) if len(percents) > 1 else 0.0
    largest = max(percents, key=abs)
    return f"mean {statistics.mean(percents):+.3f} %  sd {deviation:.3f}  largest {largest:+.3f} %"


def read_records(paths: list[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Studies and chains of earlier records, of one data set."""
    records = [json.loads(path.read_text()) for path in paths]
    studies = [study for record in records for study in record["studies"]]
    for one in studies:  # JSON has no keys but strings
        one["alone"] = {int(step): loss for step, loss in one["alone"].items()}
        for recovery in one["recoveries"]:
            recovery["losses"] = {int(step): loss for step, loss in recovery["losses"].items()}
    return studies, [chain for record in records for chain in record["chains"]]


def figure(studies: list[dict[str, Any]]) -> Figure:
    """Deviation after each failure against the bytes saved, by policy."""
    drawn = Figure(figsize=(7, 3.6), layout="constrained")
    axes = drawn.subplots()
    policies = list(dict.fromkeys(policy for one in studies for policy, _ in deviations(one)))
    for policy, marker in zip(policies, "osDv^P*X", strict=False):
        reduction = min(r["reduction"] for one in studies for r in one["recoveries"] if r["policy"] == policy)
        percents = [percent for one in studies for name, percent in deviations(one) if name == policy]
        axes.plot([reduction] * len(percents), percents, marker, markersize=4, alpha=0.5, label=policy)
        axes.plot(reduction, statistics.mean(percents), marker, markersize=10, color=axes.lines[-1].get_color())
    axes.axhspan(-0.54, 0.54, color="#dddddd", zorder=0, label="within 0.54 %")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([22.6, 50, 100], ["22.6", "50", "100"])
    axes.minorticks_off()
    axes.set_xlabel("times fewer bytes than a full checkpoint at every step")
    axes.set_ylabel("held-out loss against the\nfailure-free run, %")
    axes.legend(fontsize="small", title="each restart; large: mean")
    return drawn


def main() -> None:
    """Read, say, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="of one model and data set")
    parser.add_argument("--figure", type=Path, help="draw deviation against bytes, into this file")
    args = parser.parse_args()
    studies, chains = read_records(args.records)
    report(studies, chains)
    if args.figure:
        figure(studies).savefig(args.figure)


if __name__ == "__main__":
    main()
