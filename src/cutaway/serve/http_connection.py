"""HTTP/1.1 parser with limits on what costs most to parse: the number of header lines, and tiny pieces of a body."""

import h11
from h11._receivebuffer import ReceiveBuffer

from cutaway.serve.limits import Limits

MAX_SMALL_PIECES = 128
"""Maximum number of chunks of a body if their average is smaller than MIN_PIECE_BYTES."""
MIN_PIECE_BYTES = 64


class LimitedConnection(h11.Connection):
    """Server side of an HTTP/1.1 connection.

    h11 takes about 10 µs for a header line or a chunk, whatever its size: a body of a megabyte in chunks of one byte
    would take 10 seconds of the event loop.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes + limits.max_url_bytes)
        self._receive_buffer = _LimitedReceiveBuffer(2 * limits.max_headers)  # the middleware rejects fewer with 431
        self._num_pieces = self._num_body_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = self._num_body_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_body_bytes += len(event.data)
            if self._num_pieces > MAX_SMALL_PIECES and self._num_body_bytes < self._num_pieces * MIN_PIECE_BYTES:
                raise h11.RemoteProtocolError("the body is in too many small pieces")
        return event


class _LimitedReceiveBuffer(ReceiveBuffer):
    """Received bytes. Header lines are counted before they are parsed."""

    def __init__(self, max_lines: int) -> None:
        super().__init__()
        self.max_lines = max_lines

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines = super().maybe_extract_lines()
        if lines is not None and len(lines) > self.max_lines + 1:
            raise h11.RemoteProtocolError("there are too many headers", error_status_hint=431)
        return lines
