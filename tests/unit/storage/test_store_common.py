"""Errors of store libraries become one line that says what to do."""

import errno

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError

from storage.errors import ObjectNotFoundError, StoreError
from storage.store_common import store_error, translated


def test_full_disk_is_said_to_be_full() -> None:
    with pytest.raises(StoreError, match=r"^cannot write here: no space left"), translated("write", "here"):
        pa.OSFile("/dev/full", "wb").write(b"x")


def _client_error(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "AKIA-SECRET\nsecond line"}}, "PutObject")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EDQUOT, "x"), "no space left"),
        (PermissionError(errno.EACCES, "x"), "access denied"),
        (OSError(errno.EROFS, "x"), "read-only"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (_client_error("NoSuchBucket"), "bucket does not exist"),
        (_client_error("AccessDenied"), "access denied"),
        (_client_error("SignatureDoesNotMatch"), "wrong credentials"),
        (_client_error("QuotaExceeded"), "no space left"),
        (_client_error("SlowDown"), "overloaded"),
        (_client_error("PermanentRedirect"), "another region"),
        (_client_error("SomethingNew"), "somethingnew"),
        (OSError("... AWS Error NO_SUCH_BUCKET during CreateMultipartUpload operation: x"), "bucket does not exist"),
        (OSError("... AWS Error ACCESS_DENIED during HeadObject operation: x"), "access denied"),
        (OSError("... AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 7"), "endpoint unreachable"),
        (OSError("... AWS Error UNKNOWN (HTTP status 507) during PutObject operation: x"), "no space left"),
        (EndpointConnectionError(endpoint_url="http://x"), "endpoint unreachable"),
        (ReadTimeoutError(endpoint_url="http://x"), "endpoint unreachable"),
        (NoCredentialsError(), "no credentials found"),
    ],
)
def test_reasons_are_told_apart(error: Exception, reason: str) -> None:
    message = str(store_error(error, "write", "here"))
    assert message.startswith("cannot write here: ")
    assert reason in message
    assert "AKIA" not in message
    assert "\n" not in message


def test_only_a_missing_object_that_is_read_is_not_found() -> None:
    assert isinstance(store_error(FileNotFoundError(), "read", "here"), ObjectNotFoundError)
    assert not isinstance(store_error(FileNotFoundError(), "write", "here"), ObjectNotFoundError)
    missing_bucket = FileNotFoundError()
    missing_bucket.__cause__ = _client_error("NoSuchBucket")
    assert not isinstance(store_error(missing_bucket, "read", "here"), ObjectNotFoundError)
