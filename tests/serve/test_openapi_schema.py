"""Schemathesis tests: valid and invalid requests generated from the API's OpenAPI schema."""

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
EXAMPLES = 500 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 6
"""Examples per route and generation mode."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
ROUTES = [
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/score", "POST"),
    ("/v1/rerank", "POST"),
    ("/classify", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(
        byte_checkpoint("tiny-llama", chat_template=CHAT_TEMPLATE), limits=Limits(max_tokens=8)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def schema(server: RunningServer) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_schema_has_every_route(schema: schemathesis.BaseSchema) -> None:
    assert "422" not in str(schema.raw_schema)  # validation errors have status 400
    running = {(path, method) for path, methods in schema.raw_schema["paths"].items() for method in methods}
    assert running == {(path, method.lower()) for path, method in ROUTES}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [(*route, GenerationMode.POSITIVE) for route in ROUTES]
    + [(*route, GenerationMode.NEGATIVE) for route in ROUTES if route[1] == "POST"],
)
def test_responses_conform_to_the_schema(
    server: RunningServer, schema: schemathesis.BaseSchema, path: str, method: str, mode: GenerationMode
) -> None:
    num_examples = 0

    @hypothesis.settings(max_examples=EXAMPLES, derandomize=True, database=None)
    @hypothesis.given(case=schema[path][method].as_strategy(generation_mode=mode))
    def run_case(case: schemathesis.Case) -> None:
        nonlocal num_examples
        num_examples += 1
        response = case.call(base_url=server.url, timeout=120)
        case.validate_response(response, checks=CHECKS)
        assert response.status_code < 500
        assert b"Traceback" not in response.content

    run_case()
    assert num_examples
    assert server.request("GET", "/health")[0] == 200
    assert server.wait_until_idle()
