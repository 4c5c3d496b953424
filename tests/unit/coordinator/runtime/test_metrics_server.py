"""The HTTP server of ``--metrics``, with real sockets."""

from __future__ import annotations

import http.client
import socket
from contextlib import suppress

import pytest

from distlaunch.coordinator.runtime.metrics_server import (
    CONNECTIONS,
    MetricsServer,
    NoMetricsError,
    open_listener,
    url_of,
)
from distlaunch.core.errors import ConfigError
from tests.process.conftest import until

TEXT = "# TYPE distlaunch_workers_up gauge\ndistlaunch_workers_up 4\n"


@pytest.fixture
def serve():
    servers = []

    def start(read=lambda: TEXT, **limits: float) -> tuple[str, int]:
        listener = open_listener("0")
        address = listener.getsockname()
        servers.append(MetricsServer(listener, read, content_type="text/plain", **limits))
        servers[-1].start()
        return address

    start.servers = servers
    yield start
    for server in servers:
        server.close()
        assert not server.is_alive()


def get(address, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def read_all(client: socket.socket) -> bytes:
    data = b""
    while block := client.recv(65536):
        data += block
    return data


def received(client: socket.socket) -> int:
    count = 0
    with suppress(ConnectionResetError):
        while block := client.recv(65536):
            count += len(block)
    return count


def test_the_text_is_served(serve):
    address = serve()
    assert get(address) == (200, TEXT)
    assert get(address, "/metrics?name=x") == (200, TEXT)
    assert get(address, method="HEAD") == (200, "")
    assert get(address, "/")[0] == 200
    assert get(address, "/other")[0] == 404
    assert get(address, method="POST")[0] == 405


def test_the_job_is_asked_once_for_many_requests_at_the_same_time(serve):
    asked = []

    def read() -> str:
        asked.append(None)
        return TEXT

    address = serve(read)
    for _ in range(10):
        assert get(address)[0] == 200
    assert len(asked) < 10


def test_a_job_that_does_not_answer_gives_503(serve):
    def read() -> str:
        raise NoMetricsError("the job has ended")

    address = serve(read)
    assert get(address)[0] == 503


def test_an_error_in_one_request_gives_500_and_the_next_is_answered(serve):
    texts = iter([None, TEXT])

    address = serve(lambda: next(texts))
    assert get(address)[0] == 500
    assert get(address) == (200, TEXT)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"\0\xff\r\n\r\n", b"400"),
        (b"GET /metrics\n\n", b"400"),
        (b"GET /metrics HTTP/1.0\n\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"y" * 10_000, b"431"),
    ],
)
def test_odd_requests_are_answered(serve, request_, status):
    address = serve()
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(request_)
        assert read_all(client).split(b" ")[1] == status


def test_slow_and_silent_clients_are_closed(serve):
    address = serve(request_s=0.2)
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"GET /met")
        assert read_all(client) == b""
    assert get(address)[0] == 200


def test_a_client_that_does_not_read_is_closed(serve):
    address = serve(lambda: "x" * (64 << 20), answer_s=0.3)
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        other = socket.create_connection(address, timeout=30)
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read_all(other).startswith(b"HTTP/1.1 200")  # served meanwhile
        other.close()
        [server] = serve.servers
        until(lambda: not server._connections, "the connection is closed")
        assert received(client) < 64 << 20


def test_many_connections_do_not_keep_others_out(serve):
    address = serve()
    clients = [socket.create_connection(address, timeout=30) for _ in range(CONNECTIONS + 5)]
    assert get(address) == (200, TEXT)
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    "where",
    [
        "",
        "port",
        "-1",
        "65536",
        "1.5",
        ":9400",
        "::1:9400",
        "[::1]",
        "h:",
        "\u0661",
        "a b:9400",
        "\0:1",
    ],
)
def test_another_form_is_refused(where):
    with pytest.raises(ConfigError, match="--metrics"):
        open_listener(where)


def test_a_taken_port_is_refused():
    first = open_listener("0")
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=str(port)):
        open_listener(str(port))
    first.close()
    open_listener(f"127.0.0.1:{port}").close()


def test_the_address_may_be_chosen():
    with open_listener("0") as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
    with open_listener("0.0.0.0:0") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
