"""What the API says of itself, held against it: requests drawn from its own description, good ones and bad ones."""

import os
from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from support.server import CHAT_TEMPLATE, RunningServer, byte_checkpoint, start_server

from cutaway.serve.limits import Limits

pytestmark = pytest.mark.unchecked
EXAMPLES = 500 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 25
"""Of each route and kind."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
ROUTES = [
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/embeddings", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE), limits=Limits(max_tokens=8)) as found:
        yield found


@pytest.fixture(scope="module")
def described(server: RunningServer) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_route_is_described(described: schemathesis.BaseSchema) -> None:
    assert "422" not in str(described.raw_schema)  # which no route answers with
    found = {(path, method) for path, methods in described.raw_schema["paths"].items() for method in methods}
    assert found == {(path, method.lower()) for path, method in ROUTES}


@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [(*route, GenerationMode.POSITIVE) for route in ROUTES]
    + [(*route, GenerationMode.NEGATIVE) for route in ROUTES if route[1] == "POST"],
)
def test_answers_are_as_described(
    server: RunningServer, described: schemathesis.BaseSchema, path: str, method: str, mode: GenerationMode
) -> None:
    asked = 0

    @hypothesis.settings(max_examples=EXAMPLES, derandomize=True, database=None)
    @hypothesis.given(case=described[path][method].as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        nonlocal asked
        asked += 1
        answer = case.call(base_url=server.url, timeout=120)
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code < 500
        assert b"Traceback" not in answer.content

    ask()
    assert asked
    assert server.request("GET", "/health")[0] == 200
    assert server.wait_until_idle()
