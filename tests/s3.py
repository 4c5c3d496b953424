"""An S3 server of its own process on loopback, and a proxy before it that injects faults."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_START_S = 60.0
_LIMIT_S = 30.0
_SERVER = """\
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass
class Fault:
    """An answer that the proxy gives in place of the server."""

    method: str
    part: str
    """A part of the request's path."""
    status: int = 503
    times: int = 1_000_000
    """How many requests get it; then the server answers."""
    header: str = ""
    """A header that the request has to have: ``x-amz-copy-source`` for copies."""


@dataclass
class S3:
    """A running server: ``url`` is the proxy's."""

    url: str
    faults: list[Fault] = field(default_factory=list)
    """Set by tests; the first that fits a request is injected."""
    requests: list[str] = field(default_factory=list)
    """``METHOD path`` of all requests, in order."""

    def fault_of(self, method: str, path: str, headers: http.client.HTTPMessage) -> Fault | None:
        """Remove and return the fault of a request, if it has one."""
        for fault in self.faults:
            fits = (
                method == fault.method
                and fault.part in path
                and (not fault.header or fault.header in headers)
            )
            if fits and fault.times > 0:
                fault.times -= 1
                return fault
        return None


@contextmanager
def s3_server() -> Iterator[S3]:
    """Run both; they end with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        served = S3(url="")
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(served, port))
        proxy.daemon_threads = True
        served.url = f"http://127.0.0.1:{proxy.server_address[1]}"
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield served
        finally:
            proxy.shutdown()
            thread.join(_LIMIT_S)
            proxy.server_close()
    finally:
        process.stdin.close()
        try:
            process.wait(_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _handler(served: S3, port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # clients ask whether to go on with a body

        def answer(self) -> None:
            body = self._body()
            served.requests.append(f"{self.command} {self.path}")
            fault = served.fault_of(self.command, self.path, self.headers)
            if fault is not None:
                self._send(
                    fault.status, [("Content-Type", "application/xml")], _error(fault.status)
                )
                return
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
            try:
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
                server.request(
                    self.command, self.path, body, {**headers, "Content-Length": str(len(body))}
                )
                found = server.getresponse()
                data = found.read()
                kept = [(k, v) for k, v in found.getheaders() if k.lower() not in _HOP_BY_HOP]
                self._send(found.status, kept, data, length=found.getheader("Content-Length"))
            finally:
                server.close()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 - http.server's names

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _send(
            self,
            status: int,
            headers: list[tuple[str, str]],
            data: bytes,
            length: str | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Connection", "close")  # a test leaves no connection behind
            self.send_header(
                "Content-Length", length if self.command == "HEAD" and length else str(len(data))
            )
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "server", "date", "expect"}


def _error(status: int) -> bytes:
    code = {403: "AccessDenied", 404: "NoSuchKey", 503: "SlowDown"}.get(status, "InternalError")
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
