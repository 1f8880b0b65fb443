"""One contract for every object store."""

import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from storage import s3_store
from storage.errors import ObjectExistsError, ObjectNotFoundError, SpecError, StoreError
from storage.local_store import TEMPORARY
from storage.object_store import ObjectInfo, ObjectStore, open_object_store
from storage.options import S3Options, StorageOptions
from tests.contract.conftest import Place
from tests.helpers.s3_server import S3Server

MIB = 1 << 20


class TornError(Exception):
    """Raised by a test in the middle of an upload."""


def test_put_read_size_and_replace(store: ObjectStore) -> None:
    store.put("a/b.json", b"one")
    store.put("a/b.json", b"three")
    assert store.read("a/b.json") == b"three"
    assert store.size("a/b.json") == 5


@pytest.mark.parametrize("size", [0, 1, 3 * MIB, 25 * MIB])
def test_stream_is_visible_whole_after_the_block(place: Place, size: int) -> None:
    store, other = place.open(), place.open()
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    with store.open_writer("layers/x.arrow") as stream:
        for first in range(0, size, 2 * MIB):
            stream.write(data[first : first + 2 * MIB])
        assert other.list("") == []
    assert other.list("layers/") == [ObjectInfo("layers/x.arrow", size)]
    with other.open_reader("layers/x.arrow") as reader:
        assert reader.size() == size
        assert reader.read() == data
        if size > 10:
            reader.seek(size - 10)
            assert reader.read(5) == data[-10:-5]


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, TornError), (100, KeyboardInterrupt), (12 * MIB, OSError), (40 * MIB, TornError)],
)
def test_torn_stream_publishes_nothing(place: Place, size: int, error: type[BaseException]) -> None:
    store = place.open()
    with pytest.raises(StoreError if error is OSError else error), store.open_writer("layers/x.arrow") as stream:
        for first in range(0, size, 4 * MIB):
            stream.write(b"z" * min(4 * MIB, size - first))
        raise error
    del stream
    gc.collect()
    assert store.list("") == []
    with pytest.raises(ObjectNotFoundError):
        store.size("layers/x.arrow")
    assert store.unfinished() == []
    if place.server is not None:
        bucket = place.options.url.split("/")[2]
        assert not place.server.client().call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads")
    elif place.options is not None:
        assert [path for path in Path(place.options.url).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("size", [100, 12 * MIB])
def test_torn_stream_never_was_visible(server: S3Server, size: int) -> None:
    # A versioned bucket remembers objects that were there for a moment and then deleted.
    bucket, client = server.new_bucket(), server.client()
    client.call_s3("put_bucket_versioning", Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    store = open_object_store(server.options(bucket), "run")
    with pytest.raises(TornError), store.open_writer("x") as stream:
        stream.write(b"z" * size)
        raise TornError
    assert not client.call_s3("list_object_versions", Bucket=bucket).get("Versions")


def test_torn_stream_leaves_neighbours_alone(store: ObjectStore) -> None:
    with store.open_writer("layers/x.arrow.more") as neighbour:
        neighbour.write(b"kept")
        with pytest.raises(TornError), store.open_writer("layers/x.arrow") as stream:
            stream.write(b"torn")
            raise TornError
    assert store.list("") == [ObjectInfo("layers/x.arrow.more", 4)]


def test_stream_closed_inside_a_failing_block_is_taken_back(store: ObjectStore) -> None:
    with pytest.raises(TornError), store.open_writer("x") as stream:
        stream.write(b"whole")
        stream.close()
        raise TornError
    assert store.list("") == []


def test_abandoned_generator_publishes_nothing(store: ObjectStore) -> None:
    opened = store.open_writer("x")
    opened.__enter__().write(b"lost")
    del opened
    gc.collect()
    assert store.list("") == []


def test_create_refuses_a_second_time(store: ObjectStore) -> None:
    store.create("claim", b"first")
    with pytest.raises(ObjectExistsError, match="claim: it already exists"):
        store.create("claim", b"second")
    assert store.read("claim") == b"first"


def test_create_refuses_what_put_and_stream_wrote(store: ObjectStore) -> None:
    store.put("a", b"1")
    with store.open_writer("b") as stream:
        stream.write(b"2")
    for key in ("a", "b"):
        with pytest.raises(ObjectExistsError):
            store.create(key, b"3")


def test_sixteen_racing_creators_give_one_winner(store: ObjectStore) -> None:
    racers = 16
    gate = threading.Barrier(racers)

    def race(number: int) -> bool:
        gate.wait()
        try:
            store.create("catalog/epochs/1.json", f"{number:04d}".encode() * 1000)
        except ObjectExistsError:
            return False
        return True

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(race, range(racers)))
    assert won.count(True) == 1
    assert store.read("catalog/epochs/1.json") == f"{won.index(True):04d}".encode() * 1000


def test_list_is_sorted_exact_and_current(place: Place) -> None:
    store, other = place.open(), place.open()
    assert store.list("") == [] == store.list("catalog/")
    names = ["catalog/records/00/1.json", "catalog/records/00/10.json", "catalog/records.bak", "layers/a b+c%/1", "z"]
    for name in reversed(names):
        other.put(name, name.encode())
    infos = [ObjectInfo(name, len(name)) for name in sorted(names)]
    assert store.list("") == infos
    assert store.list("catalog/records/") == [info for info in infos if info.key.startswith("catalog/records/")]
    other.delete(["z"])
    assert store.list("") == infos[:-1]


def test_lists_and_deletions_go_on_past_one_page(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "_PAGE", 10)  # 1000 would take ten seconds a server
    names = [f"many/{number:02d}" for number in range(21)]
    for name in names:
        store.put(name, b"")
    assert [info.key for info in store.list("many/")] == names
    with ExitStack() as writers:
        for name in names:
            writers.enter_context(store.open_writer(name))
        assert [begun.key for begun in store.unfinished()] == names
        writers.pop_all()  # as if the writers had died
    store.abort(store.unfinished())
    store.delete(names)
    assert (store.list(""), store.unfinished()) == ([], [])


def test_thousands_of_versions_are_listed_and_deleted(moto: S3Server) -> None:
    """More than one page and more than one request, at S3's own limits."""
    bucket = moto.new_bucket()
    for number in range(2100):  # past the network: a put takes 10 ms
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, f"runs/run/layers/{number:05d}", b"")
    store = open_object_store(moto.options(bucket), "run")
    names = [info.key for info in store.list("layers/")]
    assert names == [f"layers/{number:05d}" for number in range(2100)]
    store.delete(names)
    assert store.list("") == []


def test_an_upload_is_unfinished_until_its_block_ends(place: Place) -> None:
    store, other = place.open(), place.open()
    key = "layers/block ~ 1%/0000000001/00000001.000001/00000of00001.arrow"
    with store.open_writer(key) as stream:
        stream.write(b"whole")
        assert [begun.key for begun in other.unfinished()] == [key]
    assert other.unfinished() == []
    assert other.list("") == [ObjectInfo(key, 5)]


def test_an_aborted_upload_fails_and_leaves_nothing(place: Place) -> None:
    store, other = place.open(), place.open()
    with pytest.raises(StoreError), store.open_writer("layers/x") as stream, store.open_writer("layers/y") as neighbour:
        stream.write(b"torn")
        neighbour.write(b"kept")
        begun = [found for found in other.unfinished() if found.key == "layers/x"]
        assert len(begun) == 1
        other.abort(begun)
    other.abort(begun)  # gone already
    assert other.list("") == [ObjectInfo("layers/y", 4)]
    assert other.unfinished() == []


def test_delete_is_silent_about_what_is_gone(store: ObjectStore) -> None:
    store.put("a/b/c", b"1")
    store.delete([])
    store.delete(["a/b/c", "a/b/never"])
    store.delete(["a/b/c"])
    assert store.list("") == []
    store.put("a/b/c", b"2")
    assert store.read("a/b/c") == b"2"


def test_missing_object_is_not_found(store: ObjectStore) -> None:
    for look in (store.read, store.size, store.open_reader):
        with pytest.raises(ObjectNotFoundError, match="none"):
            look("layers/none")


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b"])
def test_keys_stay_below_the_root(store: ObjectStore, key: str) -> None:
    for act in (store.read, store.size, store.open_reader, lambda key: store.delete([key])):
        with pytest.raises(StoreError, match="not a relative path"):
            act(key)
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match="not a relative path"):
            write(key, b"")
    with pytest.raises(StoreError, match="not a relative path"), store.open_writer(key):
        pass


def test_writers_and_deleters_do_not_trip_over_each_other(store: ObjectStore) -> None:
    def work(number: int) -> None:
        for turn in range(10):
            key = f"layers/shared/{turn % 2}/{number}"
            store.put(key, b"x")
            store.delete([key])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert store.list("") == []


def test_repr_and_options_keep_secrets(server: S3Server) -> None:
    options = server.options("bucket")
    shown = repr(open_object_store(options, "run")) + repr(options)
    assert "testsecret" not in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"endpoint": "http://127.0.0.1:9"}, "endpoint unreachable"),
        ({"access_key": "nobody-knows-me"}, "wrong credentials"),
        ({"secret_key": "hunter2hunter2"}, "wrong credentials"),
    ],
)
def test_reasons_are_told_apart_within_seconds(ceph: S3Server, change: dict[str, str], message: str) -> None:
    bucket = ceph.new_bucket()
    store = open_object_store(ceph.options(bucket, **change), "run")
    started = time.monotonic()
    with pytest.raises(StoreError, match=message) as caught:
        store.check_reachable()
    assert time.monotonic() - started < 8
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_silent_endpoint_is_given_up_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = S3Server(f"http://127.0.0.1:{silent.getsockname()[1]}").options("bucket")
        store = open_object_store(options, "run")
        started = time.monotonic()
        with pytest.raises(StoreError, match="endpoint unreachable"):
            store.check_reachable()
    assert time.monotonic() - started < 8


def test_wrong_credentials_are_named_by_every_operation(ceph: S3Server) -> None:
    store = open_object_store(ceph.options(ceph.new_bucket(), secret_key="wrong"), "run")
    with pytest.raises(StoreError, match="wrong credentials"), store.open_writer("x"):
        pass
    with pytest.raises(StoreError, match="wrong credentials"):
        store.create("x", b"")
    with pytest.raises(StoreError, match="wrong credentials"):
        store.read("x")
    with pytest.raises(StoreError, match="access denied"):
        store.open_reader("x")


def test_missing_bucket_is_named(server: S3Server) -> None:
    store = open_object_store(server.options("no-such-bucket"), "run")
    for act in (
        store.check_reachable,
        lambda: store.create("x", b""),
        lambda: store.put("x", b""),
        lambda: store.list(""),
    ):
        with pytest.raises(StoreError, match="bucket does not exist"):
            act()
    with pytest.raises(StoreError, match="bucket does not exist"), store.open_writer("x"):
        pass


def test_bucket_that_vanishes_mid_upload_is_an_error(moto: S3Server) -> None:
    bucket = moto.new_bucket()
    store = open_object_store(moto.options(bucket), "run")
    with pytest.raises(StoreError), store.open_writer("x") as stream:
        stream.write(b"x" * MIB)
        moto.client().call_s3("delete_bucket", Bucket=bucket)


def test_user_checksum_setting_is_kept(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    monkeypatch.delenv("AWS_RESPONSE_CHECKSUM_VALIDATION", raising=False)
    open_object_store(moto.options("bucket"), "run")
    assert os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] == "when_supported"
    assert os.environ["AWS_RESPONSE_CHECKSUM_VALIDATION"] == "when_required"


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://", "http://host/x"])
def test_unsupported_url_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match=r"storage\.url: expected a folder or s3://"):
        open_object_store(StorageOptions(url=url), "run")


@pytest.mark.parametrize("endpoint", ["10.0.0.5:7480", "http://user:pw@host", "http://host/path", "ftp://host"])
def test_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(SpecError, match=r"storage\.s3\.endpoint: expected http") as caught:
        open_object_store(StorageOptions(url="s3://b/x", s3=S3Options(endpoint=endpoint)), "run")
    assert "pw" not in str(caught.value)


def test_local_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    relative = open_object_store(StorageOptions(url="runs"), "r")
    monkeypatch.chdir("/")
    relative.put("a", b"1")
    assert (tmp_path / "runs/r/a").read_bytes() == b"1"
    assert relative.url == str(tmp_path / "runs/r")
    assert open_object_store(StorageOptions(url="~/x"), "r").url == str(tmp_path / "home/x/r")
    assert open_object_store(StorageOptions(url=f"file://{tmp_path}/y"), "r").url == str(tmp_path / "y/r")


def test_leftover_temporary_files_are_never_seen(tmp_path: Path) -> None:
    store = open_object_store(StorageOptions(url=str(tmp_path)), "r")
    folder = tmp_path / "r" / TEMPORARY
    folder.mkdir(parents=True)
    (folder / "0123").write_bytes(b"half")
    store.put("a", b"1")
    store.create("b", b"2")
    assert [info.key for info in store.list("")] == ["a", "b"]
    store.delete(["a", "b"])
    assert (folder / "0123").exists()
    with pytest.raises(StoreError, match="reserved"):
        store.read(f"{TEMPORARY}/0123")


def test_local_store_that_is_a_file_or_has_no_space_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = open_object_store(StorageOptions(url=str(tmp_path / "file")), "r")
    with pytest.raises(StoreError, match="is a file, expected a folder"):
        store.check_reachable()
    with pytest.raises(StoreError, match="is a file, not a folder"):
        store.put("a", b"1")
