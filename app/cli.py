"""Command line. Every command parses, calls one function elsewhere, and prints what it returned.

Exit codes: 0 done; 1 the run failed, or something stored is broken; 2 bad input or usage, nothing started;
130 Ctrl-C; 143 SIGTERM.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal

from app.gc import collect
from app.job_spec import JobSpec, load_spec
from app.plan import SHOWN, plan_document, plan_run, plan_table
from app.quiet import quiet_libraries, quiet_stdout
from app.schema import fields_of, render_schema
from app.status import read_status
from app.summary import layer_table, summary
from app.verify import verify_run
from storage.errors import LayerCheckError, RunLiveError, SpecError, StoreError
from storage.object_store import ObjectStore, open_object_store
from storage.options import S3Options, StorageOptions

BAD_INPUT = (SpecError, StoreError, RunLiveError)


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def build_parser() -> argparse.ArgumentParser:
    """All commands; each sets `handler`, a function from the parsed arguments to the exit code."""
    parser = _Parser(prog="layercheck", description="Fault-tolerant LLM post-training with layer-wise checkpoints.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, handler: Callable[[argparse.Namespace], int], help_text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
        added.set_defaults(handler=handler)
        added.add_argument("--json", action="store_true", help="print one JSON document on stdout")
        return added

    def run_command(name: str, handler: Callable[[argparse.Namespace], int], help_text: str) -> argparse.ArgumentParser:
        added = command(name, handler, help_text)
        added.add_argument("run", metavar="RUN", help="storage URL of a run: runs/quickstart, s3://bucket/runs/x")
        added.add_argument("--endpoint", help="URL of an S3-compatible server (default: AWS)")
        added.add_argument("--region", help="S3 region (default: as AWS is configured)")
        return added

    run = command("run", _run, "run a job spec, or resume it; a finished run says so")
    run.add_argument("spec", metavar="SPEC", type=Path, help="YAML file; `schema` lists its fields")
    run.add_argument("--set", metavar="K=V", action="append", default=[], help="override a field: training.steps=60")
    run.add_argument("--takeover", action="store_true", help="take the run over from a driver that still shows life")
    run_command("status", _status, "show the newest restore point and what the run went through")
    run_command("verify", _verify, "read and check every shard that a retained restore point names")
    export = run_command("export", _export, "write a restore point as a Hugging Face model folder")
    export.add_argument("dir", metavar="DIR", type=Path, help="folder to write; must be absent or empty")
    export.add_argument("--step", type=int, metavar="N", help="of the restore point (`status`); default: the newest")
    report = run_command("report", _report, "write one HTML page about a run, which opens offline")
    report.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help="(default: %(default)s)"
    )
    report.add_argument(
        "--against", metavar="OTHER_RUN", help="a run to show beside it, such as one that met no failure"
    )
    gc = run_command("gc", _gc, "delete what no retained restore point needs")
    gc.add_argument("--dry-run", action="store_true", help="only list what would be deleted")
    plan = run_command("plan", _plan, "predict bytes, ages and impact of other settings from what a run recorded")
    for name, kind, help_text in (
        ("--write-budget", str, 'share of the full state per tick ("1/100"), or a rate ("50 MB/s")'),
        ("--criterion", str, "what ranks layers that are not due: drift, impact, oldest"),
        ("--threshold", _number_or_none, "drift below which a layer waits for its deadline; none: no threshold"),
        ("--staleness-bound-steps", int, "largest age of a layer in a restore point"),
        ("--codec", str, "raw, lossless, delta"),
    ):
        plan.add_argument(name, type=kind, default=argparse.SUPPRESS, help=f"{help_text} (default: as the run)")
    command("schema", _schema, "list the job spec's fields: type, default, meaning")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. What is not a `LayerCheckError` is a bug and keeps its traceback."""
    args = build_parser().parse_args(arguments)
    quiet_libraries()
    try:
        code = args.handler(args)
        sys.stdout.flush()
    except LayerCheckError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2 if isinstance(error, BAD_INPUT) else 1
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        print(f"error: interrupted by {number.name}; run the same command again to go on", file=sys.stderr)
        return 128 + number
    except BrokenPipeError:
        # The reader has gone (`| head`); without this, Python complains once more when it flushes stdout on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(code)


def split_run(run: str) -> tuple[str, str]:
    """Storage URL (a local one made absolute) and name of the run at URL `run`.

    Raises:
        SpecError: `run` is not `<storage>/<run name>`.
    """
    scheme, separator, path = run.rpartition("://")
    if not separator and run:
        path = os.path.abspath(run)
    parent, _, name = path.rstrip("/").rpartition("/")
    if not name or (separator and not parent):
        raise SpecError(f"RUN: expected <storage>/<run name> such as runs/quickstart or s3://bucket/runs/x, got {run}")
    return f"{scheme}://{parent}" if separator else parent or "/", name


def _store(args: argparse.Namespace) -> ObjectStore:
    return _store_of(args.run, args)


def _store_of(run: str, args: argparse.Namespace) -> ObjectStore:
    url, name = split_run(run)
    options = StorageOptions(url=url, s3=S3Options(endpoint=args.endpoint, region=args.region))
    return open_object_store(options, name)


def _show(args: argparse.Namespace, document: object, text: RenderableType) -> None:
    if args.json:
        print(json.dumps(document, indent=2))
    elif isinstance(text, str):
        print(text)
    else:
        Console().print(text)


def _status(args: argparse.Namespace) -> int:
    status = read_status(_store(args))
    _show(args, status.model_dump(mode="json"), Group(summary(status), layer_table(status)))
    return 0


def _plan(args: argparse.Namespace) -> int:
    changes = {name: getattr(args, name) for name in SHOWN if hasattr(args, name)}
    plan = plan_run(_store(args), changes)
    _show(args, plan_document(plan), plan_table(plan))
    return 0


def _number_or_none(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or none, got {text!r}") from None


def _schema(args: argparse.Namespace) -> int:
    fields = fields_of(JobSpec)
    if args.json:
        print(json.dumps([field._asdict() for field in fields], indent=2))
    else:
        print(render_schema(fields), end="")
    return 0


def _run(args: argparse.Namespace) -> int:
    spec = load_spec(args.spec, args.set)
    from app.driver import run_job  # noqa: PLC0415 - torch and transformers: eight seconds that others need not wait

    with quiet_stdout():
        outcome = run_job(spec, takeover=args.takeover, console=Console(stderr=True))
    if outcome.status is not None:
        _show(args, outcome.status.model_dump(mode="json"), summary(outcome.status))
    if outcome.had_finished:
        print("this run had finished before; nothing was trained", file=sys.stderr)
    if outcome.verdict is not None:
        print(f"error: {outcome.verdict.kind}: {outcome.verdict.message}", file=sys.stderr)
    return 1 if outcome.verdict else 0


def _verify(args: argparse.Namespace) -> int:
    found = verify_run(_store(args))
    points = ", ".join(str(step) for step in found.restore_points)
    read = f"{found.versions} layer versions, {found.objects} shards, {decimal(found.bytes)}"
    text = f"restore points {points}: read and checked {read}"
    _show(args, asdict(found), "\n".join([text, *(f"broken: {problem}" for problem in found.problems)]))
    return 1 if found.problems else 0


def _export(args: argparse.Namespace) -> int:
    from app.export import export_run  # noqa: PLC0415 - as in `_run`

    step = export_run(_store(args), args.dir, args.step)
    _show(args, {"step": step, "dir": str(args.dir)}, f"wrote the model of step {step} to {args.dir}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from app.report.page import write_report  # noqa: PLC0415 - matplotlib: a second that others need not wait

    size = write_report(_store(args), args.output, _store_of(args.against, args) if args.against else None)
    _show(
        args, {"file": str(args.output), "bytes": size}, f"wrote {args.output}, {decimal(size)}: open it in a browser"
    )
    return 0


def _gc(args: argparse.Namespace) -> int:
    collected = collect(_store(args), dry_run=args.dry_run)
    verb = "would delete" if collected.dry_run else "deleted"
    text = f"{verb} {len(collected.keys)} objects, {decimal(collected.bytes)}, {len(collected.unfinished)} open uploads"
    _show(args, asdict(collected), text)
    return 0
