"""What strangers may send to the page's questions: refused in words, and the model is as it was."""

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.inspector import open_inspector

from cutaway.serve import static_files
from cutaway.serve.app import build_app
from cutaway.serve.inspect import routes
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.server import bind_socket, build_access_policy, serve_in_thread

pytestmark = pytest.mark.unchecked
TEXT = {"tokens": [1, 2, 3]}


@pytest.fixture(scope="module")
def desk() -> Iterator[tuple[routes.QueryExecutor, str]]:
    made = routes.QueryExecutor(open_inspector("tiny-gpt"))
    routers = [routes.build_router(made), static_files.build_static_router()]
    app = build_app(routers, access_policy=build_access_policy("127.0.0.1", None), on_shutdown=[made.close])
    with serve_in_thread(app, bind_socket("127.0.0.1", 0)) as where:
        yield made, where


def post(where: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(where).netloc, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", path, data, {"content-type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def edited(**edits: Any) -> dict[str, Any]:
    return {"input": TEXT | {"edits": edits}, "position": 0}


HOSTILE = [
    ("nothing", {}),
    ("../../etc/passwd", {}),
    ("journey", {}),
    ("journey", []),
    ("journey", None),
    ("journey", {"input": TEXT}),
    ("journey", {"input": TEXT, "position": -1}),
    ("journey", {"input": TEXT, "position": 3}),
    ("journey", {"input": TEXT, "position": "0"}),
    ("journey", {"input": TEXT, "position": 0.5}),
    ("journey", {"input": TEXT, "position": True}),
    ("journey", {"input": TEXT, "position": 2**70}),
    ("journey", {"input": TEXT, "position": 0, "more": 1}),
    ("journey", {"input": {"tokens": []}, "position": 0}),
    ("journey", {"input": {"tokens": [-1]}, "position": 0}),
    ("journey", {"input": {"tokens": [257]}, "position": 0}),
    ("journey", {"input": {"tokens": [2**40]}, "position": 0}),
    ("journey", {"input": {"tokens": [1.5]}, "position": 0}),
    ("journey", {"input": {"tokens": ["1"]}, "position": 0}),
    ("journey", {"input": {"tokens": [1] * 2049}, "position": 0}),
    ("journey", {"input": {"tokens": [1] * 65}, "position": 0}),  # more than this model has positions for
    ("journey", {"input": {"tokens": [1], "source": [1]}, "position": 0}),
    ("journey", edited(**{"blocks.99": "skip"})),
    ("journey", edited(**{"blocks.0": "explode"})),
    ("journey", edited(**{"blocks.0": None})),
    ("journey", edited(**{"blocks.0": {"do": "skip", "value": 3}})),
    ("journey", edited(**{"blocks.0.attn.z": {"do": "zero", "heads": [99]}})),
    ("journey", edited(**{"blocks.0.attn.z": {"do": "zero", "heads": "all"}})),
    ("journey", edited(**{"blocks.0.attn.z": {"do": "replace", "value": [[1, 2], [3]]}})),
    ("journey", edited(**{"blocks.0.attn.z": {"do": "replace", "value": "x" * 1000}})),
    ("journey", edited(**{"blocks.0.attn.z": {"do": "add", "value": {"__class__": "x"}}})),
    ("journey", edited(**{"blocks.0.attn.z": {"do": "scale", "value": 10**400}})),
    ("journey", edited(**{"blocks.0.attn.z": "resample"})),
    ("journey", edited(**{"positions": {"do": "shift", "value": 10**9}})),
    ("journey", edited(**{"": "zero"})),
    ("journey", edited(**{f"blocks.{n}": "skip" for n in range(65)})),
    ("activation", {"input": TEXT, "position": 0, "site": "x" * 1000}),
    ("activation", {"input": TEXT, "position": 0, "site": "../secret"}),
    ("activation", {"input": TEXT, "position": 0, "site": "blocks.0.attn.__class__"}),
    ("next_token", {"input": TEXT, "position": 0, "temperature": -1}),
    ("next_token", {"input": TEXT, "position": 0, "top_k": 0}),
    ("next_token", {"input": TEXT, "position": 0, "top_p": 2}),
    ("tokenize", {"text": "x" * 70_000}),
    ("tokenize", {"text": "x" * 3000}),
    ("tokenize", {"text": ""}),
    ("tokenize", {"text": "a", "field": "elsewhere"}),
    ("attention_head", {"input": TEXT, "attention": "blocks.0.attn", "head": 99}),
    ("attention_head", {"input": TEXT, "attention": "blocks.0.nothing", "head": 0}),
    ("generate", {"input": TEXT, "num_prompt_tokens": 3, "num_tokens": 10**9}),
    ("generate", {"input": TEXT, "num_prompt_tokens": 9}),
    ("gradients_by_placement", {"depths": [10**6]}),
    ("gradients_by_placement", {"depths": list(range(1, 400))}),
    ("model_sizes", {"base": "/etc/passwd"}),
    ("model_sizes", {"base": "../../secret.toml"}),
    ("model_sizes", {"models": [{"base": "gpt2", "layers": 10**18}]}),
    ("memory_fit", {"model": {"base": "/etc/passwd"}}),
    ("run_metrics", {"path": "/etc"}),
]
RAW = [
    b"",
    b"{",
    b"[" * 10_000,
    b'{"input": NaN}',
    b"]" * 10_000,
    b'{"input": {"tokens": [1], "tokens": [2]}, "position": 0}',
    b'{"text": "\xff\xfe"}',
    b'{"text": "\\ud800"}',
    b"\x00" * 100,
]


def test_each_is_refused_in_words(desk: tuple[routes.QueryExecutor, str]) -> None:
    made, where = desk
    before = plain(where)
    for name, given in HOSTILE:
        status, body = post(where, f"/api/query/{name}", given)
        assert 400 <= status < 500, (name, given, status, body[:200])
        message = json.loads(body)["error"]["message"]
        assert message
        assert not any(word in message for word in ("Traceback", "/work", "site-packages", "made a mistake")), message
    for raw in RAW:
        status, body = post(where, "/api/query/tokenize", raw)
        assert 400 <= status < 500, (raw[:40], status, body[:200])
    assert plain(where) == before
    assert not made.jobs
    assert {name for name, _ in HOSTILE} <= {*QUERIES, "nothing", "../../etc/passwd"}


def plain(where: str) -> bytes:
    status, body = post(where, "/api/query/journey", {"input": TEXT, "position": 2})
    assert status == 200
    return body


def test_a_broken_model_is_shown_as_it_is(desk: tuple[routes.QueryExecutor, str]) -> None:
    """Infinity and NaN are answers too."""
    _, where = desk
    status, body = post(where, "/api/query/journey", edited(**{"blocks.0.ffn.out": {"do": "scale", "value": 1e38}}))
    assert status == 200
    assert b"null" in body
    assert b"NaN" not in body


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"content-type": "text/plain"},
    ],
)
def test_other_sites_are_not_answered(headers: dict[str, str], desk: tuple[routes.QueryExecutor, str]) -> None:
    status, _ = post(desk[1], "/api/query/model_info", {}, headers)
    assert 400 <= status < 500


def test_files_of_the_page_and_no_others(desk: tuple[routes.QueryExecutor, str]) -> None:
    connection = HTTPConnection(urlsplit(desk[1]).netloc, timeout=60)
    for path, status in {
        "/": 200, "/page.js": 200, "/page.css": 200, "/icon.svg": 200, "/stamp": 404, "/static_files.py": 404,
        "/..%2fstatic_files.py": 404, "/%2e%2e/static_files.py": 404, "/page.js%00": 400, "/api/query/model_info": 405,
    }.items():  # fmt: skip
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status, path
        assert "script-src 'self'" in (answer.getheader("content-security-policy") or "")
    connection.close()


def test_whoever_goes_away_stops_the_work(desk: tuple[routes.QueryExecutor, str]) -> None:
    made, where = desk
    given = {"depths": [48, 48, 48], "num_seeds": 8, "d_model": 256}
    connection = HTTPConnection(urlsplit(where).netloc, timeout=60)
    connection.request(
        "POST", "/api/query/gradients_by_placement", json.dumps(given), {"content-type": "application/json"}
    )
    end = time.monotonic() + 60
    while not made.jobs and time.monotonic() < end:
        time.sleep(0.01)
    assert made.jobs
    connection.close()
    while made.jobs and time.monotonic() < end:
        time.sleep(0.05)
    assert not made.jobs
