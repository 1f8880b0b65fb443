"""Real S3 servers on loopback, each with an empty bucket: moto, and Ceph's gateway where it is installed."""

import functools
import os
import shutil
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import s3fs
from moto.s3.exceptions import NoSuchUpload
from moto.s3.models import S3Backend
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
from pydantic import SecretStr

from storage.options import S3Options, StorageOptions

_CEPH = Path(__file__).with_name("ceph-s3.sh")


class S3Server(NamedTuple):
    """Where a test server listens. Its keys are `test` and `testsecret`."""

    endpoint: str

    def options(self, bucket: str, **changes: str) -> StorageOptions:
        """Storage options for `bucket` on this server; `changes` replace fields of `S3Options`."""
        fields = {"endpoint": self.endpoint, "access_key": "test", "secret_key": "testsecret"} | changes
        s3 = S3Options(
            endpoint=fields["endpoint"],
            access_key=SecretStr(fields["access_key"]),
            secret_key=SecretStr(fields["secret_key"]),
        )
        return StorageOptions(url=f"s3://{bucket}/runs", s3=s3)

    def client(self) -> s3fs.S3FileSystem:
        """A client other than the stores', to look at the server from outside."""
        return _client(self.endpoint)

    def new_bucket(self) -> str:
        """Name of a bucket made just now."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().call_s3("create_bucket", Bucket=name)
        return name


@functools.cache
def _client(endpoint: str) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(
        key="test",
        secret="testsecret",
        endpoint_url=endpoint,
        client_kwargs={"region_name": "us-east-1"},
        use_listings_cache=False,
        skip_instance_cache=True,
    )


_moto_upload_part = S3Backend.upload_part


def _upload_part(backend: S3Backend, bucket: str, upload: str, *arguments: Any, **named: Any) -> Any:
    """As S3 does: 404 for an upload that was aborted. moto fails with 500, which clients retry for many seconds."""
    if upload not in backend.get_bucket(bucket).multiparts:
        raise NoSuchUpload(upload)
    return _moto_upload_part(backend, bucket, upload, *arguments, **named)


_moto_put_object = S3Response.put_object
_putting = threading.Lock()


def _put_object(response: S3Response) -> Any:
    """As S3 does: looking for an object and putting it is one act. In moto two racing creators may both win."""
    with _putting:
        return _moto_put_object(response)


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """moto's S3, in a thread of this process."""
    setattr(S3Backend, "upload_part", _upload_part)  # noqa: B010  a plain assignment is refused by mypy
    setattr(S3Response, "put_object", _put_object)  # noqa: B010
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()


def ceph_installed() -> bool:
    """Whether Ceph's gateway can be started here."""
    return all(shutil.which(name) for name in ("radosgw", "ceph-mon", "ceph-osd", "ceph"))


@contextmanager
def ceph_server(folder: Path) -> Iterator[S3Server]:
    """Ceph's RADOS gateway over one in-memory OSD, its files in `folder`."""
    ports = [str(port) for port in _free_ports()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    try:
        started = subprocess.run(
            [_CEPH, "start", folder, *ports],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
            env=environment,
        )
        yield S3Server(started.stdout.strip())
    finally:
        subprocess.run([_CEPH, "stop", folder], check=True, timeout=30)


def _free_ports() -> tuple[int, int]:
    """A free port for S3, and the first of two adjacent free ones for the monitor."""
    while True:
        with socket.socket() as gateway, socket.socket() as first, socket.socket() as second:
            gateway.bind(("127.0.0.1", 0))
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return gateway.getsockname()[1], port
