"""Invalid and hostile inspector queries are rejected with a message, and the model is unchanged."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.inspector import open_inspector, run_query
from support.server import serve_in_thread, wait_until

import cutaway as ct
from cutaway.config import to_toml
from cutaway.serve import static_files
from cutaway.serve.app import build_app
from cutaway.serve.inspect import routes
from cutaway.serve.inspect.queries import QUERIES
from cutaway.serve.server import bind_socket, build_access_policy

pytestmark = pytest.mark.unchecked
TEXT = {"tokens": [1, 2, 3]}


@pytest.fixture(scope="module")
def executor_and_url() -> Iterator[tuple[routes.QueryExecutor, str]]:
    executor = routes.QueryExecutor(open_inspector("tiny-gpt"))
    routers = [routes.build_router(executor), static_files.build_static_router()]
    app = build_app(routers, access_policy=build_access_policy("127.0.0.1", None), on_shutdown=[executor.close])
    with serve_in_thread(app, bind_socket("127.0.0.1", 0)) as url:
        yield executor, url


def post(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", path, data, {"content-type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def edited_query(**edits: Any) -> dict[str, Any]:
    return {"input": TEXT | {"edits": edits}, "position": 0}


INVALID_QUERIES: list[tuple[str, Any, str]] = [
    ("nothing", {}, "there is no such query"),
    ("../../etc/passwd", {}, "there is no such path"),
    ("journey", {}, "input: Field required"),
    ("journey", [], "should be an object"),
    ("journey", None, "should be an object"),
    ("journey", {"input": TEXT}, "position: Field required"),
    ("journey", {"input": TEXT, "position": -1}, "position: Input should be greater"),
    ("journey", {"input": TEXT, "position": 3}, "position contains 3"),
    ("journey", {"input": TEXT, "position": "0"}, "position: Input should be a valid integer"),
    ("journey", {"input": TEXT, "position": 0.5}, "position: Input should be a valid integer"),
    ("journey", {"input": TEXT, "position": True}, "position: Input should be a valid integer"),
    ("journey", {"input": TEXT, "position": 2**70}, "position: Input should be less"),
    ("journey", {"input": TEXT, "position": 0, "more": 1}, "more: Extra inputs"),
    ("journey", {"input": {"tokens": []}, "position": 0}, "tokens: Tuple should have at least 1"),
    ("journey", {"input": {"tokens": [-1]}, "position": 0}, "tokens.0: Input should be greater"),
    ("journey", {"input": {"tokens": [257]}, "position": 0}, "use ids 0 to 256, the vocabulary"),
    ("journey", {"input": {"tokens": [2**40]}, "position": 0}, "tokens.0: Input should be less"),
    ("journey", {"input": {"tokens": [1.5]}, "position": 0}, "tokens.0: Input should be a valid integer"),
    ("journey", {"input": {"tokens": ["1"]}, "position": 0}, "tokens.0: Input should be a valid integer"),
    ("journey", {"input": {"tokens": [1] * 2049}, "position": 0}, "tokens: Tuple should have at most 2048"),
    (
        "journey",
        {"input": {"tokens": [1] * 65}, "position": 0},
        "positions 0 to 63 only",
    ),  # more than the model's position embeddings
    ("journey", {"input": {"tokens": [1], "source": [1]}, "position": 0}, "takes no source"),
    ("journey", edited_query(**{"blocks.99": "skip"}), "which does not apply to 'blocks.99'"),
    ("journey", edited_query(**{"blocks.0": "explode"}), "use one of zero, mean, resample"),
    ("journey", edited_query(**{"blocks.0": None}), "is a NoneType"),
    ("journey", edited_query(**{"blocks.0": {"do": "skip", "value": 3}}), "'skip' takes none"),
    ("journey", edited_query(**{"blocks.0.attn.z": {"do": "zero", "heads": [99]}}), "heads contains 99"),
    ("journey", edited_query(**{"blocks.0.attn.z": {"do": "zero", "heads": "all"}}), "heads is 'all'"),
    (
        "journey",
        edited_query(**{"blocks.0.attn.z": {"do": "replace", "value": [[1, 2], [3]]}}),
        "'replace' has the value",
    ),
    ("journey", edited_query(**{"blocks.0.attn.z": {"do": "replace", "value": "x" * 1000}}), "'replace' has the value"),
    ("journey", edited_query(**{"blocks.0.attn.z": {"do": "add", "value": {"__class__": "x"}}}), "'add' has the value"),
    ("journey", edited_query(**{"blocks.0.attn.z": {"do": "scale", "value": 10**400}}), "'scale' has the value"),
    ("journey", edited_query(**{"blocks.0.attn.z": "resample"}), "pass at least two batch rows"),
    ("journey", edited_query(**{"positions": {"do": "shift", "value": 10**9}}), "'shift' moves a token"),
    ("journey", edited_query(**{"": "zero"}), "no site ''"),
    ("journey", edited_query(**{f"blocks.{n}": "skip" for n in range(65)}), "edits: Dictionary should have at most 64"),
    ("activation", {"input": TEXT, "position": 0, "site": "x" * 1000}, "site: String should have at most 80"),
    ("activation", {"input": TEXT, "position": 0, "site": "../secret"}, "not a site of this model"),
    ("activation", {"input": TEXT, "position": 0, "site": "blocks.0.attn.__class__"}, "not a site of this model"),
    ("next_token", {"input": TEXT, "position": 0, "temperature": -1}, "temperature: Input should be greater"),
    ("next_token", {"input": TEXT, "position": 0, "top_k": 0}, "top_k: Input should be greater"),
    ("next_token", {"input": TEXT, "position": 0, "top_p": 2}, "top_p: Input should be less"),
    ("tokenize", {"text": "x" * 70_000}, "text: String should have at most"),
    ("tokenize", {"text": "x" * 3000}, "the maximum context length of this model is"),
    ("tokenize", {"text": ""}, "has no tokens"),
    ("tokenize", {"text": "a", "field": "elsewhere"}, "field: Input should be"),
    ("attention_head", {"input": TEXT, "attention": "blocks.0.attn", "head": 99}, "head is 99"),
    (
        "attention_head",
        {"input": TEXT, "attention": "blocks.0.nothing", "head": 0},
        "is not an attention of this model",
    ),
    ("generate", {"input": TEXT, "num_prompt_tokens": 3, "num_tokens": 10**9}, "num_tokens: Input should be less"),
    ("generate", {"input": TEXT, "num_prompt_tokens": 9}, "num_prompt_tokens is 9"),
    ("gradients_by_placement", {"depths": [10**6]}, "depths.0: Input should be 6, 12, 24, 48 or 96"),
    ("gradients_by_placement", {"depths": [6] * 400}, "depths: Tuple should have at most 5"),
    ("model_sizes", {"models": [{"base": "gpt2", "layers": 10**18}]}, "layers: Input should be less"),
    ("memory_fit", {"model": {"base": "/etc/passwd"}}, "is not a preset"),
    ("memory_fit", {"model": {"base": "../../secret.toml"}}, "is not a preset"),
    ("memory_fit", {"model": {"base": "gpt2"}, "hardware": "/etc/passwd"}, "is not a known device"),
    ("memory_fit", {"model": {"base": "gpt2"}, "dtype": "/etc/passwd"}, "is not known; use one of"),
    ("run_metrics", {"known_rows": -1}, "known_rows: Input should be greater"),
    ("variant_continuation", {"name": "../../etc/passwd", "text": "a"}, "is not a trained variant"),
    ("variant_continuation", {"name": "base/../base", "text": "a"}, "is not a trained variant"),
    ("attention_head", {"input": TEXT, "attention": "/etc/passwd", "head": 0}, "is not an attention of this model"),
]
INVALID_BODIES = [
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


def test_invalid_queries_are_client_errors_with_a_message(executor_and_url: tuple[routes.QueryExecutor, str]) -> None:
    executor, url = executor_and_url
    before = journey_bytes(url)
    for name, params, reason in INVALID_QUERIES:
        status, body = post(url, f"/api/query/{name}", params)
        assert 400 <= status < 500, (name, params, status, body[:200])
        message = json.loads(body)["error"]["message"]
        assert reason in message, (name, params, message)
        assert not any(word in message for word in ("Traceback", "/work", "site-packages", "internal server error")), (
            message
        )
    for invalid_body in INVALID_BODIES:
        status, body = post(url, "/api/query/tokenize", invalid_body)
        assert 400 <= status < 500, (invalid_body[:40], status, body[:200])
    assert journey_bytes(url) == before
    assert not executor.jobs
    assert {name for name, _, _ in INVALID_QUERIES} <= {*QUERIES, "nothing", "../../etc/passwd"}


@pytest.mark.parametrize("case", range(len(INVALID_QUERIES)))
def test_invalid_parameters_are_fields_of_the_query(case: int) -> None:
    """A query with another parameter would be rejected for that, so it would test nothing about the value."""
    name, params, reason = INVALID_QUERIES[case]
    if name in QUERIES and isinstance(params, dict):
        unknown = params.keys() - QUERIES[name].model_fields
        assert unknown == ({"more"} if "Extra inputs" in reason else set())


def test_sizes_of_paths_are_not_read(
    executor_and_url: tuple[routes.QueryExecutor, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of `model_sizes` with an error does not fail the other models."""
    file = tmp_path / "valid.toml"
    file.write_text(to_toml(ct.config("gpt2")))
    assert ct.config(file) == ct.config("gpt2")  # it would be valid, if it were read
    monkeypatch.chdir(tmp_path)
    for base in ("/etc/passwd", "valid.toml", "./valid.toml", "../" + tmp_path.name + "/valid.toml"):
        inspector, models = executor_and_url[0].inspector, [{"base": base}, {"base": "gpt2"}]
        data, _ = run_query(inspector, "model_sizes", models=models)
        assert "is not a preset" in data["models"][0]["error"]
        assert data["models"][1]["num_parameters"] == 124_439_808


def journey_bytes(url: str) -> bytes:
    status, body = post(url, "/api/query/journey", {"input": TEXT, "position": 2})
    assert status == 200
    return body


def test_infinity_and_nan_are_null_in_json(executor_and_url: tuple[routes.QueryExecutor, str]) -> None:
    _, url = executor_and_url
    status, body = post(url, "/api/query/journey", edited_query(**{"blocks.0.ffn.out": {"do": "scale", "value": 1e38}}))
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
def test_cross_origin_queries_are_rejected(
    headers: dict[str, str], executor_and_url: tuple[routes.QueryExecutor, str]
) -> None:
    status, _ = post(executor_and_url[1], "/api/query/model_info", {}, headers)
    assert 400 <= status < 500


def test_only_static_files_are_served(executor_and_url: tuple[routes.QueryExecutor, str]) -> None:
    connection = HTTPConnection(urlsplit(executor_and_url[1]).netloc, timeout=60)
    for path, status in {
        "/": 200, "/page.js": 200, "/page.css": 200, "/icon.svg": 200, "/stamp": 404, "/static_files.py": 404,
        "/..%2fstatic_files.py": 404, "/%2e%2e/static_files.py": 404, "/page.js%00": 400, "/api/query/model_info": 405,
    }.items():  # fmt: skip
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        assert response.status == status, path
        assert "script-src 'self'" in (response.getheader("content-security-policy") or "")
    connection.close()


def test_disconnect_cancels_the_query(executor_and_url: tuple[routes.QueryExecutor, str]) -> None:
    executor, url = executor_and_url
    params = {"depths": [48, 24], "num_seeds": 10}
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request(
        "POST", "/api/query/gradients_by_placement", json.dumps(params), {"content-type": "application/json"}
    )
    assert wait_until(lambda: bool(executor.jobs))
    connection.close()
    assert wait_until(lambda: not executor.jobs)
