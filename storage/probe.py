"""Start-up checks of an object store: it can do all that the protocol needs, and every node sees the same one."""

import uuid
from contextlib import suppress

from storage import keys
from storage.errors import ObjectExistsError, ObjectNotFoundError, StoreError
from storage.object_store import ObjectStore


class _AbortedOnPurposeError(Exception):
    """Raised inside an upload that must then not appear."""


def probe_store(store: ObjectStore, allow_unsafe_create: bool) -> None:
    """Try everything on `store` once, leaving nothing behind.

    Raises:
        StoreError: what the store cannot do, and what to do about it.
    """
    store.check_reachable()
    token = uuid.uuid4().hex
    created, streamed = keys.probe(f"{token}.created"), keys.probe(f"{token}.streamed")
    try:
        _try_create(store, created, allow_unsafe_create)
        _try_stream(store, streamed)
        listed = {info.key for info in store.list(keys.PROBES)}
        if created not in listed or streamed not in listed:
            raise StoreError(f"{store.url}: objects just written are not listed; use a store with consistent listing")
    except BaseException:
        with suppress(StoreError):  # the first error is the one to report
            store.delete([created, streamed])
        raise
    store.delete([created, streamed])
    if any(info.key in (created, streamed) for info in store.list(keys.PROBES)):
        raise StoreError(f"{store.url}: deleted objects are still there; allow deletion for these credentials")


def _try_create(store: ObjectStore, key: str, allow_unsafe_create: bool) -> None:
    with suppress(ObjectExistsError):  # the reply was lost, and the retry met its own object: nobody else has this key
        store.create(key, b"first")
    _expect(store, key, store.read(key), b"first")
    try:
        store.create(key, b"second")
    except ObjectExistsError:
        _expect(store, key, store.read(key), b"first")
        return
    if not allow_unsafe_create:
        raise StoreError(
            f"{store.url}: the store ignores exclusive creation, so two drivers could destroy one run; use a store "
            "that honours If-None-Match, or accept the risk with storage.allow_unsafe_create: true"
        )


def _try_stream(store: ObjectStore, key: str) -> None:
    with suppress(_AbortedOnPurposeError), store.open_writer(key) as stream:
        stream.write(b"torn")
        raise _AbortedOnPurposeError
    with suppress(ObjectNotFoundError):
        store.size(key)
        raise StoreError(f"{store.url}: an aborted upload became visible; allow listing and aborting multipart uploads")
    with store.open_writer(key) as stream:
        stream.write(b"whole")
    with store.open_reader(key) as reader:
        _expect(store, key, reader.read(), b"whole")


def _expect(store: ObjectStore, key: str, got: bytes, expected: bytes) -> None:
    if got != expected:
        raise StoreError(f"{store.url}: wrote {expected!r} to {key} and read {got!r}; the store cannot be trusted")


def write_token(store: ObjectStore) -> str:
    """Store a token that every node then looks for with `check_token`; delete `keys.probe(token)` after that."""
    token = uuid.uuid4().hex
    store.put(keys.probe(token), token.encode())
    return token


def check_token(store: ObjectStore, token: str) -> None:
    """Raise `StoreError` unless `store` holds what `write_token` wrote, seen from this node."""
    try:
        found = store.read(keys.probe(token))
    except ObjectNotFoundError as error:
        raise StoreError(
            f"{store.url}: this node does not see what the checkpoint actor stored there, so the path is another "
            "folder here; set storage.url to s3://... or to a folder that all nodes share"
        ) from error
    _expect(store, keys.probe(token), found, token.encode())
