"""What strangers may send to the page's questions: refused in words, and the model is as it was."""

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from inspecting import opened

from cutaway.serve import built
from cutaway.serve.app import make_app
from cutaway.serve.inspect import routes
from cutaway.serve.inspect.questions import QUESTIONS
from cutaway.serve.server import listen, make_door, serving

pytestmark = pytest.mark.unchecked
TEXT = {"tokens": [1, 2, 3]}


@pytest.fixture(scope="module")
def desk() -> Iterator[tuple[routes.Desk, str]]:
    made = routes.Desk(opened("tiny-gpt"))
    routers = [routes.router(made), built.router()]
    app = make_app(routers, door=make_door("127.0.0.1", None), closing=[made.close])
    with serving(app, listen("127.0.0.1", 0)) as where:
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
    return {"look": TEXT | {"edits": edits}, "at": 0}


HOSTILE = [
    ("nothing", {}),
    ("../../etc/passwd", {}),
    ("lane", {}),
    ("lane", []),
    ("lane", None),
    ("lane", {"look": TEXT}),
    ("lane", {"look": TEXT, "at": -1}),
    ("lane", {"look": TEXT, "at": 3}),
    ("lane", {"look": TEXT, "at": "0"}),
    ("lane", {"look": TEXT, "at": 0.5}),
    ("lane", {"look": TEXT, "at": True}),
    ("lane", {"look": TEXT, "at": 2**70}),
    ("lane", {"look": TEXT, "at": 0, "more": 1}),
    ("lane", {"look": {"tokens": []}, "at": 0}),
    ("lane", {"look": {"tokens": [-1]}, "at": 0}),
    ("lane", {"look": {"tokens": [257]}, "at": 0}),
    ("lane", {"look": {"tokens": [2**40]}, "at": 0}),
    ("lane", {"look": {"tokens": [1.5]}, "at": 0}),
    ("lane", {"look": {"tokens": ["1"]}, "at": 0}),
    ("lane", {"look": {"tokens": [1] * 2049}, "at": 0}),
    ("lane", {"look": {"tokens": [1] * 65}, "at": 0}),  # more than this model has positions for
    ("lane", {"look": {"tokens": [1], "source": [1]}, "at": 0}),
    ("lane", edited(**{"blocks.99": "skip"})),
    ("lane", edited(**{"blocks.0": "explode"})),
    ("lane", edited(**{"blocks.0": None})),
    ("lane", edited(**{"blocks.0": {"do": "skip", "value": 3}})),
    ("lane", edited(**{"blocks.0.attn.z": {"do": "zero", "heads": [99]}})),
    ("lane", edited(**{"blocks.0.attn.z": {"do": "zero", "heads": "all"}})),
    ("lane", edited(**{"blocks.0.attn.z": {"do": "replace", "value": [[1, 2], [3]]}})),
    ("lane", edited(**{"blocks.0.attn.z": {"do": "replace", "value": "x" * 1000}})),
    ("lane", edited(**{"blocks.0.attn.z": {"do": "add", "value": {"__class__": "x"}}})),
    ("lane", edited(**{"blocks.0.attn.z": {"do": "scale", "value": 10**400}})),
    ("lane", edited(**{"blocks.0.attn.z": "resample"})),
    ("lane", edited(**{"positions": {"do": "shift", "value": 10**9}})),
    ("lane", edited(**{"": "zero"})),
    ("lane", edited(**{f"blocks.{n}": "skip" for n in range(65)})),
    ("stage", {"look": TEXT, "at": 0, "site": "x" * 1000}),
    ("stage", {"look": TEXT, "at": 0, "site": "../secret"}),
    ("stage", {"look": TEXT, "at": 0, "site": "blocks.0.attn.__class__"}),
    ("next", {"look": TEXT, "at": 0, "temperature": -1}),
    ("next", {"look": TEXT, "at": 0, "top_k": 0}),
    ("next", {"look": TEXT, "at": 0, "top_p": 2}),
    ("tokens", {"text": "x" * 70_000}),
    ("tokens", {"text": "x" * 3000}),
    ("tokens", {"text": ""}),
    ("tokens", {"text": "a", "side": "elsewhere"}),
    ("head", {"look": TEXT, "attention": "blocks.0.attn", "head": 99}),
    ("head", {"look": TEXT, "attention": "blocks.0.nothing", "head": 0}),
    ("write", {"look": TEXT, "prompt": 3, "count": 10**9}),
    ("write", {"look": TEXT, "prompt": 9}),
    ("placements", {"depths": [10**6]}),
    ("placements", {"depths": list(range(1, 400))}),
    ("sizes", {"base": "/etc/passwd"}),
    ("sizes", {"base": "../../secret.toml"}),
    ("sizes", {"base": "gpt2", "changes": {"layers": 10**18}}),
    ("run", {"path": "/etc"}),
]
RAW = [
    b"",
    b"{",
    b"[" * 10_000,
    b'{"look": NaN}',
    b'{"look": {"tokens": [1], "tokens": [2]}, "at": 0}',
    b'{"text": "\xff\xfe"}',
    b'{"text": "\\ud800"}',
    b"\x00" * 100,
]


def test_each_is_refused_in_words(desk: tuple[routes.Desk, str]) -> None:
    made, where = desk
    before = plain(where)
    for name, given in HOSTILE:
        status, body = post(where, f"/api/ask/{name}", given)
        assert 400 <= status < 500, (name, given, status, body[:200])
        message = json.loads(body)["error"]["message"]
        assert message
        assert not any(word in message for word in ("Traceback", "/work", "site-packages", "made a mistake")), message
    for raw in RAW:
        status, body = post(where, "/api/ask/tokens", raw)
        assert 400 <= status < 500, (raw[:40], status, body[:200])
    assert plain(where) == before
    assert not made.jobs
    assert {name for name, _ in HOSTILE} <= {*QUESTIONS, "nothing", "../../etc/passwd"}


def plain(where: str) -> bytes:
    status, body = post(where, "/api/ask/lane", {"look": TEXT, "at": 2})
    assert status == 200
    return body


def test_a_broken_model_is_shown_as_it_is(desk: tuple[routes.Desk, str]) -> None:
    """Infinity and NaN are answers too."""
    _, where = desk
    status, body = post(where, "/api/ask/lane", edited(**{"blocks.0.ffn.out": {"do": "scale", "value": 1e38}}))
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
def test_other_sites_are_not_answered(headers: dict[str, str], desk: tuple[routes.Desk, str]) -> None:
    status, _ = post(desk[1], "/api/ask/about", {}, headers)
    assert 400 <= status < 500


def test_files_of_the_page_and_no_others(desk: tuple[routes.Desk, str]) -> None:
    connection = HTTPConnection(urlsplit(desk[1]).netloc, timeout=60)
    for path, status in {
        "/": 200, "/page.js": 200, "/page.css": 200, "/icon.svg": 200, "/stamp": 404, "/built.py": 404,
        "/..%2fbuilt.py": 404, "/%2e%2e/built.py": 404, "/page.js%00": 400, "/api/ask/about": 405,
    }.items():  # fmt: skip
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == status, path
        assert "script-src 'self'" in (answer.getheader("content-security-policy") or "")
    connection.close()


def test_whoever_goes_away_stops_the_work(desk: tuple[routes.Desk, str]) -> None:
    made, where = desk
    given = {"depths": [48, 48, 48], "seeds": 8, "d_model": 256}
    connection = HTTPConnection(urlsplit(where).netloc, timeout=60)
    connection.request("POST", "/api/ask/placements", json.dumps(given), {"content-type": "application/json"})
    end = time.monotonic() + 60
    while not made.jobs and time.monotonic() < end:
        time.sleep(0.01)
    assert made.jobs
    connection.close()
    while made.jobs and time.monotonic() < end:
        time.sleep(0.05)
    assert not made.jobs
