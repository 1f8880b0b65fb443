"""Object stores: local disk, and S3 or S3-compatible. Keys are relative to the run's root and use `/`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import pyarrow as pa

from storage.errors import SpecError
from storage.local_store import LocalStore
from storage.options import StorageOptions
from storage.s3_store import S3Store
from storage.store_common import ObjectInfo, Unfinished, checked_key

__all__ = ["ObjectInfo", "ObjectStore", "Unfinished", "open_object_store"]


class ObjectStore(Protocol):
    """What the catalog, the writers and the readers need of a store. Thread-safe; every call blocks.

    Every method raises `StoreError` (or one of its subclasses) when the store fails; transient failures have been
    retried for a bounded time before that.
    """

    url: str

    def check_reachable(self) -> None:
        """Raise `StoreError` within a few seconds if the store cannot be reached or used at all. Writes nothing."""
        ...

    def open_writer(self, key: str) -> AbstractContextManager[pa.NativeFile]:
        """Stream a new object. It becomes visible, durably, only when the block ends without an exception."""
        ...

    def open_reader(self, key: str) -> pa.NativeFile:
        """Open for random access; raises `ObjectNotFoundError`."""
        ...

    def read(self, key: str) -> bytes:
        """Whole content of a small object; raises `ObjectNotFoundError`."""
        ...

    def size(self, key: str) -> int:
        """Size in bytes; raises `ObjectNotFoundError`."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write or replace a small object, atomically and durably."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Write a small object that must not exist yet, atomically and durably; raises `ObjectExistsError`."""
        ...

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose key starts with `prefix` (a folder ending in `/`, or empty), sorted by key."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is already gone is not an error."""
        ...

    def unfinished(self) -> Sequence[Unfinished]:
        """What was begun and is neither an object yet nor given up, sorted: by writers that live, or that died.

        On S3 multipart uploads, on a disk temporary files; `list` shows neither.
        """
        ...

    def abort(self, unfinished: Sequence[Unfinished]) -> None:
        """Give up what `unfinished` found; its writer, if it lives, fails. One already gone is not an error."""
        ...


def open_object_store(options: StorageOptions, run: str) -> ObjectStore:
    """Open the store of `<options.url>/<run>`. Checks nothing yet: see `storage.probe`.

    Raises:
        SpecError: `options.url` is of a kind that is not supported, or the endpoint is no URL.
    """
    checked_key(run)
    scheme, separator, rest = options.url.partition("://")
    if not separator:
        return LocalStore(Path(options.url) / run)
    if scheme == "file" and rest.startswith("/"):
        return LocalStore(Path(rest) / run)
    bucket = urlsplit(options.url).netloc
    if scheme != "s3" or not bucket:
        raise SpecError(f"storage.url: expected a folder or s3://bucket/prefix, got {options.url!r}; correct it")
    prefix = "/".join(part for part in (rest.removeprefix(bucket).strip("/"), run) if part)
    return S3Store(bucket, checked_key(prefix), options.s3)
