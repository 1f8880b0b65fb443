"""Stores to measure on: a folder on the local disk, and buckets of an S3 server, behind a slow link or not."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.slow_link import can_be_slow, slow_link
from storage.options import StorageOptions
from tests.helpers.s3_server import ceph_installed, ceph_server


@contextmanager
def local_folder() -> Iterator[StorageOptions]:
    """A folder on the disk of the temporary files."""
    with tempfile.TemporaryDirectory(prefix="layercheck-bench-") as folder:
        yield StorageOptions(url=folder)


@contextmanager
def slow_buckets(bytes_per_s: float) -> Iterator[Callable[[], AbstractContextManager[StorageOptions]] | None]:
    """Makes buckets of one Ceph gateway on this machine, all in memory, each behind a slow link while it is used.

    None where Ceph is not installed or the link cannot be slowed down.
    """
    if not ceph_installed() or not can_be_slow():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="layercheck-ceph-") as folder, ceph_server(Path(folder)) as server:
        port = urlsplit(server.endpoint).port
        if port is None:
            raise RuntimeError(f"expected an endpoint with a port, got {server.endpoint}")

        @contextmanager
        def bucket() -> Iterator[StorageOptions]:
            with slow_link(port, bytes_per_s):
                yield server.options(server.new_bucket())

        yield bucket


@contextmanager
def fast_bucket() -> Iterator[StorageOptions | None]:
    """A bucket of such a gateway without a slow link; None where Ceph is not installed."""
    if not ceph_installed():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="layercheck-ceph-") as folder, ceph_server(Path(folder)) as server:
        yield server.options(server.new_bucket())


def drop_cached(folder: Path) -> None:
    """Take the files below `folder` out of the page cache, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
