"""Limits on connections: silent and slow clients of one address do not prevent others from being served."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection

import pytest
from support.server import RunningServer, byte_checkpoint, start_server, wait_until

from cutaway.serve.connections import ConnectionTable, client_network
from cutaway.serve.limits import Limits
from cutaway.serve.server import fit_to_file_limit

pytestmark = pytest.mark.unchecked
HEADERS = {"Content-Type": "application/json"}
COMPLETION = json.dumps({"prompt": "ab", "max_tokens": 2})
PARTIAL_HEADERS = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
PARTIAL_BODY = PARTIAL_HEADERS + b"Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{"


@contextmanager
def open_connections(server: RunningServer, count: int, data: bytes = b"", host: str = "127.0.0.1") -> Iterator[None]:
    """Open connections from an address and send data that is not a complete request."""
    with ExitStack() as stack:
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", server.port), 120, (host, 0))
            stack.enter_context(connection)
            connection.sendall(data)
        yield


def status_from(server: RunningServer, host: str, method: str = "GET", path: str = "/v1/models") -> int:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=120, source_address=(host, 0))
    try:
        connection.request(method, path, COMPLETION if method == "POST" else None, HEADERS)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("data", [b"", PARTIAL_HEADERS, PARTIAL_BODY])
def test_idle_connections_are_closed_when_there_are_too_many(data: bytes) -> None:
    limits = Limits(max_connections=8, max_connections_per_address=4, max_concurrent_requests=2, min_idle_time=0)
    with start_server(byte_checkpoint("tiny-llama"), limits=limits) as server:
        with open_connections(server, 20, data):
            assert status_from(server, "127.0.0.1") == 200
            assert status_from(server, "127.0.0.1", "POST", "/v1/completions") == 200
        with open_connections(server, 20, data, "127.0.0.2"), open_connections(server, 20, data, "127.0.0.3"):
            assert status_from(server, "127.0.0.1") == 200
            assert status_from(server, "127.0.0.1", "POST", "/v1/completions") == 200
        assert server.wait_until_idle()


def test_one_address_cannot_take_all_connections() -> None:
    limits = Limits(max_connections=8, max_connections_per_address=4)
    with (
        start_server(byte_checkpoint("tiny-llama"), limits=limits) as server,
        open_connections(server, 6, b"", "127.0.0.2"),
    ):
        assert status_from(server, "127.0.0.2") == 503
        assert status_from(server, "127.0.0.2", path="/health") == 200
        assert status_from(server, "127.0.0.1") == 200


def test_slow_bodies_do_not_count_as_requests_in_progress() -> None:
    limits = Limits(max_concurrent_requests=1)
    with (
        start_server(byte_checkpoint("tiny-llama"), limits=limits) as server,
        open_connections(server, 4, PARTIAL_BODY),
    ):
        assert status_from(server, "127.0.0.1", "POST", "/v1/completions") == 200


def test_connections_with_a_request_in_progress_are_not_closed() -> None:
    limits = Limits(max_connections=2, min_idle_time=0)
    with start_server(byte_checkpoint("tiny-llama"), limits=limits) as server:
        responses = []
        with server.paused_engine():
            for _ in range(2):
                connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
                connection.request("POST", "/v1/completions", COMPLETION, HEADERS)
                responses.append(connection)
            assert wait_until(lambda: server.serving.num_preprocessing == 0 and len(server.engine.waiting) == 2)
            assert status_from(server, "127.0.0.1") == 503
            assert status_from(server, "127.0.0.1", path="/health") == 200
        assert [connection.getresponse().status for connection in responses] == [200, 200]
        for connection in responses:
            connection.close()


@dataclass(eq=False)
class FakeConnection:
    waiting_since: float | None = 0.0
    is_closed: bool = False

    def close_idle(self) -> None:
        self.is_closed = True


def test_the_oldest_idle_connection_of_the_largest_address_is_closed() -> None:
    table = ConnectionTable(Limits(max_connections=5, max_connections_per_address=4, min_idle_time=0))
    first, *others = [FakeConnection() for _ in range(3)]
    busy, lone, new = FakeConnection(waiting_since=None), FakeConnection(), FakeConnection()
    for connection in (busy, first, *others):
        assert table.add(connection, "a")
    assert table.add(lone, "b")
    assert table.add(new, "c")  # the table is full, and "a" has the most connections
    assert [connection.is_closed for connection in (busy, first, *others, lone)] == [False, True, False, False, False]
    table.discard(first, "a")  # the closed connection is reported as lost later
    assert len(table) == 5
    for connection in others:
        connection.waiting_since = None
    lone.waiting_since = new.waiting_since = None
    rejected = FakeConnection()
    assert not table.add(rejected, "d")
    for connection, address in (
        (rejected, "d"),
        (busy, "a"),
        *((other, "a") for other in others),
        (lone, "b"),
        (new, "c"),
    ):
        table.discard(connection, address)
    assert len(table) == 0
    assert not table._by_address
    assert not table._next_search


def test_addresses_are_grouped_by_client() -> None:
    assert client_network("192.0.2.7") == client_network("::ffff:192.0.2.7") == "192.0.2.7"
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff:1") != client_network("2001:db8:0:1::1")
    assert client_network("fe80::1%eth0") == client_network("fe80::2")
    assert client_network("testclient") == "testclient"


def test_connections_fit_to_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    new_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: new_limits.append(limits))
    for soft, hard, max_connections in ((256, 4096, 1024), (256, 600, 344), (100, 100, 25), (4096, 4096, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        assert fit_to_file_limit(Limits()).max_connections == max_connections
    assert new_limits == [(1280, 4096), (600, 600), (100, 100)]
