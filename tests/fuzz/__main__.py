"""Feeds hostile bytes to the readers in a child process, and watches that process die, hang or grow."""

import argparse
import json
import mmap
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from tests.fuzz.targets import case, outcome

HANG_S = 60.0
"""No input may take longer; a healthy one takes a millisecond, so a loaded machine does not matter."""
MOST_ARROW_BYTES = 64 << 20
MOST_GROWTH_BYTES = 256 << 20
"""Inputs are below a megabyte."""
_NUMBER_BYTES = 8


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _feed(seed: int, first: int, inputs: int, under_way: Path) -> dict[str, Any]:
    """The child's work: counts by target and outcome, and the first violation."""
    counts: Counter[tuple[str, str]] = Counter()
    problem = None
    with under_way.open("r+b") as file, mmap.mmap(file.fileno(), _NUMBER_BYTES) as shown:
        for number in range(first, first + inputs):
            shown[:] = number.to_bytes(_NUMBER_BYTES, "little")
            if number == first + 100:
                settled = _peak_bytes()
            made = case(seed, number)
            try:
                counts[made.target, outcome(made)] += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
                problem = f"{made.target}: {type(error).__name__}: {error}"
            if pa.default_memory_pool().max_memory() > MOST_ARROW_BYTES:
                problem = f"{made.target}: Arrow took {pa.default_memory_pool().max_memory()} bytes"
            if number > first + 100 and _peak_bytes() > settled + MOST_GROWTH_BYTES:
                problem = f"{made.target}: the process grew to {_peak_bytes()} bytes"
            if problem is not None:
                break
    told = [[target, result, count] for (target, result), count in sorted(counts.items())]
    return {"counts": told, "problem": problem, "number": number, "peak_bytes": _peak_bytes()}


def watch(command: Sequence[str], under_way: Path, hang_s: float = HANG_S) -> tuple[str | None, bytes]:
    """Run `command`, which keeps the number of its input in `under_way`.

    Returns:
        What is wrong with how it ended, and its output.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        seen, since, hangs = b"", time.monotonic(), False
        while not hangs:
            try:
                child.wait(0.5)
                break
            except subprocess.TimeoutExpired:
                now = under_way.read_bytes()
                if now != seen:
                    seen, since = now, time.monotonic()
                hangs = time.monotonic() - since > hang_s
        if hangs:
            child.kill()
        output = child.stdout.read() if child.stdout else b""
    if hangs:
        return f"no answer within {hang_s:g} s", output
    return (f"the process died with exit code {child.returncode}" if child.returncode else None), output


def _run(seed: int, first: int, inputs: int) -> dict[str, Any]:
    """Result of the child; its crash or standstill is a finding like any other."""
    with tempfile.TemporaryDirectory() as folder:
        under_way = Path(folder) / "number"
        under_way.write_bytes(first.to_bytes(_NUMBER_BYTES, "little"))
        command = [sys.executable, "-m", "tests.fuzz", "--child", str(under_way)]
        command += ["--seed", str(seed), "--first", str(first), "--inputs", str(inputs)]
        problem, output = watch(command, under_way)
        if problem is None:
            result: dict[str, Any] = json.loads(output)
            return result
        number = int.from_bytes(under_way.read_bytes(), "little")
    return {"counts": [], "problem": problem, "number": number, "peak_bytes": 0}


def main() -> int:
    """Exit code: 0, or 1 after a violation, whose input is kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-findings"), help="folder for inputs that broke something"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_feed(args.seed, args.first, args.inputs, args.child)))
        return 0
    began = time.monotonic()
    result = _run(args.seed, args.first, args.inputs)
    seconds = time.monotonic() - began
    table = Table("target", "right", "refused")
    counts = {(target, what): count for target, what, count in result["counts"]}
    for target in sorted({target for target, _ in counts}):
        table.add_row(target, *(f"{counts.get((target, what), 0):,}" for what in ("right", "refused")))
    console = Console(width=100)
    console.print(table)
    done = sum(counts.values())
    console.print(
        f"{done:,} inputs in {seconds:.1f} s ({done / seconds:,.0f}/s), "
        f"peak memory {result['peak_bytes'] / 2**20:.0f} MiB, seed {args.seed}, "
        f"violations {int(result['problem'] is not None)}"
    )
    if result["problem"] is None:
        return 0
    args.keep.mkdir(parents=True, exist_ok=True)
    kept = args.keep / f"seed{args.seed}-input{result['number']}"
    kept.write_bytes(case(args.seed, result["number"]).data)
    console.print(f"input {result['number']}, kept as {kept}: {result['problem']}", markup=False, soft_wrap=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
