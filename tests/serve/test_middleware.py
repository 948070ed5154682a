"""Invalid and hostile requests: rejected with 4xx, without leaking internals, and without affecting other clients."""

import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from email.message import Message
from http.client import HTTPResponse
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from support.server import CHAT_TEMPLATE, RunningServer, byte_checkpoint, start_server, wait_until

from cutaway.errors import InputError
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import SECURITY_HEADERS, AccessPolicy
from cutaway.serve.server import bind_socket, build_access_policy

pytestmark = pytest.mark.unchecked
KEY = "correct-horse-battery"
SMALL_LIMITS = Limits(
    max_body_bytes=4096, lingering_timeout=0.3, max_header_bytes=2048,
    max_headers=20, max_url_bytes=512, max_json_depth=8, max_json_values=400, max_prompt_characters=1000, max_tokens=50,
    max_n=4, max_prompts=3, max_completions=6, max_stop_strings=4, max_stop_characters=32, max_logit_biases=8,
    max_messages=5, max_embedding_inputs=3, max_embedding_tokens=100,
)  # fmt: skip
LEAK_PATTERN = re.compile(
    rb"Traceback|File \"|\.py\b|/site-packages|/src/|/root|/home|0x[0-9a-f]{8}|<object|" + KEY.encode()
)
JSON_HEADERS = {"Content-Type": "application/json"}
AUTHED = {**JSON_HEADERS, "Authorization": f"Bearer {KEY}"}
COMPLETION = {"prompt": "ab", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(
        byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE),
        access_policy=AccessPolicy(api_key=KEY),
        limits=SMALL_LIMITS,
    ) as running:
        yield running


def post(path: str, body: Any, status: int = 400, **headers: str | None) -> tuple[str, str, Any, dict[str, str], int]:
    all_headers = {
        **AUTHED,
        **{name.replace("_", "-"): value for name, value in headers.items() if value is not None},
    }
    sent_headers = {
        name: value for name, value in all_headers.items() if headers.get(name.replace("-", "_"), "") is not None
    }
    return "POST", path, body if isinstance(body, str | bytes) else json.dumps(body), sent_headers, status


def complete(status: int = 400, **changes: Any) -> tuple[str, str, Any, dict[str, str], int]:
    return post("/v1/completions", COMPLETION | changes, status)


def chat(**changes: Any) -> tuple[str, str, Any, dict[str, str], int]:
    return post("/v1/chat/completions", CHAT | changes)


REQUESTS: dict[str, tuple[str, str, Any, dict[str, str], int]] = {
    # Authentication
    "no key": ("GET", "/health", None, {}, 401),
    "wrong key": ("GET", "/v1/models", None, {"Authorization": "Bearer wrong"}, 401),
    "prefix of the key": ("GET", "/v1/models", None, {"Authorization": f"Bearer {KEY[:-1]}"}, 401),
    "key with a suffix": ("GET", "/v1/models", None, {"Authorization": f"Bearer {KEY}x"}, 401),
    "empty key": ("GET", "/v1/models", None, {"Authorization": "Bearer "}, 401),
    "key as Basic auth": ("GET", "/v1/models", None, {"Authorization": f"Basic {KEY}"}, 401),
    "key in the query of an API route": ("GET", f"/v1/models?api_key={KEY}", None, {}, 401),
    "key in the body": ("POST", "/v1/completions", json.dumps(COMPLETION | {"api_key": KEY}), JSON_HEADERS, 401),
    "wrong key in the query of the page": ("GET", "/?api_key=wrong", None, {}, 401),
    "key as a cookie": ("GET", "/health", None, {"Cookie": f"cutaway-0={KEY}; cutaway={KEY}"}, 401),
    "malformed cookie": ("GET", "/health", None, {"Cookie": "\x7f=;;;=\"a; cutaway-1=\\"}, 401),
    "non-ASCII key": ("GET", "/health", None, {"Authorization": "Bearer \xe9\xff"}, 401),
    # Host and origin
    "DNS rebinding host": ("GET", "/health", None, {**AUTHED, "Host": "evil.example"}, 421),
    "DNS rebinding host with port": ("GET", "/health", None, {**AUTHED, "Host": "evil.example:8000"}, 421),
    "host with our name as prefix": ("GET", "/health", None, {**AUTHED, "Host": "127.0.0.1.evil.example"}, 421),
    "host with userinfo": ("GET", "/health", None, {**AUTHED, "Host": "localhost@evil.example"}, 421),
    "empty host": ("GET", "/health", None, {**AUTHED, "Host": ""}, 421),
    "host with a path": ("GET", "/health", None, {**AUTHED, "Host": "localhost/evil"}, 421),
    "host with an invalid port": ("GET", "/health", None, {**AUTHED, "Host": "localhost:http"}, 421),
    "another IP address": ("GET", "/health", None, {**AUTHED, "Host": "10.0.0.1"}, 421),
    "cross-origin": post("/v1/completions", COMPLETION, 403, Origin="http://evil.example"),
    "null origin": post("/v1/completions", COMPLETION, 403, Origin="null"),
    "origin with another port": post("/v1/completions", COMPLETION, 403, Origin="http://127.0.0.1:1"),
    "origin with our host as prefix": post("/v1/completions", COMPLETION, 403, Origin="http://127.0.0.1.evil.example"),
    "Sec-Fetch-Site cross-site": post("/v1/completions", COMPLETION, 403, Sec_Fetch_Site="cross-site"),
    "Sec-Fetch-Site same-site": post("/v1/completions", COMPLETION, 403, Sec_Fetch_Site="same-site"),
    "iframe in another site": ("GET", "/", None,
        {**AUTHED, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
    "image in another site": ("GET", "/metrics", None, {**AUTHED, "Sec-Fetch-Site": "cross-site"}, 403),
    "form content type": post("/tokenize", "prompt=a", 415, Content_Type="application/x-www-form-urlencoded"),
    "text/plain content type": post("/v1/completions", COMPLETION, 415, Content_Type="text/plain"),
    "no content type": post("/v1/completions", COMPLETION, 415, Content_Type=None),
    "CORS preflight": ("OPTIONS", "/v1/completions", None, {**AUTHED, "Access-Control-Request-Method": "POST"}, 405),
    # Methods and paths
    "unsupported method": ("DELETE", "/v1/models/tiny", None, AUTHED, 405),
    "GET of a POST route": ("GET", "/v1/completions", None, AUTHED, 405),
    "unknown method": ("BREW", "/v1/completions", None, AUTHED, 405),
    "TRACE": ("TRACE", "/health", None, AUTHED, 405),
    "unknown path": ("GET", "/v2/everything", None, AUTHED, 404),
    "path traversal": ("GET", "/../../etc/passwd", None, AUTHED, 404),
    "path traversal, percent-encoded": ("GET", "/v1/models/..%2f..%2f..%2fetc%2fpasswd", None, AUTHED, 404),
    "path traversal, double-encoded": ("GET", "/%252e%252e/%252e%252e/etc/passwd", None, AUTHED, 404),
    "path traversal, backslashes": ("GET", "/..%5c..%5cwindows%5cwin.ini", None, AUTHED, 404),
    "path as the model name": complete(404, model="/etc/passwd"),
    "null byte in the path": ("GET", "/v1/models/tiny%00.json", None, AUTHED, 400),
    "path too long": ("GET", "/" + "a" * 600, None, AUTHED, 414),
    "query too long": ("GET", "/health?" + "a=b&" * 200, None, AUTHED, 414),
    "interactive docs": ("GET", "/docs", None, AUTHED, 404),
    "trailing slash": ("GET", "/v1/models/", None, AUTHED, 404),
    # Headers and bodies
    "too many headers": ("GET", "/health", None, {**AUTHED, **{f"X-{i}": "a" for i in range(30)}}, 431),
    "headers too long": ("GET", "/health", None, {**AUTHED, "X-Long": "a" * 2200}, 431),
    "body too large": post("/v1/completions", COMPLETION | {"user": "a" * 5000}, 413),
    "compressed body": post("/v1/completions", b"\x1f\x8b" + b"0" * 50, 415, Content_Encoding="gzip"),
    "no body": post("/v1/completions", ""),
    "not JSON": post("/v1/completions", "{'prompt': 1}"),
    "truncated JSON": post("/v1/completions", '{"prompt": "a"'),
    "trailing data after JSON": post("/v1/completions", json.dumps(COMPLETION) + "{}"),
    "JSON array": post("/v1/completions", [COMPLETION]),
    "JSON number": post("/v1/completions", "5"),
    "JSON null": post("/v1/completions", "null"),
    "not UTF-8": post("/v1/completions", b'{"prompt": "\xff\xfe"}'),
    "UTF-16": post("/v1/completions", json.dumps(COMPLETION).encode("utf-16")),
    "raw null byte": post("/v1/completions", b'{"prompt": "a\x00b"}'),
    "deeply nested arrays": post("/v1/completions", '{"prompt":' + "[" * 300 + "]" * 300 + "}"),
    "deeply nested objects": post("/v1/completions", '{"a":' * 300 + "1" + "}" * 300),
    "deep nesting in an ignored field": complete(metadata=json.loads("[" * 20 + "]" * 20)),
    "unopened brackets": post("/v1/completions", "]" * 300),
    "many unopened brackets": post("/v1/completions", "]" * 4000),
    "too many JSON values": post("/v1/completions", {"prompt": [1] * 500}),
    "duplicate key": post("/v1/completions", '{"prompt": "a", "max_tokens": 2, "max_tokens": 3}'),
    "NaN": post("/v1/completions", '{"prompt": "a", "temperature": NaN}'),
    "Infinity": post("/v1/completions", '{"prompt": "a", "temperature": -Infinity}'),
    "number out of range": post("/v1/completions", '{"prompt": "a", "temperature": 1e999}'),
    "number with 4,000 digits": post("/v1/completions", '{"prompt": "a", "seed": ' + "9" * 4000 + "}"),
    "lone surrogate": post("/v1/completions", '{"prompt": "\\ud800"}'),
    "lone surrogate in a key": post("/v1/completions", '{"prompt": "a", "\\udfff": 1}'),
    "unterminated string of escapes": post("/v1/completions", '{"prompt": "' + '\\"' * 1800),
    # Parameters
    "no prompt": post("/v1/completions", {}),
    "empty prompt": complete(prompt=""),
    "empty list of prompts": complete(prompt=[]),
    "empty prompt in a list": complete(prompt=["a", ""]),
    "texts and token ids mixed": complete(prompt=["a", 1]),
    "prompt is an object": complete(prompt={"$ne": None}),
    "too many prompts": complete(prompt=["a"] * 4),
    "too many completions": complete(prompt=["a"] * 3, n=4),
    "too many characters": complete(prompt="a" * 1001),
    "prompt longer than the context": complete(prompt="a" * 200),
    "prompt and max_tokens exceed the context": complete(prompt="a" * 120, max_tokens=20),
    "token ids longer than the context": complete(prompt=[1] * 200),
    "token id out of vocabulary": complete(prompt=[99999]),
    "negative token id": complete(prompt=[-1]),
    "token id beyond 64 bits": complete(prompt=[2**70]),
    "token id is a boolean": complete(prompt=[True]),
    "max_tokens 0": complete(max_tokens=0),
    "negative max_tokens": complete(max_tokens=-1),
    "max_tokens too large": complete(max_tokens=51),
    "max_tokens beyond 64 bits": complete(max_tokens=10**30),
    "max_tokens is a string": complete(max_tokens="5"),
    "max_tokens is a boolean": complete(max_tokens=True),
    "max_tokens is not an integer": complete(max_tokens=1.5),
    "n 0": complete(n=0),
    "n too large": complete(n=5),
    "best_of": complete(best_of=3),
    "negative temperature": complete(temperature=-1),
    "temperature too high": complete(temperature=1e9),
    "top_p 0": complete(top_p=0),
    "top_p above 1": complete(top_p=1.1),
    "top_k 0": complete(top_k=0),
    "frequency_penalty too large": complete(frequency_penalty=3),
    "logprobs too large": complete(logprobs=6),
    "negative logprobs": complete(logprobs=-1),
    "too many stop strings": complete(stop=["a", "b", "c", "d", "e"]),
    "stop string too long": complete(stop="a" * 33),
    "empty stop string": complete(stop=""),
    "stop is a number": complete(stop=[1]),
    "logit_bias with too many tokens": complete(logit_bias={str(i): 1 for i in range(9)}),
    "logit_bias too large": complete(logit_bias={"1": 1000}),
    "logit_bias on an unknown token": complete(logit_bias={"99999": 1}),
    "logit_bias on a word": complete(logit_bias={"hello": 1}),
    "logit_bias on a float": complete(logit_bias={"1.5": 1}),
    "logit_bias in Arabic digits": complete(logit_bias={"١": 1}),
    "seed beyond 64 bits": complete(seed=2**64),
    "stream is a string": complete(stream="yes"),
    "stream_options as a list": complete(stream=True, stream_options=[]),
    "stop_token_ids out of vocabulary": complete(stop_token_ids=[70000]),
    "suffix": complete(suffix="end"),
    "echo is a string": complete(echo="yes"),
    "unknown model": complete(404, model="gpt-4"),
    "model is a list": complete(model=["tiny"]),
    "empty messages": chat(messages=[]),
    "messages is a string": chat(messages="hi"),
    "too many messages": chat(messages=CHAT["messages"] * 6),  # type: ignore[operator]
    "unknown role": chat(messages=[{"role": "root", "content": "a"}]),
    "tool message without content": chat(messages=[{"role": "tool"}]),
    "message without content": chat(messages=[{"role": "user"}]),
    "image content": chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]),
    "chat_template in the request": chat(chat_template="{{ 7*7 }}"),
    "two tools of the same name": chat(tools=[{"type": "function", "function": {"name": "f"}}] * 2),
    "response_format without schema": chat(response_format={"type": "json_schema"}),
    "audio modality": chat(modalities=["text", "audio"]),
    "top_logprobs too large": chat(logprobs=True, top_logprobs=21),
    "top_logprobs without logprobs": chat(top_logprobs=2),
    "max_tokens and max_completion_tokens differ": chat(max_tokens=3, max_completion_tokens=4),
    "no embedding inputs": post("/v1/embeddings", {"input": []}),
    "empty embedding input": post("/v1/embeddings", {"input": [""]}),
    "too many embedding inputs": post("/v1/embeddings", {"input": ["a"] * 4}),
    "embedding inputs too long": post("/v1/embeddings", {"input": ["a" * 60, "b" * 60]}),
    "embedding token id out of vocabulary": post("/v1/embeddings", {"input": [[5, 4000]]}),
    "embedding dimensions": post("/v1/embeddings", {"input": "a", "dimensions": 5}),
    "unknown encoding_format": post("/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
    "tokenize without input": post("/tokenize", {}),
    "tokenize prompt and messages": post("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}),
    "tokenize text too long": post("/tokenize", {"prompt": "a" * 1001}),
    "detokenize strings": post("/detokenize", {"tokens": ["a"]}),
    "detokenize ids beyond 32 bits": post("/detokenize", {"tokens": [2**32]}),
}  # fmt: skip


REASONS = {
    "deeply nested arrays": "nested deeper than 8",
    "deeply nested objects": "nested deeper than 8",
    "deep nesting in an ignored field": "nested deeper than 8",
    "unopened brackets": "closing bracket",
    "many unopened brackets": "more than 400 values",
    "too many JSON values": "more than 400 values",
    "unterminated string of escapes": "Unterminated string",
    "negative token id": "greater than or equal to 0",
    "token id beyond 64 bits": "less than 4294967296",
    "path as the model name": "the model does not exist",
    "path traversal, percent-encoded": "the model does not exist",
    "embedding inputs too long": "the inputs have 120 tokens",
    "prompt and max_tokens exceed the context": "120 + 20 tokens",
}
"""Part of the message of requests that could also be rejected for another reason, by name in `REQUESTS`."""


def check_alive(server: RunningServer) -> None:
    assert server.request("GET", "/health", None, AUTHED)[0] == 200
    status, _, body = server.request("POST", "/v1/completions", json.dumps(COMPLETION), AUTHED)
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 2


def test_number_of_invalid_requests() -> None:
    assert len(REQUESTS) >= 120


@pytest.mark.parametrize("name", REQUESTS)
def test_invalid_request_is_rejected(server: RunningServer, name: str) -> None:
    method, path, body, headers, status = REQUESTS[name]
    actual_status, response_headers, data = server.request(method, path, body, headers)
    assert actual_status == status, data
    assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
    assert REASONS.get(name, "") in json.loads(data)["error"]["message"]
    assert not LEAK_PATTERN.search(data), data
    assert all(response_headers[header] == value for header, value in SECURITY_HEADERS.items())
    assert response_headers["cache-control"] == "no-store"
    assert "server" not in response_headers
    assert "access-control-allow-origin" not in response_headers
    check_alive(server)
    assert server.wait_until_idle()


HEAD = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
RAW_REQUESTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "two Content-Length headers": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 2\r\nContent-Length: 50\r\n\r\n{{}}", (400,)),
    "Content-Length and chunked": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
    "unknown transfer encoding": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", (400, 501)),
    "invalid chunk size": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n", (400,)),
    "negative Content-Length": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: -5\r\n\r\n", (400,)),
    "Content-Length is a word": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: ten\r\n\r\n", (400,)),
    "Content-Length of 30 digits": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: {'9' * 30}\r\n\r\n", (400, 413)),
    "chunked body too large": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n" + ("400\r\n" + "a" * 1024 + "\r\n") * 6,
        (413,)),
    "body in many chunks of one byte": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n" + "1\r\n \r\n" * 300, (400,)),
    "many short headers": (f"GET /health HTTP/1.1\r\n{HEAD}" + "a:\r\n" * 200 + "\r\n", (400,)),
    "Expect with a body too large": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Expect: 100-continue\r\nContent-Length: 900000\r\n\r\n", (413,)),
    "two Host headers": (f"GET /health HTTP/1.1\r\n{HEAD}Host: evil.example\r\n\r\n", (400,)),
    "two Authorization headers": (f"GET /health HTTP/1.1\r\n{HEAD}Authorization: Bearer x\r\n\r\n", (400,)),
    "no Host header": (f"GET /health HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n\r\n", (400,)),
    "no Host header in HTTP/1.0": (f"GET /health HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n\r\n", (421,)),
    "absolute URL": (f"GET http://evil.example/health HTTP/1.1\r\n{HEAD}\r\n", (404,)),
    "folded header": (f"GET /nothing HTTP/1.1\r\n{HEAD}X-A: a\r\n b\r\n\r\n", (400, 404)),
    "header without a name": (f"GET /health HTTP/1.1\r\n{HEAD}: a\r\n\r\n", (400,)),
    "null byte in a header": (f"GET /health HTTP/1.1\r\n{HEAD}X-A: a\0b\r\n\r\n", (400,)),
    "space before a colon": (f"GET /health HTTP/1.1\r\n{HEAD}X-A : a\r\n\r\n", (400,)),
    "TLS handshake": ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
    "HTTP/2 preface": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 421)),
    "unterminated request line": ("GET /" + "a" * 8000, (400,)),
    "unterminated headers": ("GET /health HTTP/1.1\r\n" + "X-A: b\r\n" * 2000, (400,)),
    "WebSocket upgrade": (
        f"GET /nothing HTTP/1.1\r\n{HEAD}Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", (404, 426)),
}  # fmt: skip


def send_raw(server: RunningServer, data: bytes) -> tuple[int, Message, bytes]:
    """Send bytes and return status, headers and body of the response."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(data)
        response = HTTPResponse(connection)
        response.begin()
        body = b""
        with suppress(OSError):  # the server may reset a connection whose data it did not read
            body = response.read()
        return response.status, response.headers, body


@pytest.mark.parametrize("name", RAW_REQUESTS)
def test_malformed_http_is_rejected(server: RunningServer, name: str) -> None:
    text, statuses = RAW_REQUESTS[name]
    status, headers, body = send_raw(server, text.encode("latin-1"))
    assert status in statuses, body
    assert not LEAK_PATTERN.search(headers.as_bytes() + body), body
    assert headers["x-content-type-options"] == "nosniff"
    check_alive(server)


def test_header_timeout_closes_the_connection() -> None:
    with start_server(byte_checkpoint("tiny-llama"), limits=Limits(header_timeout=0.5)) as server:
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=120) for _ in range(20)]
        for connection in connections:
            connection.sendall(b"GET /health HT")
        for connection in connections:
            assert connection.recv(100) == b""  # closed by the server
            connection.close()


def test_body_timeout_is_408() -> None:
    with start_server(byte_checkpoint("tiny-llama"), limits=Limits(body_timeout=0.5)) as server:
        incomplete = f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 20\r\n\r\n{{"
        assert send_raw(server, incomplete.encode())[0] == 408


def test_send_timeout_aborts_the_stream() -> None:
    limits = Limits(send_timeout=0.5)
    with start_server(byte_checkpoint("tiny-llama"), limits=limits, max_num_seqs=8, send_buffer_bytes=4096) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 120, "n": 8, "stream": True, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(120)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            assert wait_until(lambda: server.metric("http_request_duration_seconds_count") == 1)  # it has ended
            response = b""
            with suppress(ConnectionResetError):
                while more := connection.recv(65536):
                    response += more
            assert b"[DONE]" not in response  # before the stream was complete
        assert server.request("GET", "/health")[0] == 200
        assert server.wait_until_idle()


def test_api_key_in_url_sets_a_session_cookie(server: RunningServer) -> None:
    status, headers, _ = server.request("GET", f"/?a=1&api_key={KEY}&b=2")
    assert status == 303
    assert headers["location"] == "/?a=1&b=2"
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert set(attributes) == {"HttpOnly", "SameSite=strict", "Path=/"}
    assert KEY not in cookie
    assert server.request("GET", "/health", None, {"Cookie": cookie})[0] == 200
    assert server.request("GET", "/health", None, {"Cookie": cookie[:-1]})[0] == 401


def test_same_origin_requests_and_links_are_allowed(server: RunningServer) -> None:
    same_origin = {**AUTHED, "Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert server.request("POST", "/tokenize", json.dumps({"prompt": "a"}), same_origin)[0] == 200
    link = {**AUTHED, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert server.request("GET", "/", None, link)[0] == 404  # passes the middleware; this app has no page


def test_invalid_requests_do_not_block_valid_ones(server: RunningServer) -> None:
    def send_invalid_requests() -> None:
        for name in (
            "deeply nested arrays",
            "body too large",
            "no key",
            "unterminated string of escapes",
            "too many characters",
        ) * 4:
            method, path, body, headers, status = REQUESTS[name]
            outcomes.append(server.request(method, path, body, headers)[0] == status)

    outcomes: list[bool] = []
    threads = [threading.Thread(target=send_invalid_requests) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        check_alive(server)
    for thread in threads:
        thread.join()
    assert len(outcomes) == 120
    assert all(outcomes)


def test_concurrency_limits_return_429_and_503() -> None:
    with start_server(byte_checkpoint("tiny-llama"), limits=Limits(max_concurrent_requests=0)) as server:
        status, headers, _ = server.request("POST", "/v1/completions", json.dumps(COMPLETION), JSON_HEADERS)
        assert status == 429
        assert headers["retry-after"] == "1"
        assert server.request("GET", "/health")[0] == 200
    limits = Limits(max_connections=2, min_idle_time=60)
    with start_server(byte_checkpoint("tiny-llama"), limits=limits) as server:
        connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        assert server.request("GET", "/v1/models")[0] == 503
        assert server.request("GET", "/health")[0] == 200
        for connection in connections:
            connection.close()


def test_internal_errors_are_logged_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    log = StringIO()
    monkeypatch.setattr(logging.getLogger("cutaway.serve"), "handlers", [logging.StreamHandler(log)])
    with start_server(byte_checkpoint("tiny-llama")) as server:
        monkeypatch.setattr(type(server.serving), "adapter_of", lambda *_: 1 / 0)
        status, headers, data = server.request("POST", "/v1/completions", json.dumps(COMPLETION), JSON_HEADERS)
        assert status == 500
        assert not LEAK_PATTERN.search(data)
        assert b"division" not in data
        assert headers["x-content-type-options"] == "nosniff"
        assert "ZeroDivisionError" in log.getvalue()


def test_failed_step_is_500_and_failed_engine_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/srv/secret.py")

    with start_server(byte_checkpoint("tiny-llama")) as server:
        engine = server.serving.engine
        assert engine is not None
        with monkeypatch.context() as patch:
            patch.setattr(engine.model_runner, "decode", fail)
            status, _, data = server.request("POST", "/v1/completions", json.dumps(COMPLETION), JSON_HEADERS)
            assert status == 500
            assert b"secret" not in data
            _, _, data = server.request(
                "POST", "/v1/completions", json.dumps(COMPLETION | {"stream": True}), JSON_HEADERS
            )
            assert b'"error"' in data
            assert b"secret" not in data
        assert server.request("POST", "/v1/completions", json.dumps(COMPLETION), JSON_HEADERS)[0] == 200
        monkeypatch.setattr(engine, "_admit_waiting", fail)
        assert server.request("POST", "/v1/completions", json.dumps(COMPLETION), JSON_HEADERS)[0] == 500
        status, _, data = server.request("POST", "/v1/completions", json.dumps(COMPLETION), JSON_HEADERS)
        assert status == 503
        assert b"secret" not in data
        assert server.request("GET", "/health")[0] == 503


def test_public_bind_requires_an_api_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(InputError, match="key"):
            build_access_policy(host, None)
    for key in ("short", "with space in it", "ключключ", "line\nbreak", "x" * 600):
        with pytest.raises(InputError, match="8 to 512"):
            build_access_policy("127.0.0.1", key)
    policy = build_access_policy("0.0.0.0", KEY, ("gpu.lan",))
    assert all(policy.allows_host(name) for name in ("10.1.2.3:80", "GPU.lan", "[fe80::1]:8000", "localhost:9"))
    assert not policy.allows_host("evil.example")
    assert KEY not in repr(policy)


def test_invalid_bind_address_is_an_error() -> None:
    with bind_socket("127.0.0.1", 0) as first, pytest.raises(InputError, match="in use"):
        bind_socket("127.0.0.1", first.getsockname()[1])
    with pytest.raises(InputError, match="--port"):
        bind_socket("127.0.0.1", 70000)
    with pytest.raises(InputError, match="--host"):
        bind_socket("no.such.name.invalid", 0)
