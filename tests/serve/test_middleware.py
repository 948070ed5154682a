"""Requests that no friend sends: each is refused in the 400s, says nothing of the inside, and harms nobody else."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.server import CHAT_TEMPLATE, RunningServer, byte_checkpoint, start_server

from cutaway.errors import InputError
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import SECURITY_HEADERS, AccessPolicy
from cutaway.serve.server import bind_socket, build_access_policy

pytestmark = pytest.mark.unchecked
KEY = "correct-horse-battery"
SMALL = Limits(
    max_body_bytes=4096, body_timeout=0.5, header_timeout=0.5, lingering_timeout=0.3, max_header_bytes=2048,
    max_headers=20, max_url_bytes=512, max_json_depth=8, max_json_values=400, max_prompt_characters=1000, max_tokens=50,
    max_n=4, max_prompts=3, max_completions=6, max_stop_strings=4, max_stop_characters=32, max_logit_biases=8,
    max_messages=5, max_embedding_inputs=3, max_embedding_tokens=100,
)  # fmt: skip
LEAKS = re.compile(rb"Traceback|File \"|\.py\b|/site-packages|/src/|/root|/home|0x[0-9a-f]{8}|<object|" + KEY.encode())
JSON = {"Content-Type": "application/json"}
GOOD = {**JSON, "Authorization": f"Bearer {KEY}"}
OK = {"prompt": "ab", "max_tokens": 2}
HI = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(
        byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE),
        access_policy=AccessPolicy(api_key=KEY),
        limits=SMALL,
    ) as found:
        yield found


def post(path: str, body: Any, status: int = 400, **headers: str | None) -> tuple[str, str, Any, dict[str, str], int]:
    given = {**GOOD, **{name.replace("_", "-"): value for name, value in headers.items() if value is not None}}
    kept = {name: value for name, value in given.items() if headers.get(name.replace("-", "_"), "") is not None}
    return "POST", path, body if isinstance(body, str | bytes) else json.dumps(body), kept, status


def complete(status: int = 400, **changes: Any) -> tuple[str, str, Any, dict[str, str], int]:
    return post("/v1/completions", OK | changes, status)


def chat(**changes: Any) -> tuple[str, str, Any, dict[str, str], int]:
    return post("/v1/chat/completions", HI | changes)


REQUESTS: dict[str, tuple[str, str, Any, dict[str, str], int]] = {
    # Who asks
    "no key": ("GET", "/health", None, {}, 401),
    "a wrong key": ("GET", "/v1/models", None, {"Authorization": "Bearer wrong"}, 401),
    "a beginning of the key": ("GET", "/v1/models", None, {"Authorization": f"Bearer {KEY[:-1]}"}, 401),
    "the key and more": ("GET", "/v1/models", None, {"Authorization": f"Bearer {KEY}x"}, 401),
    "an empty key": ("GET", "/v1/models", None, {"Authorization": "Bearer "}, 401),
    "the key as a password": ("GET", "/v1/models", None, {"Authorization": f"Basic {KEY}"}, 401),
    "the key in another place": ("GET", f"/v1/models?api_key={KEY}", None, {}, 401),
    "the key in a body": ("POST", "/v1/completions", json.dumps(OK | {"api_key": KEY}), JSON, 401),
    "a wrong key for the page": ("GET", "/?api_key=wrong", None, {}, 401),
    "the key as a cookie": ("GET", "/health", None, {"Cookie": f"cutaway-0={KEY}; cutaway={KEY}"}, 401),
    "a broken cookie": ("GET", "/health", None, {"Cookie": "\x7f=;;;=\"a; cutaway-1=\\"}, 401),
    "a key that is not ASCII": ("GET", "/health", None, {"Authorization": "Bearer \xe9\xff"}, 401),
    # From where
    "a name that points here": ("GET", "/health", None, {**GOOD, "Host": "evil.example"}, 421),
    "such a name with our port": ("GET", "/health", None, {**GOOD, "Host": "evil.example:8000"}, 421),
    "our name before theirs": ("GET", "/health", None, {**GOOD, "Host": "127.0.0.1.evil.example"}, 421),
    "our name as a user's": ("GET", "/health", None, {**GOOD, "Host": "localhost@evil.example"}, 421),
    "an empty name": ("GET", "/health", None, {**GOOD, "Host": ""}, 421),
    "a name with a path": ("GET", "/health", None, {**GOOD, "Host": "localhost/evil"}, 421),
    "a port that is none": ("GET", "/health", None, {**GOOD, "Host": "localhost:http"}, 421),
    "another address": ("GET", "/health", None, {**GOOD, "Host": "10.0.0.1"}, 421),
    "another site's page": post("/v1/completions", OK, 403, Origin="http://evil.example"),
    "a page without an origin": post("/v1/completions", OK, 403, Origin="null"),
    "another port's page": post("/v1/completions", OK, 403, Origin="http://127.0.0.1:1"),
    "an origin by its beginning": post("/v1/completions", OK, 403, Origin="http://127.0.0.1.evil.example"),
    "cross-site, as the browser says": post("/v1/completions", OK, 403, Sec_Fetch_Site="cross-site"),
    "same-site, another origin": post("/v1/completions", OK, 403, Sec_Fetch_Site="same-site"),
    "a frame in another page": ("GET", "/", None,
        {**GOOD, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, 403),
    "an image in another page": ("GET", "/metrics", None, {**GOOD, "Sec-Fetch-Site": "cross-site"}, 403),
    "a form of another page": post("/tokenize", "prompt=a", 415, Content_Type="application/x-www-form-urlencoded"),
    "JSON as plain text": post("/v1/completions", OK, 415, Content_Type="text/plain"),
    "no type": post("/v1/completions", OK, 415, Content_Type=None),
    "a preflight": ("OPTIONS", "/v1/completions", None, {**GOOD, "Access-Control-Request-Method": "POST"}, 405),
    # By which way
    "another method": ("DELETE", "/v1/models/tiny", None, GOOD, 405),
    "GET of a POST": ("GET", "/v1/completions", None, GOOD, 405),
    "an unknown method": ("BREW", "/v1/completions", None, GOOD, 405),
    "TRACE": ("TRACE", "/health", None, GOOD, 405),
    "an address that is not there": ("GET", "/v2/everything", None, GOOD, 404),
    "up and out": ("GET", "/../../etc/passwd", None, GOOD, 404),
    "up and out, written otherwise": ("GET", "/v1/models/..%2f..%2f..%2fetc%2fpasswd", None, GOOD, 404),
    "up and out, written twice": ("GET", "/%252e%252e/%252e%252e/etc/passwd", None, GOOD, 404),
    "with backslashes": ("GET", "/..%5c..%5cwindows%5cwin.ini", None, GOOD, 404),
    "an absolute path as a model": complete(404, model="/etc/passwd"),
    "a null byte in the address": ("GET", "/v1/models/tiny%00.json", None, GOOD, 400),
    "an endless address": ("GET", "/" + "a" * 600, None, GOOD, 414),
    "an endless query": ("GET", "/health?" + "a=b&" * 200, None, GOOD, 414),
    "no interactive documents": ("GET", "/docs", None, GOOD, 404),
    "a slash too many": ("GET", "/v1/models/", None, GOOD, 404),
    # With what
    "too many headers": ("GET", "/health", None, {**GOOD, **{f"X-{i}": "a" for i in range(30)}}, 431),
    "too long headers": ("GET", "/health", None, {**GOOD, "X-Long": "a" * 2200}, 431),
    "a large body": post("/v1/completions", OK | {"user": "a" * 5000}, 413),
    "a compressed body": post("/v1/completions", b"\x1f\x8b" + b"0" * 50, 415, Content_Encoding="gzip"),
    "no body": post("/v1/completions", ""),
    "not JSON": post("/v1/completions", "{'prompt': 1}"),
    "half of JSON": post("/v1/completions", '{"prompt": "a"'),
    "JSON and more": post("/v1/completions", json.dumps(OK) + "{}"),
    "a list": post("/v1/completions", [OK]),
    "a number": post("/v1/completions", "5"),
    "null": post("/v1/completions", "null"),
    "not UTF-8": post("/v1/completions", b'{"prompt": "\xff\xfe"}'),
    "UTF-16": post("/v1/completions", json.dumps(OK).encode("utf-16")),
    "a raw null byte": post("/v1/completions", b'{"prompt": "a\x00b"}'),
    "deep lists": post("/v1/completions", '{"prompt":' + "[" * 1000 + "]" * 1000 + "}"),
    "deep objects": post("/v1/completions", '{"a":' * 300 + "1" + "}" * 300),
    "deep, in a field that is ignored": complete(metadata=json.loads("[" * 20 + "]" * 20)),
    "brackets that nothing opened": post("/v1/completions", "]" * 300),
    "many brackets that nothing opened": post("/v1/completions", "]" * 4000),
    "many values": post("/v1/completions", {"prompt": [1] * 500}),
    "a key twice": post("/v1/completions", '{"prompt": "a", "max_tokens": 2, "max_tokens": 3}'),
    "NaN": post("/v1/completions", '{"prompt": "a", "temperature": NaN}'),
    "Infinity": post("/v1/completions", '{"prompt": "a", "temperature": -Infinity}'),
    "beyond all numbers": post("/v1/completions", '{"prompt": "a", "temperature": 1e999}'),
    "a number of 4,000 digits": post("/v1/completions", '{"prompt": "a", "seed": ' + "9" * 4000 + "}"),
    "half a character": post("/v1/completions", '{"prompt": "\\ud800"}'),
    "half a character in a key": post("/v1/completions", '{"prompt": "a", "\\udfff": 1}'),
    "escapes without end": post("/v1/completions", '{"prompt": "' + '\\"' * 1800),
    # Asking for what
    "no prompt": post("/v1/completions", {}),
    "an empty prompt": complete(prompt=""),
    "no prompts": complete(prompt=[]),
    "an empty one among prompts": complete(prompt=["a", ""]),
    "texts and tokens": complete(prompt=["a", 1]),
    "a prompt that is an object": complete(prompt={"$ne": None}),
    "too many prompts": complete(prompt=["a"] * 4),
    "too many answers": complete(prompt=["a"] * 3, n=4),
    "too many characters": complete(prompt="a" * 1001),
    "more than the context": complete(prompt="a" * 200),
    "more than the context with its answer": complete(prompt="a" * 120, max_tokens=20),
    "tokens beyond the context": complete(prompt=[1] * 200),
    "a token that is not there": complete(prompt=[99999]),
    "a negative token": complete(prompt=[-1]),
    "a token beyond 64 bits": complete(prompt=[2**70]),
    "a token that is a truth": complete(prompt=[True]),
    "no tokens at all": complete(max_tokens=0),
    "fewer than none": complete(max_tokens=-1),
    "too many tokens": complete(max_tokens=51),
    "tokens beyond all numbers": complete(max_tokens=10**30),
    "a number as text": complete(max_tokens="5"),
    "a truth as a number": complete(max_tokens=True),
    "half a token": complete(max_tokens=1.5),
    "n of none": complete(n=0),
    "n too large": complete(n=5),
    "best_of": complete(best_of=3),
    "cold": complete(temperature=-1),
    "hot": complete(temperature=1e9),
    "top_p of nothing": complete(top_p=0),
    "top_p of more than all": complete(top_p=1.1),
    "top_k below one": complete(top_k=0),
    "penalties without measure": complete(frequency_penalty=3),
    "logprobs of too many": complete(logprobs=6),
    "logprobs below none": complete(logprobs=-1),
    "too many stops": complete(stop=["a", "b", "c", "d", "e"]),
    "a long stop": complete(stop="a" * 33),
    "an empty stop": complete(stop=""),
    "a stop that is a number": complete(stop=[1]),
    "too many biases": complete(logit_bias={str(i): 1 for i in range(9)}),
    "a bias beyond measure": complete(logit_bias={"1": 1000}),
    "a bias on nothing": complete(logit_bias={"99999": 1}),
    "a bias on a word": complete(logit_bias={"hello": 1}),
    "a bias on half a token": complete(logit_bias={"1.5": 1}),
    "a bias in Arabic digits": complete(logit_bias={"١": 1}),
    "a seed beyond 64 bits": complete(seed=2**64),
    "a stream of words": complete(stream="yes"),
    "stream_options as a list": complete(stream=True, stream_options=[]),
    "stop tokens that are not there": complete(stop_token_ids=[70000]),
    "a suffix": complete(suffix="end"),
    "an echo": complete(echo=True),
    "another model": complete(404, model="gpt-4"),
    "a model that is a list": complete(model=["tiny"]),
    "no messages": chat(messages=[]),
    "messages as text": chat(messages="hi"),
    "too many messages": chat(messages=HI["messages"] * 6),  # type: ignore[operator]
    "a role of its own": chat(messages=[{"role": "root", "content": "a"}]),
    "a tool's message": chat(messages=[{"role": "tool", "content": "a"}]),
    "a message without content": chat(messages=[{"role": "user"}]),
    "an image": chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]),
    "a template in the request": chat(chat_template="{{ 7*7 }}"),
    "tools": chat(tools=[{"type": "function", "function": {"name": "f"}}]),
    "JSON as a format": chat(response_format={"type": "json_object"}),
    "a voice": chat(modalities=["text", "audio"]),
    "top_logprobs of too many": chat(logprobs=True, top_logprobs=21),
    "top_logprobs alone": chat(top_logprobs=2),
    "two limits that differ": chat(max_tokens=3, max_completion_tokens=4),
    "nothing to embed": post("/v1/embeddings", {"input": []}),
    "an empty text to embed": post("/v1/embeddings", {"input": [""]}),
    "too much to embed": post("/v1/embeddings", {"input": ["a"] * 4}),
    "too long to embed": post("/v1/embeddings", {"input": ["a" * 60, "b" * 60]}),
    "tokens to embed that are not there": post("/v1/embeddings", {"input": [[5, 4000]]}),
    "fewer dimensions": post("/v1/embeddings", {"input": "a", "dimensions": 5}),
    "another coding": post("/v1/embeddings", {"input": "a", "encoding_format": "hex"}),
    "nothing to tokenize": post("/tokenize", {}),
    "two things to tokenize": post("/tokenize", {"prompt": "a", "messages": HI["messages"]}),
    "much to tokenize": post("/tokenize", {"prompt": "a" * 1001}),
    "tokens that are none": post("/detokenize", {"tokens": ["a"]}),
    "tokens beyond 32 bits": post("/detokenize", {"tokens": [2**32]}),
}  # fmt: skip


def alive(server: RunningServer) -> None:
    assert server.request("GET", "/health", None, GOOD)[0] == 200
    status, _, body = server.request("POST", "/v1/completions", json.dumps(OK), GOOD)
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 2


def test_there_are_enough() -> None:
    assert len(REQUESTS) >= 120


@pytest.mark.parametrize("name", REQUESTS)
def test_is_refused(server: RunningServer, name: str) -> None:
    method, path, body, headers, status = REQUESTS[name]
    found, said, data = server.request(method, path, body, headers)
    assert found == status, data
    assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
    assert not LEAKS.search(data), data
    assert all(said[header] == value for header, value in SECURITY_HEADERS.items())
    assert said["cache-control"] == "no-store"
    assert "server" not in said
    assert "access-control-allow-origin" not in said
    alive(server)
    assert server.wait_until_idle()


HEAD = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
RAW: dict[str, tuple[str, tuple[int, ...]]] = {
    "two lengths": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 2\r\nContent-Length: 50\r\n\r\n{{}}", (400,)),
    "a length and chunks": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
    "chunks by another name": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", (400, 501)),
    "chunks of no size": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n", (400,)),
    "a length below none": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: -5\r\n\r\n", (400,)),
    "a length in words": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: ten\r\n\r\n", (400,)),
    "a length beyond all": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: {'9' * 30}\r\n\r\n", (400, 413)),
    "chunks beyond the limit": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n" + ("400\r\n" + "a" * 1024 + "\r\n") * 6,
        (413,)),
    "a promise of too much": (
        f"POST /tokenize HTTP/1.1\r\n{HEAD}Expect: 100-continue\r\nContent-Length: 900000\r\n\r\n", (413,)),
    "two hosts": (f"GET /health HTTP/1.1\r\n{HEAD}Host: evil.example\r\n\r\n", (400,)),
    "two keys": (f"GET /health HTTP/1.1\r\n{HEAD}Authorization: Bearer x\r\n\r\n", (400,)),
    "no host": (f"GET /health HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n\r\n", (400,)),
    "no host, in an old way": (f"GET /health HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n\r\n", (421,)),
    "an absolute address": (f"GET http://evil.example/health HTTP/1.1\r\n{HEAD}\r\n", (404,)),
    "a header over two lines": (f"GET /nothing HTTP/1.1\r\n{HEAD}X-A: a\r\n b\r\n\r\n", (400, 404)),
    "a header without a name": (f"GET /health HTTP/1.1\r\n{HEAD}: a\r\n\r\n", (400,)),
    "a null byte in a header": (f"GET /health HTTP/1.1\r\n{HEAD}X-A: a\0b\r\n\r\n", (400,)),
    "a space before a colon": (f"GET /health HTTP/1.1\r\n{HEAD}X-A : a\r\n\r\n", (400,)),
    "another protocol": ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
    "a later protocol": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 421)),
    "a first line without end": ("GET /" + "a" * 8000, (400,)),
    "headers without end": ("GET /health HTTP/1.1\r\n" + "X-A: b\r\n" * 2000, (400,)),
    "another protocol on top": (
        f"GET /nothing HTTP/1.1\r\n{HEAD}Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", (404, 426)),
    "a slow body": (f"POST /tokenize HTTP/1.1\r\n{HEAD}Content-Length: 20\r\n\r\n{{", (408,)),
}  # fmt: skip


def raw(server: RunningServer, data: bytes) -> bytes:
    """What a connection says to these bytes before it ends or falls silent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(data)
        found = connection.recv(65536)
        connection.settimeout(0.2)
        try:
            while more := connection.recv(65536):
                found += more
        except OSError:
            return found
        return found


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_proper_request_is_refused(server: RunningServer, name: str) -> None:
    text, statuses = RAW[name]
    said = raw(server, text.encode("latin-1"))
    assert int(said.split(b" ", 2)[1]) in statuses, said
    assert not LEAKS.search(said), said
    assert b"x-content-type-options: nosniff" in said.lower()
    alive(server)


def test_headers_that_come_too_slowly_are_not_waited_for(server: RunningServer) -> None:
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(20)]
    for connection in connections:
        connection.sendall(b"GET /health HT")
    alive(server)
    for connection in connections:
        assert connection.recv(100) == b""  # it was hung up on
        connection.close()


def test_a_client_that_reads_nothing_is_let_go() -> None:
    limits = Limits(send_timeout=0.5)
    with start_server(byte_checkpoint("tiny-llama"), limits=limits, max_num_seqs=8, send_buffer_bytes=4096) as found:
        body = json.dumps({"prompt": "a", "max_tokens": 120, "n": 8, "stream": True, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(5)
            connection.connect(("127.0.0.1", found.port))
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            end = time.monotonic() + 15
            while not found.serving.metrics.http_requests and time.monotonic() < end:
                time.sleep(0.02)
            assert found.serving.metrics.http_requests  # it is over,
            said = b""
            with suppress(ConnectionResetError):
                while more := connection.recv(65536):
                    said += more
            assert b"[DONE]" not in said  # and was not finished
        assert found.request("GET", "/health")[0] == 200
        assert found.wait_until_idle()


def test_a_browser_that_brings_the_key_is_known_from_then_on(server: RunningServer) -> None:
    status, said, _ = server.request("GET", f"/?a=1&api_key={KEY}&b=2")
    assert status == 303
    assert said["location"] == "/?a=1&b=2"
    cookie, *attributes = said["set-cookie"].split("; ")
    assert set(attributes) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert KEY not in cookie
    assert server.request("GET", "/health", None, {"Cookie": cookie})[0] == 200
    assert server.request("GET", "/health", None, {"Cookie": cookie[:-1]})[0] == 401


def test_our_own_page_may_ask(server: RunningServer) -> None:
    own = {**GOOD, "Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert server.request("POST", "/tokenize", json.dumps({"prompt": "a"}), own)[0] == 200
    link = {**GOOD, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert server.request("GET", "/", None, link)[0] == 404  # past the door; the page is another verb's


def test_others_do_not_wait_for_a_hostile_crowd(server: RunningServer) -> None:
    def bother() -> None:
        for name in ("deep lists", "a large body", "no key", "escapes without end", "too many characters") * 4:
            method, path, body, headers, status = REQUESTS[name]
            found.append(server.request(method, path, body, headers)[0] == status)

    found: list[bool] = []
    threads = [threading.Thread(target=bother) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        alive(server)
    for thread in threads:
        thread.join()
    assert len(found) == 120
    assert all(found)


def test_too_many_at_once_are_told_to_come_back() -> None:
    with start_server(byte_checkpoint("tiny-llama"), limits=Limits(max_concurrent_requests=0)) as found:
        status, headers, _ = found.request("GET", "/health")
        assert status == 429
        assert headers["retry-after"] == "1"
    with start_server(byte_checkpoint("tiny-llama"), limits=Limits(max_connections=2)) as found:
        open_ones = [socket.create_connection(("127.0.0.1", found.port)) for _ in range(2)]
        assert found.request("GET", "/health")[0] == 503
        for each in open_ones:
            each.close()


def test_what_fails_within_is_not_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with start_server(byte_checkpoint("tiny-llama")) as found:
        monkeypatch.setattr(type(found.serving), "check_model_name", lambda *_: 1 / 0)
        status, headers, data = found.request("POST", "/v1/completions", json.dumps(OK), JSON)
        assert status == 500
        assert not LEAKS.search(data)
        assert b"division" not in data
        assert headers["x-content-type-options"] == "nosniff"
        assert "ZeroDivisionError" in caplog.text


def test_a_step_that_fails_fails_alone_and_a_broken_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/srv/secret.py")

    with start_server(byte_checkpoint("tiny-llama")) as found:
        engine = found.serving.engine
        assert engine is not None
        with monkeypatch.context() as broken:
            broken.setattr(engine.model_runner, "decode", fail)
            status, _, data = found.request("POST", "/v1/completions", json.dumps(OK), JSON)
            assert status == 500
            assert b"secret" not in data
            _, _, data = found.request("POST", "/v1/completions", json.dumps(OK | {"stream": True}), JSON)
            assert b'"error"' in data
            assert b"secret" not in data
        assert found.request("POST", "/v1/completions", json.dumps(OK), JSON)[0] == 200
        monkeypatch.setattr(engine, "_admit_waiting", fail)
        assert found.request("POST", "/v1/completions", json.dumps(OK), JSON)[0] == 500
        status, _, data = found.request("POST", "/v1/completions", json.dumps(OK), JSON)
        assert status == 503
        assert b"secret" not in data
        assert found.request("GET", "/health")[0] == 503


def test_a_public_bind_needs_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(InputError, match="key"):
            build_access_policy(host, None)
    for key in ("short", "with space in it", "ключключ", "line\nbreak", "x" * 600):
        with pytest.raises(InputError, match="8 to 512"):
            build_access_policy("127.0.0.1", key)
    door = build_access_policy("0.0.0.0", KEY, ("gpu.lan",))
    assert all(door.allows_host(name) for name in ("10.1.2.3:80", "GPU.lan", "[fe80::1]:8000", "localhost:9"))
    assert not door.allows_host("evil.example")
    assert KEY not in repr(door)


def test_a_taken_port_is_said() -> None:
    with bind_socket("127.0.0.1", 0) as first, pytest.raises(InputError, match="taken"):
        bind_socket("127.0.0.1", first.getsockname()[1])
    with pytest.raises(InputError, match="--port"):
        bind_socket("127.0.0.1", 70000)
    with pytest.raises(InputError, match="--host"):
        bind_socket("no.such.name.invalid", 0)
