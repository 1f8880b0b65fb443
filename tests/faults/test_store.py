"""A store that is overloaded, broken, silent, closed, gone or full: bounded patience, clear words, nothing torn."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage import s3_store
from storage.catalog import Catalog
from storage.errors import StoreError
from storage.object_store import ObjectInfo, ObjectStore, open_object_store
from storage.options import StorageOptions
from storage.probe import check_token, probe_store, write_token
from storage.store_common import translated
from tests.helpers.records import claim, manifest, record
from tests.helpers.s3_proxy import Fault, S3Proxy, s3_proxy
from tests.helpers.s3_server import S3Server, moto_server

MIB = 1 << 20
SEED = bytes(range(256)) * 1000
BOUND_S = 60
"""Far above the time-outs set here and far below those of the libraries."""

Operation = Callable[[ObjectStore], object]


def stream(store: ObjectStore) -> None:
    with store.open_writer("new/stream") as writer:
        for _ in range(4):
            writer.write(SEED[:1000] * 3 * 1000)


def read_stream(store: ObjectStore) -> None:
    with store.open_reader("seed/open") as reader, translated("read", "seed/open"):
        assert reader.read() == SEED


OPERATIONS: dict[str, Operation] = {
    "read": lambda store: store.read("seed/read"),
    "size": lambda store: store.size("seed/size"),
    "list": lambda store: store.list("seed/"),
    "open_reader": read_stream,
    "put": lambda store: store.put("new/put", b"1"),
    "create": lambda store: store.create("new/create", b"1"),
    "open_writer": stream,
    "delete": lambda store: store.delete(["seed/delete"]),
}
RESULTS = {"read": SEED, "size": len(SEED)}


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture
def proxy(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    for setting, value in {"_CONNECT_TIMEOUT_S": 1, "_READ_TIMEOUT_S": 1, "_ATTEMPTS": 3}.items():
        monkeypatch.setattr(s3_store, setting, value)
    with s3_proxy(moto) as found:
        yield found


@pytest.fixture
def store(proxy: S3Proxy) -> ObjectStore:
    """A store behind the proxy that holds what the operations need."""
    opened = open_object_store(proxy.server.options(proxy.server.new_bucket()), "run")
    for name in ("read", "size", "open", "delete"):
        opened.put(f"seed/{name}", SEED)
    return opened


def attempt_all(store: ObjectStore) -> dict[str, object]:
    """What each operation returned or raised; all at once, because they mostly wait."""

    def attempt(operation: Operation) -> object:
        try:
            return operation(store)
        except StoreError as error:
            return error

    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        return dict(zip(OPERATIONS, pool.map(attempt, OPERATIONS.values()), strict=True))


@pytest.mark.parametrize("fault", ["busy", "broken", "reset"])
def test_a_short_disturbance_is_not_noticed(store: ObjectStore, proxy: S3Proxy, fault: Fault) -> None:
    proxy.begin(fault, times=1)  # of every single request
    results = attempt_all(store)
    assert proxy.fired[fault] >= len(OPERATIONS)
    assert {name: result for name, result in results.items() if isinstance(result, StoreError)} == {}
    assert {name: results[name] for name in RESULTS} == RESULTS
    assert {info.key for info in store.list("new/")} == {"new/put", "new/create", "new/stream"}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("busy", "overloaded"),
        ("broken", "failed inside"),
        ("denied", "access denied"),
        ("gone", "bucket does not exist|no such"),
        ("reset", "unreachable"),
        ("hang", "unreachable"),
    ],
)
def test_a_lasting_fault_is_a_clear_error_in_bounded_time(
    store: ObjectStore, proxy: S3Proxy, fault: Fault, reason: str
) -> None:
    proxy.begin(fault)
    began = time.monotonic()
    results = attempt_all(store)
    assert time.monotonic() - began < BOUND_S
    assert proxy.fired[fault] >= len(OPERATIONS)
    for name, error in results.items():
        assert isinstance(error, StoreError), f"{name} gave {error!r}"
        assert any(word in str(error) for word in reason.split("|")), f"{name}: {error}"
        assert "\n" not in str(error)
        assert "testsecret" not in str(error)
    proxy.end()
    store.abort(store.unfinished())
    assert {info.key for info in store.list("")} == {f"seed/{name}" for name in ("read", "size", "open", "delete")}
    assert {name: attempt_all(store)[name] for name in RESULTS} == RESULTS, "it works again"


def test_an_upload_that_dies_half_way_shows_nothing_and_can_be_swept(store: ObjectStore, proxy: S3Proxy) -> None:
    with pytest.raises(StoreError, match="access denied"), store.open_writer("new/stream") as writer:
        writer.write(b"x" * 12 * MIB)
        proxy.begin("denied")
        writer.write(b"x" * 12 * MIB)
    proxy.end()
    assert store.list("new/") == []
    assert [begun.key for begun in store.unfinished()] == ["new/stream"]  # aborting it was denied, too
    store.abort(store.unfinished())
    assert store.unfinished() == []


def test_a_lost_reply_to_a_creation_is_found_out(store: ObjectStore, proxy: S3Proxy) -> None:
    proxy.begin("lost_reply", where="PUT", times=1)
    catalog = Catalog(store)
    assert catalog.claim(claim()).epoch == 1
    version = catalog.write_manifest(manifest("a", 1))
    catalog.commit(record({"a": version}))
    assert proxy.fired["lost_reply"] >= 3
    proxy.end()
    assert catalog.newest_claim().nonce == claim().nonce
    assert catalog.newest_record() == record({"a": version})


def test_a_lost_reply_does_not_fail_the_probes(store: ObjectStore, proxy: S3Proxy) -> None:
    """Seen in a run: the retry of a token's creation met the token, and the run ended."""
    proxy.begin("lost_reply", where="PUT", times=1)
    token = write_token(store)
    check_token(store, token)
    proxy.begin("lost_reply", where="created", times=1)
    probe_store(store, allow_unsafe_create=False)
    assert proxy.fired["lost_reply"] >= 2


def test_after_lost_replies_an_upload_is_whole_or_failed(store: ObjectStore, proxy: S3Proxy) -> None:
    proxy.begin("lost_reply", where="new/stream", times=1)
    try:
        stream(store)
        expected = [ObjectInfo("new/stream", 12_000_000)]
    except StoreError:
        expected = []
    assert proxy.fired["lost_reply"] >= 2
    proxy.end()
    assert store.list("new/") == expected


def test_half_a_reply_is_never_taken_for_the_object(store: ObjectStore, proxy: S3Proxy) -> None:
    proxy.begin("cut", where="GET")
    for read in (lambda: store.read("seed/read"), lambda: read_stream(store), lambda: store.list("seed/")):
        with pytest.raises(StoreError):
            read()
    proxy.begin("cut", where="GET", times=1)
    assert store.read("seed/read") == SEED
    read_stream(store)


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[None]:
    """`folder` on a file system of `mib` MiB; skips the test where this cannot be had."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_says_so_and_keeps_what_it_has(tmp_path: Path) -> None:
    with small_disk(tmp_path, 1):
        store = open_object_store(StorageOptions(url=str(tmp_path / "runs")), "run")
        store.put("catalog/kept", b"kept")
        for write in (stream, lambda store: store.create("new/create", b"x" * 2 * MIB)):
            with pytest.raises(StoreError, match="no space left: free space or raise the quota"):
                write(store)
        assert (store.list(""), store.unfinished()) == ([ObjectInfo("catalog/kept", 4)], [])
        store.put("new/put", b"small")
        assert store.read("catalog/kept") == b"kept"


def test_a_wrong_secret_is_in_no_error(moto: S3Server, tmp_path: Path) -> None:
    """Keys and session token from the AWS chain, as in the environment of a cluster."""
    secrets = {"AWS_ACCESS_KEY_ID": "AKIASECRETID", "AWS_SECRET_ACCESS_KEY": "hunter2key", "AWS_SESSION_TOKEN": "t0ken"}
    code = (
        "import logging, traceback\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from storage.object_store import open_object_store\n"
        "from storage.options import S3Options, StorageOptions\n"
        f"options = StorageOptions(url='s3://no-bucket/x', s3=S3Options(endpoint='{moto.endpoint}'))\n"
        "store = open_object_store(options, 'run')\n"
        "print(store, options)\n"
        "acts = (store.check_reachable, lambda: store.read('k'), lambda: store.create('k', b''), store.unfinished)\n"
        "for act in acts:\n"
        "    try:\n"
        "        act()\n"
        "    except Exception:\n"
        "        traceback.print_exc()\n"
        "try:\n"
        "    with store.open_writer('k') as writer:\n"
        "        writer.write(b'x')\n"
        "except Exception:\n"
        "    traceback.print_exc()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, **secrets}, capture_output=True, text=True)
    printed = ran.stdout + ran.stderr
    assert printed.count("StoreError: cannot") >= 5
    assert [name for name, secret in secrets.items() if secret in printed] == []
