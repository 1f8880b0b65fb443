"""A real HTTP proxy before a real S3 server, which misbehaves as it is told: what a store does on a bad day."""

import contextlib
import http.client
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from tests.helpers.s3_server import S3Server

Fault = Literal["busy", "broken", "denied", "gone", "reset", "lost_reply", "hang", "cut", "drop_if_none_match"]
"""What becomes of a request: `busy` 503 SlowDown, `broken` 500, `denied` 403, `gone` 404 NoSuchBucket; `reset` the
connection at once; `lost_reply`: carry it out, then reset; `cut`: carry it out, break the reply off half way; `hang`:
accept it and never answer; `drop_if_none_match`: forget the header of exclusive creation, as old servers do."""

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}
_ANSWERS: dict[str, tuple[int, str]] = {
    "busy": (503, "SlowDown"),
    "broken": (500, "InternalError"),
    "denied": (403, "AccessDenied"),
    "gone": (404, "NoSuchBucket"),
}


class S3Proxy:
    """`server` as seen through the proxy, whatever befalls it."""

    def __init__(self, server: S3Server, endpoint: str) -> None:
        self.behind = urlsplit(server.endpoint).netloc
        self.server = S3Server(endpoint)
        self.fired: Counter[str] = Counter()
        """How often each fault has struck."""
        self._fault: Fault | None = None
        self._where = ""
        self._times = float("inf")
        self._met: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._well = threading.Event()

    def begin(self, fault: Fault, *, where: str = "", times: float = float("inf")) -> None:
        """From now on requests whose method and path hold `where` meet `fault`, each the first `times` times."""
        with self._lock:
            self._fault, self._where, self._times = fault, where, times
            self._met.clear()
            self._well.clear()

    def end(self) -> None:
        """All is well again; what hangs is reset."""
        with self._lock:
            self._fault = None
            self._well.set()

    def strike(self, request: str) -> Fault | None:
        """Which fault meets a request."""
        with self._lock:
            if self._fault is None or self._where not in request or self._met[request] >= self._times:
                return None
            self._met[request] += 1
            self.fired[self._fault] += 1
            return self._fault

    def wait_until_well(self) -> None:
        """Block a request that hangs."""
        self._well.wait()


@contextmanager
def s3_proxy(server: S3Server) -> Iterator[S3Proxy]:
    """A proxy that passes everything on until it is told otherwise."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = proxy.strike(f"{self.command} {self.path}")
            if fault in _ANSWERS:
                self._refuse(*_ANSWERS[fault])
            elif fault in ("reset", "hang"):
                if fault == "hang":
                    proxy.wait_until_well()
                self._reset()
            else:
                self._pass_on(body, fault)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

        def _pass_on(self, body: bytes, fault: Fault | None) -> None:
            dropped = {*_HOP_BY_HOP, *(["if-none-match"] if fault == "drop_if_none_match" else [])}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            with contextlib.closing(http.client.HTTPConnection(proxy.behind, timeout=30)) as connection:
                connection.request(self.command, self.path, body, headers)
                reply = connection.getresponse()
                content = reply.read()
            if fault == "lost_reply":
                self._reset()
                return
            length = reply.getheader("Content-Length") if self.command == "HEAD" else len(content)
            kept = [pair for pair in reply.getheaders() if pair[0].lower() not in {*_HOP_BY_HOP, "server", "date"}]
            self._reply(reply.status, [*kept, ("Content-Length", str(length or 0))])
            self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)
            if fault == "cut":
                self._reset()

        def _refuse(self, status: int, code: str) -> None:
            content = f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
            self._reply(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))])
            self.wfile.write(b"" if self.command == "HEAD" else content)

        def _reply(self, status: int, headers: list[tuple[str, str]]) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()

        def _reset(self) -> None:
            """Close with a reset rather than a farewell."""
            self.close_connection = True
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RD)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that has given up waiting is what these tests are about."""

    listening = Server(("127.0.0.1", 0), Handler)
    proxy = S3Proxy(server, f"http://127.0.0.1:{listening.server_address[1]}")
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.end()
        listening.shutdown()
        listening.server_close()
        thread.join()
