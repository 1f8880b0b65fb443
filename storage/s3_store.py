"""Objects in S3 or an S3-compatible server: bulk bytes through Arrow, everything else through s3fs.

Measured against a Ceph gateway: Arrow's native filesystem writes about twice and reads several times as fast as s3fs.
"""

import functools
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import s3fs
from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

from storage.errors import ObjectExistsError, SpecError, StoreError
from storage.options import S3Options
from storage.store_common import (
    LIBRARY_ERRORS,
    ObjectInfo,
    Unfinished,
    checked_key,
    checked_prefix,
    error_code,
    store_error,
    translated,
)

_LOG = logging.getLogger(__name__)

_ATTEMPTS = 5
_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 20
_REACH_TIMEOUT_S = 3
_PAGE = 1000  # what one listing gives and one DeleteObjects request takes at most
_CONFLICT_RETRIES = 6
_DEFAULT_REGION = "us-east-1"

_REFUSED = frozenset(("preconditionfailed", "412"))
_CONFLICT = frozenset(("conditionalrequestconflict", "operationaborted", "409"))
_GONE = frozenset(("nosuchkey", "nosuchupload", "404"))


class S3Store:
    """Object store in one bucket, below a prefix."""

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        """Connect lazily to `s3://<bucket>/<prefix>`; `prefix` has no `/` at its ends and may be empty."""
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self._options = options
        _prepare_endpoint(options)
        self.url = f"s3://{bucket}/{prefix}"
        self._small = _s3fs(options, attempts=_ATTEMPTS, connect_s=_CONNECT_TIMEOUT_S, read_s=_READ_TIMEOUT_S)
        self._bulk = arrow_filesystem(options)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def check_reachable(self) -> None:
        """Raise `StoreError` within a few seconds if the bucket is missing, denied or unreachable."""
        once = _s3fs(self._options, attempts=1, connect_s=_REACH_TIMEOUT_S, read_s=_REACH_TIMEOUT_S)
        with translated("use", self.url):
            once.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._root, MaxKeys=1)

    @contextmanager
    def open_writer(self, key: str) -> Iterator[pa.NativeFile]:
        """See `ObjectStore.open_writer`."""
        where = self._where(key)
        with translated("write", where):
            stream = self._bulk.open_output_stream(self._path(key))
        try:
            yield stream
            written = stream.tell()
            stream.close()
            if (stored := self.size(key)) != written:
                raise StoreError(f"cannot write {where}: expected {written} bytes stored, got {stored}")
        except BaseException as error:
            self._abandon(key, stream)
            if isinstance(error, LIBRARY_ERRORS):
                raise store_error(error, "write", where) from error
            raise

    def open_reader(self, key: str) -> pa.NativeFile:
        """See `ObjectStore.open_reader`."""
        with translated("read", self._where(key)):
            return self._bulk.open_input_file(self._path(key))

    def read(self, key: str) -> bytes:
        """See `ObjectStore.read`."""
        with translated("read", self._where(key)):
            data: bytes = self._small.cat_file(self._path(key))
            return data

    def size(self, key: str) -> int:
        """See `ObjectStore.size`."""
        with translated("read", self._where(key)):
            return int(self._call("head_object", Key=self._root + checked_key(key))["ContentLength"])

    def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put`."""
        with translated("write", self._where(key)):
            self._call("put_object", Key=self._root + checked_key(key), Body=data)

    def create(self, key: str, data: bytes) -> None:
        """See `ObjectStore.create`.

        When the reply to a won creation is lost, the retry is refused, and this raises `ObjectExistsError` too:
        who needs to know reads the object back and looks for its own nonce.
        """
        where = self._where(key)
        for attempt in range(_CONFLICT_RETRIES):
            try:
                self._call("put_object", Key=self._root + checked_key(key), Body=data, IfNoneMatch="*")
                return
            except LIBRARY_ERRORS as error:
                # s3fs raises FileExistsError or EINVAL by server: only the code is the same everywhere.
                code = error_code(error)
                if code in _REFUSED:
                    raise ObjectExistsError(f"cannot create {where}: it already exists") from error
                if code not in _CONFLICT or attempt == _CONFLICT_RETRIES - 1:
                    raise store_error(error, "create", where) from error
            time.sleep(random.uniform(0, 0.1 * 2**attempt))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `ObjectStore.list`."""
        found: list[ObjectInfo] = []
        request: dict[str, Any] = {"Prefix": self._root + checked_prefix(prefix), "MaxKeys": _PAGE}
        with translated("list", f"{self.url}/{prefix}"):
            while True:
                page = self._call("list_objects_v2", **request)
                found += [
                    ObjectInfo(item["Key"].removeprefix(self._root), int(item["Size"]))
                    for item in page.get("Contents", ())
                ]
                if not page.get("IsTruncated"):
                    return sorted(found)
                request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        for first in range(0, len(keys), _PAGE):
            objects = [{"Key": self._root + checked_key(key)} for key in keys[first : first + _PAGE]]
            with translated("delete", self.url):
                reply = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for failure in reply.get("Errors", ()):
                if failure.get("Code") != "NoSuchKey":
                    raise StoreError(f"cannot delete {failure.get('Key')} in {self.url}: {failure.get('Code')}")

    def unfinished(self) -> Sequence[Unfinished]:
        """See `ObjectStore.unfinished`."""
        with translated("list the uploads of", self.url):
            found = [
                (upload["Key"].removeprefix(self._root), upload["UploadId"]) for upload in self._uploads(self._root)
            ]
        return sorted(Unfinished(*upload) for upload in found)

    def abort(self, unfinished: Sequence[Unfinished]) -> None:
        """See `ObjectStore.abort`."""
        for key, upload in unfinished:
            with translated("abort the upload of", self._where(key)):
                self._abort_upload(self._root + key, upload)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        reply: dict[str, Any] = self._small.call_s3(method, Bucket=self._bucket, **arguments)
        return reply

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{self._root}{checked_key(key)}"

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _abandon(self, key: str, stream: pa.NativeFile) -> None:
        """Make sure that nothing appears under `key`, and leave no parts behind.

        An Arrow stream has no abort, and closing or dropping it completes its multipart upload. So the upload is
        aborted behind its back: closing then fails, on every server, because there is nothing left to complete.
        """
        try:
            self._abort_uploads(key)
        except LIBRARY_ERRORS as error:
            _LOG.warning("%s", store_error(error, "abort the upload of", self._where(key)))
        try:
            stream.close()
        except OSError:
            return  # the expected end: no such upload
        try:  # it was complete before it could be aborted
            self.delete([key])
        except StoreError as error:
            _LOG.warning("%s; it is not named by any manifest", error)

    def _abort_uploads(self, key: str) -> None:
        name = self._root + checked_key(key)
        for upload in [upload["UploadId"] for upload in self._uploads(name) if upload["Key"] == name]:
            self._abort_upload(name, upload)

    def _uploads(self, prefix: str) -> Iterator[dict[str, Any]]:
        markers: dict[str, str] = {}
        while True:
            page = self._call("list_multipart_uploads", Prefix=prefix, MaxUploads=_PAGE, **markers)
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _abort_upload(self, name: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", Key=name, UploadId=upload)
        except LIBRARY_ERRORS as error:
            if error_code(error) not in _GONE:
                raise


@functools.cache
def _s3fs(options: S3Options, attempts: int, connect_s: float, read_s: float) -> s3fs.S3FileSystem:
    """A client; the stores of a process share it, because making one takes 0.3 s of CPU. Thread-safe."""
    config: dict[str, Any] = {
        "connect_timeout": connect_s,
        "read_timeout": read_s,
        "retries": {"mode": "standard", "total_max_attempts": attempts},  # exponential, with jitter
    }
    if options.endpoint is not None:
        config["s3"] = {"addressing_style": "path"}
    filesystem = s3fs.S3FileSystem(
        **s3fs_arguments(options), config_kwargs=config, use_listings_cache=False, skip_instance_cache=True
    )
    filesystem.retries = min(2, attempts)  # botocore retries requests; this is for replies that break off
    return filesystem


def s3fs_arguments(options: S3Options) -> dict[str, Any]:
    """What s3fs, or who calls it, needs to know of an account and its server."""
    region = _region(options)
    return {
        "key": options.access_key.get_secret_value() if options.access_key else None,
        "secret": options.secret_key.get_secret_value() if options.secret_key else None,
        "endpoint_url": options.endpoint,
        "client_kwargs": {"region_name": region} if region else {},
    }


def _region(options: S3Options) -> str | None:
    return options.region or (_DEFAULT_REGION if options.endpoint else None)


def arrow_filesystem(options: S3Options) -> S3FileSystem:
    """Arrow's filesystem, which retries for a bounded time."""
    endpoint = urlsplit(options.endpoint) if options.endpoint else None
    return S3FileSystem(
        access_key=options.access_key.get_secret_value() if options.access_key else None,
        secret_key=options.secret_key.get_secret_value() if options.secret_key else None,
        region=_region(options),
        endpoint_override=endpoint.netloc if endpoint else None,
        scheme=endpoint.scheme if endpoint else "https",
        connect_timeout=_CONNECT_TIMEOUT_S,
        request_timeout=_READ_TIMEOUT_S,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    )


def _prepare_endpoint(options: S3Options) -> None:
    """Check `options.endpoint`, and fit this process to S3-compatible servers if there is one.

    The AWS SDKs add checksum trailers that such servers refuse (seen: UploadPart gets 411). Arrow can be told only
    through the environment; what the user has set there stays.
    """
    if options.endpoint is None:
        return
    parts = urlsplit(options.endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.path.strip("/"):
        raise SpecError(
            "storage.s3.endpoint: expected http(s)://host[:port] without path or credentials, "
            f"got {parts.scheme}://{parts.hostname}{parts.path}; correct it"
        )
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    os.environ.setdefault("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
