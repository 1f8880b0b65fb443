"""Bad input through the command line: one line each, exit code 2, nothing started, nothing written."""

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from app import cli
from app.job_spec import load_spec
from app.spec_identity import public_dump
from storage.catalog import Catalog
from storage.liveness import this_process
from storage.object_store import open_object_store
from storage.options import StorageOptions
from storage.records import BASE, BaseVersion, EpochClaim, EpochLife, LayerFacts, Progress, Record, Totals
from tests.helpers.s3_proxy import s3_proxy
from tests.helpers.s3_server import S3Server, moto_server
from tests.helpers.tiny import write_jsonl, write_tiny_chat, write_tiny_model

ROOT = Path(__file__).parents[2]
JOB = """\
name: job
storage: {url: runs}
model: {path: model, weights: random}
data: {path: chat.jsonl, messages_column: messages, max_length: 64}
training: {steps: 4, global_batch: 4, micro_batch: 2, precision: float32}
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_tiny_model(folder / "model")
    (folder / "no-tokenizer").mkdir()
    shutil.copy(folder / "model" / "config.json", folder / "no-tokenizer")
    (folder / "no-model").mkdir()
    write_tiny_chat(folder / "chat.jsonl")
    write_jsonl(folder / "empty.jsonl", [])
    (folder / "job.yaml").write_text(JOB)
    return folder


@pytest.fixture
def here(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with the assets, where Ray would leave its session too, and no model hub answers."""
    here = tmp_path / "here"
    shutil.copytree(assets, here)
    monkeypatch.chdir(here)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(here / "ray"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    return here


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below `folder`, hidden ones too."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def refused(here: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused in one line and leave no trace; returns the line."""
    before = contents(here)
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert contents(here) == before
    assert not ray.is_initialized()
    return captured.err.removeprefix("error: ").strip()


def overrides(*pairs: str) -> list[str]:
    return [argument for pair in pairs for argument in ("--set", pair)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepz=3", "training.stepz: unknown key; expected one of steps, .*; did you mean steps?"),
        ("training.steps=many", 'training.steps: expected integer .*, got "many"'),
        ("name=a/b", 'name: expected .*, got "a/b"; folders belong into storage.url'),
        ("name=..", 'name: expected .*, got ".."'),
        ("data.path=none.jsonl", "data.path: no file at .*none.jsonl; check it"),
        ("data.path=chat.csv", "data.path: expected a file ending in .jsonl or .parquet, got .*chat.csv'; convert"),
        ("data.path=empty.jsonl", "data.path: .*empty.jsonl has no rows, expected at least one; name another file"),
        ("data.eval_path=none.jsonl", "data.eval_path: no file at .*none.jsonl; check it"),
        ("data.messages_column=talk", "data.path: .* no column 'talk'; columns there are: messages; set data."),
        (
            "data.max_length=8",
            "data.path: .* line 1: [0-9]+ tokens, data.max_length is 8; raise it, or set data.too_long",
        ),
        ("data.eval_examples=99", "data.eval_examples: expected fewer than the 32 rows .*, got 99; lower it"),
        (
            "model.path=/no/such",
            "model.path: expected a model folder or a hub id .*, got '/no/such', .*; correct the path",
        ),
        (
            "model.path=org/no-such",
            "model.path: expected a folder or hub id .*, got 'org/no-such': .*make the hub reachable",
        ),
        ("model.path=no-model", "model.path: expected a model folder with a config.json, got .*no-model'.*; correct"),
        (
            "model.path=no-tokenizer",
            "model.path: expected .* with a tokenizer .*, got .*no-tokenizer': .*; correct the path",
        ),
        (
            "model.freeze=[nothing]",
            "model.freeze: expected a prefix of the parameter names .*, got 'nothing'.*; correct it",
        ),
        (
            "checkpoint.write_budget=1/500",
            "checkpoint.write_budget: expected at least 1/[0-9]+ .*, got 1/500; raise it",
        ),
        (
            "scaling.gpus_per_worker=1",
            "scaling.gpus_per_worker: expected .* GPUs on this machine .*, got .*; set it to 0",
        ),
        ("export=model", "export: expected an absent or empty folder, got .*/model, .*; name another, or remove it"),
        ("export=chat.jsonl", "export: expected an absent or empty folder, got .*/chat.jsonl, .*; name another"),
        ("storage.url=gs://b/x", "storage.url: expected a folder or s3://bucket/prefix, got 'gs://b/x'; correct it"),
        ("storage.url=chat.jsonl", "cannot use .*: .*chat.jsonl is a file, expected a folder; correct storage.url"),
    ],
)
def test_a_bad_job_is_refused(here: Path, capsys: pytest.CaptureFixture[str], override: str, message: str) -> None:
    more = ["--set", "scaling.workers=9", "--set", "training.global_batch=18"] if "gpus" in override else []
    line = refused(here, capsys, "run", "job.yaml", *overrides(override), *more)
    assert_says(line, message)


def assert_says(line: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):  # shows both on failure
        raise ValueError(line)


def test_layers_that_are_too_big_to_hand_over_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(
        here, capsys, "run", "job.yaml", *overrides("checkpoint.mode=full", "checkpoint.in_flight_bytes=1000")
    )
    assert_says(line, "checkpoint.mode: full hands over [0-9]+ bytes at once, the limit per node is 1000")


def test_an_address_without_a_cluster_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    line = refused(here, capsys, "run", "job.yaml")
    assert_says(line, "RAY_ADDRESS: expected the address of a running Ray cluster, got '127.0.0.1:9', where nothing")


def test_a_machine_on_which_ray_does_not_start_says_why(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(here / ("too long for the path of a socket" * 3)))
    assert cli.main(["run", "job.yaml"]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert_says(line, "error: Ray could not be started on this machine: .*107 bytes.*; mend that")


def test_a_missing_spec_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_says(refused(here, capsys, "run", "none.yaml"), "none.yaml: no such file; expected the path of a job spec")


@pytest.mark.parametrize("command", ["status", "verify", "export", "gc"])
@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("runs/none", "RUN: expected the storage URL of a run, .*, got .*runs/none, which holds none; correct it"),
        ("model", "RUN: expected the storage URL of a run, .*, got .*model, which holds none; correct it"),
        ("chat.jsonl", "cannot use .*chat.jsonl: .* is a file, expected a folder; correct"),
        ("s3://bucket", "RUN: expected <storage>/<run name> such as .*, got s3://bucket"),
        ("gs://bucket/x", "storage.url: expected a folder or s3://bucket/prefix, got 'gs://bucket'; correct it"),
    ],
)
def test_what_is_no_run_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, run: str, message: str
) -> None:
    assert_says(refused(here, capsys, command, run, *(["out"] if command == "export" else [])), message)


# --- stores


def s3_overrides(options: StorageOptions) -> list[str]:
    s3 = options.s3
    assert s3.access_key is not None
    assert s3.secret_key is not None
    return overrides(
        f"storage.url={options.url}",
        f"storage.s3.endpoint={s3.endpoint}",
        f"storage.s3.access_key={s3.access_key.get_secret_value()}",
        f"storage.s3.secret_key={s3.secret_key.get_secret_value()}",
    )


def left_in(server: S3Server, bucket: str) -> list[str]:
    """Objects and unfinished uploads in `bucket`."""
    client = server.client()
    found = client.call_s3("list_objects_v2", Bucket=bucket).get("Contents", [])
    return [
        item["Key"] for item in (*found, *client.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", []))
    ]


def test_an_unreachable_endpoint_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = s3_overrides(S3Server("http://127.0.0.1:9").options("bucket"))
    assert_says(refused(here, capsys, "run", "job.yaml", *nowhere), "endpoint unreachable: check storage.s3.endpoint")


def test_a_missing_bucket_is_refused(here: Path, moto: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(here, capsys, "run", "job.yaml", *s3_overrides(moto.options("no-such-bucket")))
    assert_says(line, "bucket does not exist: create it, or correct storage.url")


def test_wrong_credentials_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with moto_server() as strict:
        bucket = strict.new_bucket()
        authenticate(strict, after_actions="0")
        try:
            line = refused(here, capsys, "run", "job.yaml", *s3_overrides(strict.options(bucket, secret_key="hunter2")))
        finally:
            authenticate(strict, after_actions="inf")
        assert_says(line, "wrong credentials: check storage.s3.access_key and secret_key")
        assert "hunter2" not in line
        assert left_in(strict, bucket) == []


def authenticate(server: S3Server, after_actions: str) -> None:
    """Let moto check access keys from the given number of requests on."""
    plain = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{server.endpoint}/moto-api/reset-auth", after_actions.encode(), plain)
    with urllib.request.urlopen(request, timeout=5) as reply:
        assert reply.status == 200


def test_a_bucket_that_ignores_exclusive_creation_is_refused(
    here: Path, moto: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = moto.new_bucket()
    with s3_proxy(moto) as careless:
        careless.begin("drop_if_none_match")
        line = refused(here, capsys, "run", "job.yaml", *s3_overrides(careless.server.options(bucket)))
    assert_says(
        line, "the store ignores exclusive creation, .*; use a store .*, or .* storage.allow_unsafe_create: true"
    )
    assert left_in(moto, bucket) == []


# --- a run that is there


def claimed(here: Path, *more: str) -> Catalog:
    """A run under the name of `job.yaml`, as another driver's first epoch leaves it behind before its first commit."""
    spec = load_spec(here / "job.yaml", more)
    catalog = Catalog(open_object_store(spec.storage, spec.name))
    claim = EpochClaim(
        epoch=0,
        nonce="n",
        driver="d",
        where=this_process(),
        claimed_at="",
        spec=public_dump(spec),
        spec_fingerprint="",
        data_fingerprint="of other examples",
    )
    catalog.claim(claim)
    catalog.show_life(EpochLife(epoch=1, beat=1, ended=True))
    return catalog


def test_another_spec_under_the_same_name_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claimed(here)
    before = contents(here)
    assert cli.main(["run", "job.yaml", *overrides("training.steps=5", "model.dtype=bfloat16")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", as run")[0] for line in lines] == [
        'error: model.dtype: expected "float32", got "bfloat16"',
        "error: training.steps: expected 4, got 5",
    ]
    assert all(line.endswith("restore it, or give the run another name") for line in lines)
    assert contents(here) == before


def test_other_data_under_the_same_path_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claimed(here)
    line = refused(here, capsys, "run", "job.yaml")
    assert_says(line, "data.path: .*: expected the examples that run 'job' began with .digest of other examples., got")


@pytest.mark.parametrize("command", ["status", "verify", "export", "gc"])
def test_a_run_without_a_restore_point_says_so(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    claimed(here)
    line = refused(here, capsys, command, "runs/job", *(["out"] if command == "export" else []))
    assert_says(line, "RUN: expected a run with a readable restore point, got .*runs/job, which has none; try again")


def test_a_finished_run_says_so_and_stays_as_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(
        epoch=1,
        seq=0,
        step=4,
        layers={"block-00": BASE},
        facts=(LayerFacts(name="block-00", bytes=8, frozen=True),),
        base=BaseVersion(source="model", digest="d"),
        spec_fingerprint="",
        staleness_bound_steps=50,
        totals=Totals(ticks=4, attempts=1),
        progress=Progress(step=4, loss=1.5),
        finished=True,
    )
    claimed(here).commit(record)
    before = contents(here)
    (here / "chat.jsonl").unlink()  # what a finished run no longer needs
    before.pop(str(here / "chat.jsonl"))
    assert cli.main(["run", "job.yaml", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["finished"] is True
    assert captured.err == "this run had finished before; nothing was trained\n"
    assert contents(here) == before
    assert_says(
        refused(here, capsys, "export", "runs/job", "model"), "DIR: expected an absent or empty folder, got model"
    )


# --- what libraries say must not show: only a process of its own has the real streams


@pytest.mark.parametrize(
    "override",
    [["data.messages_column=talk"], ["storage.url=s3://b/x", "storage.s3.endpoint=http://127.0.0.1:9"]],
)
def test_a_process_says_one_line_and_ends(here: Path, override: list[str]) -> None:
    keys = ["storage.s3.access_key=k", "storage.s3.secret_key=s"] if "storage.url=s3://b/x" in override else []
    done = subprocess.run(
        [sys.executable, "-m", "app", "run", "job.yaml", "--json", *overrides(*override, *keys)],
        cwd=here, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (here / "runs").exists()
