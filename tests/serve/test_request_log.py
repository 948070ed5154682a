"""Log of the server: a line per request, without prompts and keys, also for hostile values."""

import http.client
import json
import logging
import os
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from support.server import RunningServer, byte_checkpoint, serve_in_thread, start_server, wait_until

from cutaway.serve import request_log
from cutaway.serve.api_keys import ApiKey, ApiKeys, KeyUsage
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.openai.api_server import build_openai_app
from cutaway.serve.request_context import RequestContext, current_request
from cutaway.serve.request_log import JSONFormatter, QueuedHandler, TextFormatter
from cutaway.serve.server import bind_socket

pytestmark = pytest.mark.unchecked
KEY = "sk-alice-0123456789"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
COMPLETION = {"model": "tiny", "prompt": "a private text", "max_tokens": 6, "temperature": 0}
TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@contextmanager
def captured_log(formatter: logging.Formatter) -> Iterator[StringIO]:
    stream, logger = StringIO(), logging.getLogger("cutaway.serve")
    handler, level = QueuedHandler(stream, formatter), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    policy = AccessPolicy(api_keys=ApiKeys([ApiKey(name="alice", key=KEY)]))
    with start_server(byte_checkpoint("tiny-llama"), access_policy=policy, limits=Limits(max_tokens=50)) as running:
        yield running


def complete(
    server: RunningServer, headers: dict[str, str] | None = None, **changes: Any
) -> tuple[int, dict[str, str]]:
    response = server.request("POST", "/v1/completions", json.dumps(COMPLETION | changes), HEADERS | (headers or {}))
    return response[:2]


def wait_for_lines(stream: StringIO, count: int) -> list[str]:
    assert wait_until(lambda: stream.getvalue().count("\n") >= count)
    return stream.getvalue().splitlines()


def test_json_lines(server: RunningServer) -> None:
    with captured_log(JSONFormatter()) as stream:
        status, headers = complete(server, {"X-Request-Id": "trace-7"}, n=2)
        assert (status, headers["x-request-id"]) == (200, "trace-7")
        assert complete(server, stream=True)[0] == 200
        assert complete(server, model="unknown")[0] == 404
        assert complete(server, {"Authorization": "Bearer sk-wrong-key"})[0] == 401
        assert server.request("GET", "/health", None, HEADERS)[0] == 200  # not logged
        texts = wait_for_lines(stream, 4)
    lines = [json.loads(line) for line in texts]
    first = lines[0]
    assert TIME_PATTERN.fullmatch(first["time"])
    assert first["duration_seconds"] >= first["time_to_first_token_seconds"] > 0
    expected = {
        "level": "INFO", "message": "request", "request_id": "trace-7", "client": "127.0.0.1", "key": "alice",
        "method": "POST", "path": "/v1/completions", "status": 200, "model": "tiny", "prompt_tokens": 14,
        "completion_tokens": 12, "finish_reason": "length",
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected
    assert lines[1]["completion_tokens"] == 6
    assert (lines[2]["status"], lines[2]["model"], lines[2]["error"]) == (404, "unknown", "model_not_found")
    assert (lines[3]["status"], lines[3]["error"], lines[3].get("key")) == (401, "invalid_api_key", None)
    assert len({line["request_id"] for line in lines}) == 4
    for text in texts:
        assert "private" not in text
        assert "sk-" not in text


def test_aborted_requests_are_logged(server: RunningServer) -> None:
    with captured_log(JSONFormatter()) as stream, server.paused_engine():
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(COMPLETION), HEADERS)
        assert wait_until(lambda: server.engine.has_unfinished_requests)
        connection.close()
        line = json.loads(wait_for_lines(stream, 1)[0])
    assert (line["status"], line["finish_reason"]) == (499, "abort")


HOSTILE = "x\n2026-01-01T00:00:00.000Z INFO request status=200\r\x1b[31m\u2028\x85 key=root"


@pytest.mark.parametrize("formatter", [TextFormatter(), JSONFormatter()], ids=["text", "json"])
def test_values_of_clients_cannot_forge_lines(server: RunningServer, formatter: logging.Formatter) -> None:
    with captured_log(formatter) as stream:
        assert complete(server, model=HOSTILE)[0] == 404
        assert server.request("GET", "/%0a2026-01-01%20INFO%20%1b[31m%e2%80%a8", None, HEADERS)[0] == 404
        for request_id in ("a b", "a=b", "x" * 65, '"', "\xe9"):
            assert complete(server, {"X-Request-Id": request_id})[1]["x-request-id"] != request_id
        text = wait_for_lines(stream, 7) and stream.getvalue()
    assert text.count("\n") == 7
    assert text.isascii()
    assert all(each.isprintable() for each in text.replace("\n", ""))
    for line in text.split("\n")[:-1]:
        if isinstance(formatter, JSONFormatter):
            assert json.loads(line)["message"] == "request"
        else:
            assert TIME_PATTERN.match(line)
            assert len(re.findall(r" status=\d", re.sub(r'"(?:[^"\\]|\\.)*"', "", line))) == 1


@pytest.mark.parametrize(("trusted", "client"), [(None, "127.0.0.1"), ("10.0.0.0/8,127.0.0.1", "203.0.113.9")])
def test_client_address_behind_a_proxy(trusted: str | None, client: str) -> None:
    """The address is the last one that no trusted proxy has; a client that is no proxy cannot choose its address."""
    app, _ = build_openai_app(byte_checkpoint("tiny-llama"), "tiny", max_num_seqs=2)
    sock = bind_socket("127.0.0.1", 0)
    forwarded = {"X-Forwarded-For": "198.51.100.1, 203.0.113.9, 10.1.2.3", "X-Forwarded-Proto": "https"}
    with captured_log(JSONFormatter()) as stream, serve_in_thread(app, sock, forwarded_allow_ips=trusted) as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=forwarded), timeout=120).close()
        line = json.loads(wait_for_lines(stream, 1)[0])
    assert line["client"] == client


def test_client_identity_of_a_request() -> None:
    context = RequestContext("id", "203.0.113.9")
    assert context.client == "203.0.113.9"
    context.usage = KeyUsage(ApiKey(name="alice", key=KEY))
    assert context.client == "key:alice"
    assert current_request().client == ""  # outside of a request


def test_lines_of_tracebacks_are_indented() -> None:
    try:
        raise ValueError("first\n2026-01-01T00:00:00.000Z INFO forged\x1b[0m")
    except ValueError as error:
        record = logging.LogRecord("cutaway.serve", logging.ERROR, "", 0, "failed\nhere", None, None)
        record.exc_info = (type(error), error, error.__traceback__)
    first, *others = TextFormatter().format(record).split("\n")
    assert first.endswith("ERROR failed")
    assert all(line.startswith("    ") for line in others)
    assert "\x1b" not in "".join(others)
    line = json.loads(JSONFormatter().format(record))
    assert line["message"] == "failed\nhere"
    assert "ValueError" in line["exception"]


def test_a_full_pipe_drops_lines_instead_of_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "MAX_QUEUED_LINES", 5)
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as reader, os.fdopen(write_end, "w") as writer:
        handler = QueuedHandler(writer, TextFormatter())
        line = "x" * 100_000  # more than a pipe holds, so that the thread blocks
        for _ in range(20):
            handler.emit(logging.LogRecord("a", logging.INFO, "", 0, line, None, None))
        num_dropped = handler.num_dropped
        assert num_dropped >= 14
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(reader))
        reading.start()
        handler.lines.put(None)
        handler.thread.join()
        writer.close()
        reading.join()
    assert len([each for each in lines if line in each]) == 20 - num_dropped
    assert f"{num_dropped} lines of the log were dropped, because the output was not read\n" in lines
