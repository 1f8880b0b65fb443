"""What every object store shares: the key rule, and errors that say what is wrong and what to do."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from aiohttp import ClientError
from botocore.exceptions import (
    BotoCoreError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from storage.errors import ObjectNotFoundError, StoreError

_BAD_PARTS = frozenset(("", ".", ".."))
_ARROW_CODE = re.compile(r"AWS Error (\w+)")
_HTTP_STATUS = re.compile(r"HTTP status (\d+)")

_NO_BUCKET = "bucket does not exist: create it, or correct storage.url"
_DENIED = "access denied: these credentials need permission to list, read, write and delete here"
_WRONG_KEYS = "wrong credentials: check storage.s3.access_key and secret_key, or the AWS environment"
_DENIED_OR_KEYS = "access denied, or wrong credentials: check storage.s3 and what its keys are permitted to do"
_NO_KEYS = "no credentials found: set storage.s3.access_key and secret_key, or the AWS environment"
_UNREACHABLE = "endpoint unreachable: check storage.s3.endpoint and the network"
_WRONG_REGION = "bucket is in another region: set storage.s3.region"
_BUSY = "store is overloaded and stayed so over all retries: lower checkpoint.write_budget or try later"
_BROKEN = "store failed inside, and again over all retries: look at its own logs, or try later"
_FULL = "no space left: free space or raise the quota"
_OS_DENIED = "access denied: this user needs permission to list, read, write and delete here"

# Spelled as S3 does (NoSuchBucket), as Arrow does (NO_SUCH_BUCKET), or as a bare HTTP status, without `_` and case.
_REASONS = {
    "nosuchbucket": _NO_BUCKET,
    "accessdenied": _DENIED,
    "allaccessdisabled": _DENIED,
    "403": _DENIED_OR_KEYS,
    "404": "endpoint knows no such bucket, or is no S3 server: check storage.url and storage.s3.endpoint",
    "invalidaccesskeyid": _WRONG_KEYS,
    "signaturedoesnotmatch": _WRONG_KEYS,
    "invalidsignature": _WRONG_KEYS,
    "unrecognizedclient": _WRONG_KEYS,
    "invalidclienttokenid": _WRONG_KEYS,
    "invalidtoken": _WRONG_KEYS,
    "expiredtoken": _WRONG_KEYS,
    "missingauthenticationtoken": _NO_KEYS,
    "networkconnection": _UNREACHABLE,
    "permanentredirect": _WRONG_REGION,
    "authorizationheadermalformed": _WRONG_REGION,
    "301": _WRONG_REGION,
    "slowdown": _BUSY,
    "throttling": _BUSY,
    "serviceunavailable": _BUSY,
    "503": _BUSY,
    "internalerror": _BROKEN,
    "internalfailure": _BROKEN,
    "500": _BROKEN,
    "quotaexceeded": _FULL,
    "xminiostoragefull": _FULL,
    "507": _FULL,
}
_ERRNO_REASONS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _OS_DENIED,
    errno.EPERM: _OS_DENIED,
    errno.EROFS: "file system is read-only: mount it writable, or correct storage.url",
    errno.ENOTDIR: "a part of the path is a file, not a folder: correct storage.url",
}

# Everything a store library raises when the store fails.
LIBRARY_ERRORS = (OSError, BotoCoreError, ClientError)


class ObjectInfo(NamedTuple):
    """One stored object."""

    key: str
    bytes: int


class Unfinished(NamedTuple):
    """Something that was begun under `key` and is not an object yet; `token` is the store's own name of it."""

    key: str
    token: str


def checked_key(key: str) -> str:
    """Return `key` if it is relative and stays below the run's root.

    Keys also come out of stored manifests, so they are not trusted.

    Raises:
        StoreError: it is empty, absolute, or has an empty, `.` or `..` part.
    """
    if not _BAD_PARTS.isdisjoint(key.split("/")) or "\0" in key:
        raise StoreError(f"key {key!r} is not a relative path of plain names; the catalog that names it is damaged")
    return key


def checked_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty, or a `checked_key` that ends in `/`."""
    if prefix:
        if not prefix.endswith("/"):
            raise StoreError(f"prefix {prefix!r} must be empty or end in '/'")
        checked_key(prefix[:-1])
    return prefix


def error_code(error: BaseException) -> str:
    """The store's own name of what went wrong, lower case without `_`; empty if it gave none."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
    else:
        named, status = _ARROW_CODE.search(str(error)), _HTTP_STATUS.search(str(error))
        code = status.group(1) if status else named.group(1) if named else ""
    return code.replace("_", "").lower()


def store_error(error: BaseException, what: str, where: str) -> StoreError:
    """Turn a library's `error` into one line: what was tried, where, why not, what to do.

    Server messages are left out where the code is known: they repeat access keys and signatures.
    """
    code = error_code(error)
    if isinstance(error, FileNotFoundError) and what == "read" and code != "nosuchbucket":
        return ObjectNotFoundError(f"cannot {what} {where}: no such object")
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        reason = _NO_KEYS
    elif isinstance(error, (ConnectionError, HTTPClientError, ClientError)):
        reason = _UNREACHABLE
    else:
        number = error.errno if isinstance(error, OSError) else None
        first_line = (str(error).splitlines() or [""])[0][:200]
        reason = _REASONS.get(code) or (not code and _ERRNO_REASONS.get(number or 0)) or code or first_line
    return StoreError(f"cannot {what} {where}: {reason or type(error).__name__}")


@contextmanager
def translated(what: str, where: str) -> Iterator[None]:
    """Raise `StoreError` in place of the errors of the store's library."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        raise store_error(error, what, where) from error
