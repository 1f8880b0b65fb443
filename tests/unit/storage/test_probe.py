"""Start-up checks of stores that are broken in one way each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from storage.errors import StoreError
from storage.local_store import LocalStore
from storage.probe import check_token, probe_store, write_token
from storage.store_common import ObjectInfo


class IgnoresExclusiveCreation(LocalStore):
    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


class ForgetsToList(LocalStore):
    def list(self, prefix: str) -> list[ObjectInfo]:
        return []


class KeepsDeleted(LocalStore):
    def delete(self, keys: Sequence[str]) -> None:
        pass


class ReadsOther(LocalStore):
    def read(self, key: str) -> bytes:
        return b"other"


class PublishesTornUploads(LocalStore):
    @contextmanager
    def open_writer(self, key: str) -> Iterator[pa.NativeFile]:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with pa.OSFile(str(path), "wb") as stream:
            yield stream


def test_good_store_passes_and_is_left_empty(tmp_path: Path) -> None:
    probe_store(LocalStore(tmp_path / "runs" / "r"), allow_unsafe_create=False)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_were_there_stay(tmp_path: Path) -> None:
    (tmp_path / "runs" / "r").mkdir(parents=True)
    probe_store(LocalStore(tmp_path / "runs" / "r"), allow_unsafe_create=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["runs", "r"]


def test_store_that_ignores_exclusive_creation_needs_the_users_consent(tmp_path: Path) -> None:
    store = IgnoresExclusiveCreation(tmp_path)
    with pytest.raises(StoreError, match=r"ignores exclusive creation.*storage\.allow_unsafe_create"):
        probe_store(store, allow_unsafe_create=False)
    assert store.list("") == []
    probe_store(store, allow_unsafe_create=True)
    assert store.list("") == []


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (ForgetsToList, "not listed"),
        (KeepsDeleted, "still there"),
        (ReadsOther, "cannot be trusted"),
        (PublishesTornUploads, "aborted upload became visible"),
    ],
)
def test_broken_store_is_refused(tmp_path: Path, broken: type[LocalStore], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        probe_store(broken(tmp_path), allow_unsafe_create=False)
    if broken is not KeepsDeleted:
        assert LocalStore(tmp_path).list("") == []


def test_token_is_seen_in_the_same_store_only(tmp_path: Path) -> None:
    token = write_token(LocalStore(tmp_path / "a"))
    check_token(LocalStore(tmp_path / "a"), token)
    with pytest.raises(StoreError, match=r"this node does not see.*storage\.url"):
        check_token(LocalStore(tmp_path / "b"), token)
