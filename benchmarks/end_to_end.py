"""The same training without checkpoints, with ours, and with what a user would pick instead.

Every run is a driver of its own with two workers, or with one that leaves a core free; the methods take turns. Times
are from the end of the third step to the moment when the state of the last step is stored whole.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks.evenness import largest_over_mean
from benchmarks.family import KINDS, OTHERS, members, own_memory_bytes
from benchmarks.piece import Mark, Outcome, Profile
from benchmarks.rivals import DCP, METHODS, NONE, OURS
from benchmarks.stores import local_folder, slow_buckets
from benchmarks.subject import job_file
from storage.catalog import Catalog
from storage.object_store import open_object_store
from storage.options import StorageOptions

SLOW_BYTES_PER_S = 60e6
SAMPLE_S = 0.2
WRITE_BUDGET = "1/22.6"
LONGEST_S = 1800.0
STARTED_S = 3.0
"""What is written in the first seconds of a window is not counted for evenness: the bucket begins full."""

LOCAL, SPARE, SLOW = "local disk", "local disk, a core to spare", "slow S3"

Run = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where runs are compared."""

    store: Callable[[], AbstractContextManager[StorageOptions]]
    """Makes a store for one run, which takes what it holds away with it: rivals keep every full checkpoint."""
    workers: int = 2
    methods: tuple[str, ...] = (*METHODS, NONE)
    """In turn; the same one twice tells how much is noise."""
    batch: int = 2
    """Sequences of a step, where the profile names a model."""


def run(profile: Profile) -> Outcome:
    """Every method at every place, in turn, as often as the profile asks for."""
    found = list[Run]()
    with slow_buckets(SLOW_BYTES_PER_S) as slow_bucket:
        places = {
            LOCAL: Place(local_folder),
            # A batch as users take them: what a tick costs does not grow with the batch.
            SPARE: Place(local_folder, workers=1, methods=(NONE, OURS, NONE), batch=16),
        }
        if slow_bucket is not None and profile.name == "quick":  # large checkpoints do not fit in its memory
            places[SLOW] = Place(slow_bucket)
        for repeat in range(profile.repeats):
            for where, place in places.items():
                for method in place.methods:
                    with place.store() as storage:
                        found.append({"store": where, "repeat": repeat, **measure(profile, method, place, storage)})
                    _say(found[-1])
    return Outcome(
        [mark for where in places for mark in marks(found, where)] + evenness_marks(found),
        {"write_budget": WRITE_BUDGET, "slow_bytes_per_s": SLOW_BYTES_PER_S, "runs": found},
        figures={"end-to-end": seconds_figure(found), "writes": writes_figure(found)},
    )


def measure(profile: Profile, method: str, place: Place, storage: StorageOptions) -> Run:
    """One run."""
    name, began = method.replace(" ", "-"), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="layercheck-bench-") as folder:
        watched = _watched(
            [sys.executable, "-m", "benchmarks.timed_run", folder, method, *_arguments(profile, place, storage, name)]
        )
        told = Path(folder) / "run.json"
        if not told.exists():
            raise RuntimeError(f"{method} on {storage.url}: the run told nothing; its output:\n{watched.output}")
        timed = json.loads(told.read_text())
    window = (timed["ended_at"] - timed["seconds"], timed["ended_at"])
    result = {"method": method, "wall_seconds": time.perf_counter() - began, **timed}
    result |= watched.within(*window)
    if method == OURS:
        record = Catalog(open_object_store(storage, name)).newest_record()
        if record is None or not record.finished:
            raise RuntimeError(f"{method} on {storage.url}: the run did not finish:\n{watched.output}")
        result |= {
            "bytes_written": record.totals.bytes_written,
            "ticks": record.totals.ticks,
            "full_checkpoint_bytes": record.full_checkpoint_bytes,
            "held_seconds": record.totals.held_seconds,
        }
    return result


def _arguments(profile: Profile, place: Place, storage: StorageOptions, name: str) -> list[str]:
    s3 = storage.s3
    settings = {
        "name": name,
        "storage.url": storage.url,
        "training.eval_every_steps": "null",
        "data.eval_examples": 2,
        "checkpoint.write_budget": WRITE_BUDGET,
        "checkpoint.interval_steps": 1,
        "training.steps": profile.pick(quick=60, full=12),
        "scaling.workers": place.workers,
    }
    if s3.access_key is not None and s3.secret_key is not None:
        settings |= {"storage.s3.endpoint": s3.endpoint, "storage.s3.access_key": s3.access_key.get_secret_value()}
        settings |= {"storage.s3.secret_key": s3.secret_key.get_secret_value(), "storage.s3.region": "us-east-1"}
    if profile.model is not None:
        settings |= {"training.global_batch": place.batch, "training.micro_batch": 1}
    spec, overrides = job_file(profile)
    overrides += [f"{field}={value}" for field, value in settings.items()]
    return ["run", spec, *(part for override in overrides for part in ("--set", override))]


@dataclass
class _Watched:
    """What a driver and all that it started wrote to block devices, and held in memory of their own."""

    output: str
    samples: list[tuple[float, int, dict[str, int]]]
    """(wall clock, bytes written so far, bytes by kind of process)."""

    def within(self, start: float, end: float) -> Run:
        """Of the window: writes of each sample, and the most memory by kind of process."""
        samples = [sample for sample in self.samples if start <= sample[0] <= end]
        writes = [(round(at - start, 2), written - before) for (_, before, _), (at, written, _) in pairwise(samples)]
        peaks: dict[str, int] = defaultdict(int)
        for _, _, held in samples:
            for kind, size in held.items():
                peaks[kind] = max(peaks[kind], size)
        return {"writes": writes, "peak_memory_bytes": dict(peaks)}


def _watched(command: list[str]) -> _Watched:
    samples = list[tuple[float, int, dict[str, int]]]()
    with tempfile.TemporaryFile("w+") as output:
        driver = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        done = threading.Event()
        watcher = threading.Thread(target=_sample, args=(driver.pid, done, samples))
        watcher.start()
        try:
            driver.wait(LONGEST_S)
        finally:
            done.set()
            watcher.join()
            if driver.poll() is None:
                driver.terminate()  # it ends Ray's processes
                driver.wait()
        output.seek(0)
        return _Watched(output.read()[-4000:], samples)


def _sample(driver: int, done: threading.Event, samples: list[tuple[float, int, dict[str, int]]]) -> None:
    written: dict[int, int] = {}
    while not done.wait(SAMPLE_S):
        held: dict[str, int] = defaultdict(int)
        for kind, process in members(driver):
            try:
                written[process.pid] = process.io_counters().write_bytes
                held[kind] = max(held[kind], own_memory_bytes(process))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        samples.append((time.time(), sum(written.values()), dict(held)))


# --- what it says


def _by(found: list[Run], method: str, where: str) -> list[Run]:
    return [one for one in found if one["method"] == method and one["store"] == where]


def _methods_at(found: list[Run], where: str) -> list[str]:
    return [method for method in METHODS if _by(found, method, where)]


def _middle(found: list[Run], method: str, where: str, value: str) -> float:
    return median(one[value] for one in _by(found, method, where))


def _cpu_added(found: list[Run], where: str) -> dict[str, float]:
    """CPU seconds by kind of process that our runs take more than those without checkpoints."""
    spent = {
        method: {
            kind: median(one["cpu_seconds_by_kind"].get(kind, 0.0) for one in _by(found, method, where))
            for kind in (*KINDS, OTHERS)
        }
        for method in (OURS, NONE)
    }
    return {kind: spent[OURS][kind] - spent[NONE][kind] for kind in spent[OURS]}


def evenness(one: Run) -> float:
    """Largest second of writes over the mean one, from `STARTED_S` to the end of training."""
    events = [(at, size) for at, size in one["writes"] if STARTED_S <= at <= one["seconds_to_last_step"]]
    return largest_over_mean(events) if sum(size for _, size in events) else float("nan")


def marks(found: list[Run], where: str) -> list[Mark]:
    """Lines of the table on times, with one store."""
    told = f"{where} ({SLOW_BYTES_PER_S / 1e6:.0f} MB/s)" if where == SLOW else where
    methods = _methods_at(found, where)
    seconds = {method: _middle(found, method, where, "seconds") for method in methods}
    cpu = {method: _middle(found, method, where, "cpu_seconds") for method in methods}
    alone = [one["seconds"] for one in _by(found, NONE, where)]
    noise = 100 * (max(alone) - min(alone)) / median(alone)
    longer = 100 * (seconds[OURS] / seconds[NONE] - 1)
    lines = [
        Mark(f"time against no checkpoints, {told}", "<= 2 % longer", f"{longer:+.1f} %", met=longer <= 2),
        Mark(f"noise: no checkpoints against itself, {told}", "", f"{noise:.1f} %", met=None),
    ]
    lines += [_against(method, seconds, where, told) for method in methods if method not in (OURS, NONE)]
    lines += [
        Mark(f"CPU seconds added by {method}, {told}", "", f"{cpu[method] - cpu[NONE]:+.1f} s", met=None)
        for method in methods
        if method != NONE
    ]
    lines += [
        Mark(f"CPU seconds added by {OURS}, {kind}, {told}", "", f"{added:+.2f} s", met=None)
        for kind, added in _cpu_added(found, where).items()
    ]
    ours = _by(found, OURS, where)
    step = median(seconds for one in ours for seconds in one["step_seconds"])
    ticks = sorted(seconds for one in ours for seconds in one["tick_seconds"])
    share, worst = 100 * median(ticks) / step, 100 * ticks[int(0.99 * len(ticks))] / step
    return [
        *lines,
        Mark(f"loop time of a tick, {told}", "<= 0.5 % of a step", f"{share:.2f} %", met=share <= 0.5),
        Mark(f"loop time of a tick, p99, {told}", "<= 2 % of a step", f"{worst:.1f} %", met=worst <= 2),
    ]


def _against(method: str, seconds: dict[str, float], where: str, told: str) -> Mark:
    ratio, least = seconds[method] / seconds[OURS], 1.31 if where == SLOW else 1.0
    if method != DCP:
        return Mark(f"time against {method}, {told}", "", f"{ratio:.2f}x", met=None)
    return Mark(f"time against {DCP}, {told}", f">= {least}x shorter", f"{ratio:.2f}x", met=ratio >= least)


def evenness_marks(found: list[Run]) -> list[Mark]:
    """Lines of the table on how even writing to the local disk is."""
    ours, dcp = (median(evenness(one) for one in _by(found, method, LOCAL)) for method in (OURS, DCP))
    return [
        Mark(f"writes, largest second over mean, {OURS}", "<= 2", f"{ours:.1f}", met=ours <= 2),
        Mark(f"writes, largest second over mean, {DCP}", "", f"{dcp:.1f}", met=None),
    ]


def _say(one: Run) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} {one['store']}, {one['method']}: {one['seconds']:.1f} s, "
        f"{one['cpu_seconds']:.1f} CPU s, tick {1000 * median(one['tick_seconds']):.1f} ms of "
        f"{1000 * median(one['step_seconds']):.0f} ms",
        flush=True,
    )


def seconds_figure(found: list[Run]) -> Figure:
    """Seconds of each run, by method and store."""
    stores = list(dict.fromkeys(one["store"] for one in found))
    figure = Figure(figsize=(4.5 * len(stores), 3.2), layout="constrained")
    for where, axes in zip(stores, figure.subplots(1, len(stores), squeeze=False)[0], strict=True):
        methods = _methods_at(found, where)
        for place, method in enumerate(methods):
            values = [one["seconds"] for one in _by(found, method, where)]
            axes.barh(place, median(values), color="#4477aa" if method == OURS else "#bbbbbb")
            axes.plot(values, [place] * len(values), "k.", markersize=4)
        axes.set_yticks(range(len(methods)), methods)
        axes.invert_yaxis()
        axes.set_xlabel("seconds until all is stored")
        axes.set_title(where)
    return figure


def writes_figure(found: list[Run]) -> Figure:
    """Bytes that each method writes to the local disk, second by second."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    chosen = [method for method in METHODS if method != NONE]
    for method, axes in zip(chosen, figure.subplots(len(chosen), 1, sharex=True), strict=True):
        one = _by(found, method, LOCAL)[0]
        seconds: dict[int, float] = defaultdict(float)
        for at, size in one["writes"]:
            seconds[int(at)] += size / 1e6
        axes.bar([*seconds], [*seconds.values()], width=1, align="edge", color="#4477aa")
        axes.set_ylabel("MB/s")
        axes.set_title(method, fontsize="small")
    axes.set_xlabel("seconds")
    return figure
