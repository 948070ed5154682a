"""HTTP/1.1 parser: header lines and tiny pieces of bodies are limited, other requests are parsed as by h11."""

import h11
import pytest

from cutaway.serve.http_connection import MAX_SMALL_PIECES, MIN_PIECE_BYTES, LimitedConnection
from cutaway.serve.limits import Limits

pytestmark = pytest.mark.unchecked
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def parse(*received: bytes) -> tuple[LimitedConnection, bytes]:
    """Parse one request and return the connection and the body."""
    connection, body = LimitedConnection(Limits(max_headers=10)), b""
    for data in received:
        connection.receive_data(data)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            body += event.data if isinstance(event, h11.Data) else b""
    return connection, body


def chunks(count: int, data: bytes) -> bytes:
    return (b"%x\r\n" % len(data) + data + b"\r\n") * count + b"0\r\n\r\n"


@pytest.mark.parametrize(("count", "data"), [(MAX_SMALL_PIECES, b"a"), (10 * MAX_SMALL_PIECES, b"a" * MIN_PIECE_BYTES)])
def test_chunked_body_is_complete(count: int, data: bytes) -> None:
    connection, body = parse(CHUNKED, chunks(count, data))
    assert body == data * count
    assert connection.their_state is h11.DONE


def test_too_many_small_chunks_are_rejected() -> None:
    with pytest.raises(h11.RemoteProtocolError, match="small pieces"):
        parse(CHUNKED, chunks(MAX_SMALL_PIECES + 1, b"a"))
    with pytest.raises(h11.RemoteProtocolError, match="small pieces"):
        parse(HEAD + b"Content-Length: 5000\r\n\r\n", *[b"a"] * (MAX_SMALL_PIECES + 1))


def test_pieces_are_counted_per_request() -> None:
    connection, _ = parse(CHUNKED + chunks(MAX_SMALL_PIECES, b"a"))
    connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.start_next_cycle()
    connection.receive_data(CHUNKED + chunks(2, b"a"))
    events = [connection.next_event() for _ in range(4)]
    assert [type(event) for event in events] == [h11.Request, h11.Data, h11.Data, h11.EndOfMessage]


def test_header_lines_are_limited_before_they_are_parsed() -> None:
    headers = b"".join(b"x%d: a\r\n" % index for index in range(19))
    parse(b"GET / HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n")  # the middleware rejects these, with a JSON error
    with pytest.raises(h11.RemoteProtocolError, match="too many headers"):
        parse(b"GET / HTTP/1.1\r\nHost: a\r\n" + headers + b"one-more: a\r\n\r\n")
