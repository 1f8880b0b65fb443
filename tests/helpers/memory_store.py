"""An object store in memory: for tests that need a store and no disk. The product has no use for one."""

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from storage.errors import ObjectExistsError, ObjectNotFoundError
from storage.store_common import ObjectInfo, Unfinished, checked_key, checked_prefix, translated


class MemoryStore:
    """See `storage.object_store.ObjectStore`; those who share `objects` see the same run."""

    url = "memory"

    def __init__(self, objects: dict[str, bytes] | None = None, begun: dict[str, str] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.begun = {} if begun is None else begun
        """Key of each unfinished upload, by its token."""
        self._lock = threading.Lock()

    def check_reachable(self) -> None:
        """It always is."""

    @contextmanager
    def open_writer(self, key: str) -> Iterator[pa.NativeFile]:
        """See `ObjectStore.open_writer`."""
        stream, token = pa.BufferOutputStream(), uuid.uuid4().hex
        self.begun[token] = checked_key(key)
        try:
            with translated("write", key):
                yield stream
            with self._lock:
                if token not in self.begun:
                    raise ObjectNotFoundError(f"cannot write {key}: its upload was aborted")
                self.objects[key] = stream.getvalue().to_pybytes()
        finally:
            self.begun.pop(token, None)

    def open_reader(self, key: str) -> pa.NativeFile:
        """See `ObjectStore.open_reader`."""
        return pa.BufferReader(self.read(key))

    def read(self, key: str) -> bytes:
        """See `ObjectStore.read`."""
        try:
            return self.objects[checked_key(key)]
        except KeyError:
            raise ObjectNotFoundError(f"cannot read {key}: no such object") from None

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        return len(self.read(key))

    def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put`."""
        self.objects[checked_key(key)] = bytes(data)

    def create(self, key: str, data: bytes) -> None:
        """See `ObjectStore.create`."""
        with self._lock:
            if checked_key(key) in self.objects:
                raise ObjectExistsError(f"cannot create {key}: it already exists")
            self.objects[key] = bytes(data)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `ObjectStore.list`."""
        checked_prefix(prefix)
        with self._lock:
            stored = sorted(self.objects.items())
        return [ObjectInfo(key, len(data)) for key, data in stored if key.startswith(prefix)]

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        with self._lock:
            for key in keys:
                self.objects.pop(checked_key(key), None)

    def unfinished(self) -> Sequence[Unfinished]:
        """See `ObjectStore.unfinished`."""
        return sorted(Unfinished(key, token) for token, key in self.begun.items())

    def abort(self, unfinished: Sequence[Unfinished]) -> None:
        """See `ObjectStore.abort`."""
        for begun in unfinished:
            self.begun.pop(begun.token, None)
