"""Objects as files below one folder of a local or shared file system."""

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

import pyarrow as pa

from storage.errors import ObjectExistsError, StoreError
from storage.store_common import ObjectInfo, Unfinished, checked_key, checked_prefix, translated

TEMPORARY = ".tmp"
"""Folder below the root for files that are not objects yet. Each is named by the key it is written for."""

_UNIQUE = "~"
"""Between the quoted key and what tells two writers of it apart; a quoted key has none."""

_PRUNE_RACES = 50


class LocalStore:
    """Object store on a file system. A file appears under its key whole and synced, or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root.expanduser()))
        self.url = str(self._root)
        self._made: set[Path] = set()
        """The root and folders above it that this store has made."""

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def check_reachable(self) -> None:
        """Raise `StoreError` unless the nearest existing folder at or above the root can be read."""
        folder = self._root
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise StoreError(f"cannot use {self.url}: {folder} is a file, expected a folder; correct storage.url")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise StoreError(f"cannot use {self.url}: {folder} is not readable by this user; correct storage.url")

    @contextmanager
    def open_writer(self, key: str) -> Iterator[pa.NativeFile]:
        """See `ObjectStore.open_writer`."""
        path = self._path(key)
        with translated("write", str(path)), self._temporary(key) as temporary:
            with pa.OSFile(str(temporary), "wb") as stream:
                yield stream
                written = stream.tell()
            _sync(temporary)
            if (stored := temporary.stat().st_size) != written:
                raise StoreError(f"cannot write {path}: expected {written} bytes on disk, got {stored}")
            self._publish(os.replace, temporary, path)

    def open_reader(self, key: str) -> pa.NativeFile:
        """See `ObjectStore.open_reader`."""
        path = self._path(key)
        with translated("read", str(path)):
            return pa.OSFile(str(path), "rb")

    def read(self, key: str) -> bytes:
        """See `ObjectStore.read`."""
        path = self._path(key)
        with translated("read", str(path)):
            return path.read_bytes()

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        path = self._path(key)
        with translated("read", str(path)):
            return path.stat().st_size

    def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put`."""
        with self.open_writer(key) as stream:
            stream.write(data)

    def create(self, key: str, data: bytes) -> None:
        """See `ObjectStore.create`."""
        path = self._path(key)
        with translated("create", str(path)), self._temporary(key) as temporary:
            temporary.write_bytes(data)
            _sync(temporary)
            try:
                # Unlike a rename, a link never replaces, and unlike O_EXCL it shows nothing half-written.
                self._publish(os.link, temporary, path)
            except FileExistsError as error:
                raise ObjectExistsError(f"cannot create {path}: it already exists") from error

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `ObjectStore.list`."""
        top = self._root / checked_prefix(prefix)
        with translated("list", str(top)):
            return sorted(self._walk(top))

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`. Folders left empty go too, and the root if this store made it."""
        folders: set[Path] = set()
        for key in keys:
            path = self._path(key)
            with translated("delete", str(path)):
                path.unlink(missing_ok=True)
            folders.update(parent for parent in path.parents if parent.is_relative_to(self._root))
        folders.discard(self._root)
        for folder in sorted(folders | {self._root / TEMPORARY} | self._made, key=lambda path: -len(path.parts)):
            with suppress(OSError):
                folder.rmdir()

    def unfinished(self) -> Sequence[Unfinished]:
        """See `ObjectStore.unfinished`."""
        folder = self._root / TEMPORARY
        with translated("list", str(folder)):
            names = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
        return sorted(Unfinished(unquote(name.rpartition(_UNIQUE)[0]), name) for name in names)

    def abort(self, unfinished: Sequence[Unfinished]) -> None:
        """See `ObjectStore.abort`."""
        for _, name in unfinished:
            path = self._root / TEMPORARY / name
            with translated("delete", str(path)):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # it holds the files of others, or was never made
            (self._root / TEMPORARY).rmdir()

    def _path(self, key: str) -> Path:
        if checked_key(key).split("/")[0] == TEMPORARY:
            raise StoreError(f"key {key!r} is reserved for temporary files")
        return self._root / key

    def _walk(self, folder: Path) -> Iterator[ObjectInfo]:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            path = Path(entry.path)
            if path == self._root / TEMPORARY:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(path)
            else:
                with suppress(FileNotFoundError):  # deleted since the scan
                    yield ObjectInfo(path.relative_to(self._root).as_posix(), entry.stat().st_size)

    @contextmanager
    def _temporary(self, key: str) -> Iterator[Path]:
        """An empty file in the root's file system, gone after the block."""
        path = self._root / TEMPORARY / f"{quote(key, safe='').replace(_UNIQUE, '%7E')}{_UNIQUE}{uuid.uuid4().hex}"
        self._in_folder(path, path.touch)
        try:
            yield path
        finally:
            with suppress(FileNotFoundError):
                path.unlink()

    def _publish(self, move: Callable[[Path, Path], None], temporary: Path, path: Path) -> None:
        self._in_folder(path, lambda: move(temporary, path))
        _sync(path.parent)

    def _in_folder(self, path: Path, action: Callable[[], None]) -> None:
        """Run `action`, which puts `path` into its folder, making the folder whenever a concurrent delete prunes it."""
        for _ in range(_PRUNE_RACES):
            try:
                self._make_folder(path.parent)
                return action()
            except FileNotFoundError as error:
                lost = error
        raise lost

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        with suppress(FileExistsError):  # made meanwhile; if it is a file, using it as a folder says so
            folder.mkdir()
        _sync(folder.parent)
        if self._root.is_relative_to(folder):
            self._made.add(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
