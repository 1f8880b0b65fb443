"""Stores to measure on: a folder on the local disk, and an S3 server, with the filesystem's own reads beside them."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.options import StorageOptions
from tests.helpers.s3_server import ceph_installed, ceph_server


@contextmanager
def local_folder() -> Iterator[StorageOptions]:
    """A folder on the disk of the temporary files."""
    with tempfile.TemporaryDirectory(prefix="layercheck-bench-") as folder:
        yield StorageOptions(url=folder)


@contextmanager
def s3_bucket() -> Iterator[StorageOptions | None]:
    """A bucket of a Ceph gateway on this machine, all in memory; None where Ceph is not installed."""
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
