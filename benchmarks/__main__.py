"""Measure what the project promises, side by side in one run: a table with the marks, a record, plots.

python -m benchmarks --profile quick
python -m benchmarks --profile full --model models/smollm2 --data .../gsm8k/train.jsonl
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import bookkeeping, codecs, end_to_end, restore, sampling
from benchmarks.piece import Mark, Outcome, Profile
from benchmarks.record import write_record

PIECES: dict[str, Callable[[Profile], Outcome]] = {
    "end_to_end": end_to_end.run,
    "bookkeeping": bookkeeping.run,
    "codecs": codecs.run,
    "restore": restore.run,
    "sampling": sampling.run,
}


def main() -> int:
    """Run the pieces; returns 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=("quick", "full"), default="quick")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2 (default: the quickstart's small Llama)")
    parser.add_argument("--data", type=Path, help="GSM8K's train.jsonl, if there is a --model")
    parser.add_argument("--repeats", type=int, default=1, help="of each run of end_to_end; 50 minutes each in full")
    parser.add_argument("--pieces", nargs="+", choices=list(PIECES), default=list(PIECES))
    args = parser.parse_args()
    if (args.model is None) != (args.data is None):
        parser.error("--model and --data: give both, or neither")
    profile = Profile(name=args.profile, model=args.model, data=args.data, repeats=args.repeats)
    outcomes: dict[str, Outcome] = {}
    for name in args.pieces:
        try:
            outcomes[name] = PIECES[name](profile)
        except Exception:  # noqa: BLE001 - what the other pieces measure is worth having
            traceback.print_exc()
    Console().print(table([mark for outcome in outcomes.values() for mark in outcome.marks]))
    values = {name: {"marks": [vars(mark) for mark in o.marks], **o.values} for name, o in outcomes.items()}
    record = write_record(
        f"bench-{profile.name}", {"profile": profile.name, "model": str(args.model), "pieces": values}
    )
    print(f"record: {record}")
    for outcome in outcomes.values():
        for name, figure in outcome.figures.items():
            figure.savefig(record.with_name(f"{record.stem}-{name}.svg"))
    return 0 if len(outcomes) == len(args.pieces) else 1


def table(marks: list[Mark]) -> Table:
    """What was measured beside what was to be reached."""
    shown = Table("measure", "mark", "measured", "met")
    for mark in marks:
        shown.add_row(mark.measure, mark.target, mark.measured, {True: "yes", False: "NO", None: ""}[mark.met])
    return shown


if __name__ == "__main__":
    sys.exit(main())
