"""Command line of the campaign: play runs, check them, print what struck and what it cost."""

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.job_spec import JobSpec
from storage.catalog import Catalog
from storage.errors import LayerCheckError
from storage.fault_points import fired_faults
from storage.object_store import open_object_store
from storage.options import S3Options, StorageOptions
from tests.faults.campaign.checks import read_states, violations
from tests.faults.campaign.plan import MAX_LAG, WORKERS, Plan, deal, plan_run
from tests.faults.campaign.play import Play
from tests.faults.campaign.trouble import LocalOutages, Outages, S3Outages
from tests.faults.campaign.world import World, world
from tests.helpers.runs import Runs
from tests.helpers.s3_proxy import s3_proxy
from tests.helpers.s3_server import S3Server, ceph_server, moto_server

PER_RUN = 20
SPARE = 2
"""Not every planned fault fires: some points are not reached before the end."""
BOUND = 20


@dataclass(frozen=True)
class Site:
    """Where runs are stored: as the jobs reach it, and as the campaign does."""

    jobs: StorageOptions
    direct: StorageOptions
    outages: Outages


@contextmanager
def site(args: argparse.Namespace, folder: Path) -> Iterator[Site]:
    """The store of the command line; `ceph` and `moto` start a server and take a new bucket there."""
    if args.storage in ("ceph", "moto"):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's server tells every request
        os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret"}
        with (
            ceph_server(folder / "ceph") if args.storage == "ceph" else moto_server() as server,
            _behind_proxy(f"s3://{server.new_bucket()}/runs", server) as found,
        ):
            yield found
    elif args.storage.startswith("s3://"):
        assert args.endpoint, "give --endpoint: outages are made by a proxy before it"
        with _behind_proxy(args.storage, S3Server(args.endpoint)) as found:
            yield found
    else:
        root = Path(args.storage).resolve()
        root.mkdir(parents=True, exist_ok=True)
        options = StorageOptions(url=str(root))
        yield Site(options, options, LocalOutages(root))


@contextmanager
def _behind_proxy(url: str, server: S3Server) -> Iterator[Site]:
    """The server's keys stand in the AWS environment, so that no spec holds them."""
    with s3_proxy(server) as proxy:
        endpoints = (proxy.server.endpoint, server.endpoint)
        jobs, direct = (StorageOptions(url=url, s3=S3Options(endpoint=endpoint)) for endpoint in endpoints)
        yield Site(jobs, direct, S3Outages(proxy))


def spec_of(runs: Runs, name: str, storage: StorageOptions, plan: Plan) -> JobSpec:
    """The spec of one run: small, adaptive, never tired of failures."""
    spec = runs.spec(
        name,
        training={"steps": plan.steps},
        checkpoint={"write_budget": "1/3", "staleness_bound_steps": BOUND, "max_lag": MAX_LAG},
        scaling={"workers": WORKERS, "cpus_per_worker": 1},
        failures={"attempts_without_progress": 20},
        fault_injection=plan.addressed,
    )
    return spec.model_copy(update={"storage": storage})


def play_and_check(
    here: World, at: Site, runs: Runs, name: str, plan: Plan, rng: random.Random, folder: Path
) -> dict[str, object]:
    """One run, and everything there is to say about it."""
    store = open_object_store(at.direct, name)
    played = Play(here, spec_of(runs, name, at.jobs, plan), plan, store, at.outages, rng, folder).to_the_end()
    told = read_states(folder / "states")
    fired = Counter(_kind(incident.what) for incident in fired_faults(store)) + Counter(played.outside)
    if not played.violations:
        try:
            played.violations += violations(store, plan.steps, MAX_LAG, told)
        except LayerCheckError as error:
            played.violations.append(f"cannot be checked: {error}")
    record = Catalog(store).newest_record()
    return {
        **asdict(played),
        "planned": plan.count,
        "fired": dict(fired),
        "steps": plan.steps,
        "recoveries": [recovery.model_dump() for recovery in record.recoveries] if record else [],
        "incidents": [incident.model_dump() for incident in record.incidents] if record else [],
        "steps_lost": told.steps_lost(),
        "states_recorded": len(told.states),
        "restores_checked": len(told.restores),
        "folder": str(folder),
    }


def _kind(address: str) -> str:
    who, _, _, point, *_ = address.split("-")
    return f"{who} {point}"


def report(results: list[dict], console: Console) -> None:
    """What struck, what it cost, what was broken."""
    fired = sum((Counter(result["fired"]) for result in results), Counter())
    recoveries = [recovery for result in results for recovery in result["recoveries"]]
    seconds = [recovery["seconds"] for recovery in recoveries if recovery["seconds"] is not None]
    lost = [steps for result in results for steps in result["steps_lost"].values()]
    table = Table("fault", "fired")
    for kind, count in sorted(fired.items()):
        table.add_row(kind, str(count))
    table.add_row("all", str(fired.total()), style="bold")
    console.print(table)
    facts = {
        "runs": len(results),
        "drivers": sum(result["lives"] for result in results),
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "steps trained for": sum(result["steps"] for result in results),
        "recoveries": len(recoveries),
        "steps lost": f"{sum(lost)}, at most {max(lost, default=0)}",
        "seconds per recovery": f"median {statistics.median(seconds):.1f}" if seconds else "-",
        "restores checked to the bit": sum(result["restores_checked"] for result in results),
        "violations": sum(len(result["violations"]) for result in results),
    }
    for name, value in facts.items():
        console.print(f"{name}: {value}", highlight=False)
    for result in results:
        for violation in result["violations"]:
            console.print(f"VIOLATION {result['name']}: {violation} ({result['folder']})", soft_wrap=True, markup=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="go on until so many faults have fired")
    parser.add_argument("--seed", type=int, default=0, help="decides which faults strike where")
    parser.add_argument("--storage", required=True, help="a folder, s3://bucket/prefix, or `ceph` or `moto`")
    parser.add_argument("--endpoint", help="of an S3-compatible server; its keys come from the AWS environment")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    return parser.parse_args()


def main() -> int:
    args, console = parse(), Console(width=100)
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    rng = random.Random(args.seed)
    cards, results, fired = deal(rng), [], 0
    with site(args, folder) as at, world() as here:
        runs = Runs(folder)
        while fired < args.faults:
            name = f"campaign-{args.seed}-{len(results)}"
            plan = plan_run(rng, cards, min(PER_RUN, args.faults - fired + SPARE))
            result = play_and_check(here, at, runs, name, plan, random.Random(name), folder / name)
            results.append(result)
            fired += sum(result["fired"].values())
            console.print(
                f"{name}: {sum(result['fired'].values())} of {plan.count} planned faults fired, "
                f"{len(result['recoveries'])} recoveries, {result['seconds']} s, "
                f"{len(result['violations'])} violations; {fired} of {args.faults}",
                soft_wrap=True,
            )
            if args.json:
                args.json.write_text(
                    json.dumps({"seed": args.seed, "storage": args.storage, "runs": results}, indent=1)
                )
    report(results, console)
    broken = any(result["violations"] for result in results)
    if broken:
        console.print(f"to reproduce: --faults {args.faults} --seed {args.seed}; folder {folder}", soft_wrap=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
