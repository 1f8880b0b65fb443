"""A real HTTP proxy before an S3 server that loses the header of exclusive creation, as old servers ignore it."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.helpers.s3_server import S3Server

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


@contextmanager
def careless_proxy(server: S3Server) -> Iterator[S3Server]:
    """`server` as seen through a proxy that drops `If-None-Match`."""
    behind = urlsplit(server.endpoint).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            dropped = {*_HOP_BY_HOP, "if-none-match"}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            connection = http.client.HTTPConnection(behind, timeout=30)
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in {*_HOP_BY_HOP, "server", "date"}:
                    self.send_header(name, value)
            length = reply.getheader("Content-Length") if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(length or 0))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

        def log_message(self, *_: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield S3Server(f"http://127.0.0.1:{proxy.server_address[1]}")
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
