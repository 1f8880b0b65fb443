"""Stores that the contract suite runs over."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from storage.object_store import ObjectStore, open_object_store
from storage.options import StorageOptions
from tests.helpers.memory_store import MemoryStore
from tests.helpers.s3_server import S3Server, ceph_installed, ceph_server, moto_server


class Place(NamedTuple):
    """Where a contract test may open stores of one run, and what is behind: a folder, an S3 server, or memory."""

    options: StorageOptions | None
    server: S3Server | None = None
    memory: tuple[dict[str, bytes], dict[str, str]] = ({}, {})

    def open(self) -> ObjectStore:
        """The run as another process sees it."""
        return open_object_store(self.options, "run") if self.options is not None else MemoryStore(*self.memory)


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if not ceph_installed():
        pytest.skip("radosgw is not installed: apt-get install ceph-mon ceph-osd radosgw ceph-common")
    with ceph_server(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture(params=["moto", "ceph"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["memory", "local", "moto", "ceph"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    if request.param == "memory":
        return Place(None, memory=({}, {}))
    if request.param == "local":
        return Place(StorageOptions(url=str(tmp_path_factory.mktemp("store") / "runs")))
    found: S3Server = request.getfixturevalue(request.param)
    return Place(found.options(found.new_bucket()), found)


@pytest.fixture
def store(place: Place) -> ObjectStore:
    return place.open()
