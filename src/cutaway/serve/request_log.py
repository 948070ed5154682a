"""Log of the server: a line per request and per error, as text or as JSON, without prompts, completions and API keys.

Lines are written by a thread, so that a full pipe does not block the event loop.
"""

import json
import logging
import queue
import re
import sys
import threading
import time
from collections.abc import Mapping
from typing import Literal, TextIO

from cutaway.serve.request_context import RequestContext

LogFormat = Literal["text", "json"]
MAX_QUEUED_LINES = 10_000
"""Lines beyond this number are dropped and counted, while the output is not read."""
MAX_PATH_LENGTH = 200
QUIET_ROUTES = frozenset({"/health", "/metrics"})
"""Routes that monitoring requests often. Their successful requests are not logged."""
request_log = logging.getLogger("cutaway.serve.requests")
_PLAIN_VALUE = re.compile(r"[\x21\x23-\x3c\x3e-\x7e]+")


def log_request(context: RequestContext, route: str, status: int, seconds: float) -> None:
    """Log a finished request."""
    if not request_log.isEnabledFor(logging.INFO) or (route in QUIET_ROUTES and status < 400):
        return
    fields = {
        "request_id": context.request_id,
        "client": context.address,
        "key": context.key_name,
        "method": context.method[:16],
        "path": context.path[:MAX_PATH_LENGTH],
        "status": status,
        "duration_seconds": round(seconds, 6),
        "model": context.model,
        "prompt_tokens": context.prompt_tokens or None,
        "completion_tokens": context.completion_tokens if context.finish_reasons else None,
        "time_to_first_token_seconds": _rounded(context.time_to_first_token),
        "finish_reason": ",".join(dict.fromkeys(context.finish_reasons)) or None,
        "error": context.error_code,
    }
    request_log.info("request", extra={"fields": {k: v for k, v in fields.items() if v is not None}})


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


class TextFormatter(logging.Formatter):
    """`TIME LEVEL message key=value …`. A value with special characters is quoted as in JSON, so a line stays one line.

    Further lines, of a traceback or of a message, are indented, so that they cannot look like lines of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields_of(record)
        words = [_timestamp(record), record.levelname, record.getMessage()]
        words += [f"{name}={_quote(value)}" for name, value in fields.items()]
        text = " ".join(words)
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return "\n    ".join(_escape_controls(line) for line in text.splitlines())


class JSONFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        line |= _fields_of(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    return getattr(record, "fields", {})


def _timestamp(record: logging.LogRecord) -> str:
    """Time in UTC, as in 2026-01-31T12:00:00.123Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _quote(value: object) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def _escape_controls(text: str) -> str:
    """Escape control characters, which a terminal would interpret."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class QueuedHandler(logging.Handler):
    """Formats records and writes them in a thread. Lines are dropped while the queue is full."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.stream, self.num_dropped = stream, 0
        self.lines: queue.Queue[str | None] = queue.Queue(MAX_QUEUED_LINES)
        self.thread = threading.Thread(target=self._write_lines, name="cutaway log", daemon=True)
        self.thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.lines.put_nowait(self.format(record))
        except queue.Full:
            self.num_dropped += 1

    def _write_lines(self) -> None:
        while (line := self.lines.get()) is not None:
            dropped, self.num_dropped = self.num_dropped, 0
            note = f"{dropped} lines of the log were dropped, because the output was not read\n" if dropped else ""
            try:
                self.stream.write(f"{line}\n{note}")
                self.stream.flush()
            except (OSError, ValueError):  # the reader of the log is gone; the server goes on without it
                return

    def close(self) -> None:
        """Write the remaining lines, for at most one second."""
        if not self.lines.full():
            self.lines.put_nowait(None)
            self.thread.join(1)
        super().close()


def configure_logging(log_format: LogFormat) -> None:
    """Write the log of the server to standard error."""
    formatter = JSONFormatter() if log_format == "json" else TextFormatter()
    logger = logging.getLogger("cutaway.serve")
    logger.addHandler(QueuedHandler(sys.stderr, formatter))
    logger.setLevel(logging.INFO)
    logger.propagate = False
