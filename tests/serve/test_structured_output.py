"""Structured output through the OpenAI client: answers match their format and equal `generate`."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from support.server import CHAT_TEMPLATE, RunningServer, byte_checkpoint, load_tiny_python, start_server

import cutaway as ct

pytestmark = pytest.mark.unchecked


class Point(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    x: bool
    y: bool


SCHEMA = Point.model_json_schema()
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(load_tiny_python()) as running:
        yield running


@pytest.fixture(scope="module")
def chat_server() -> Iterator[RunningServer]:
    checkpoint = byte_checkpoint("tiny-llama", special_tokens=("<|endoftext|>",), chat_template=CHAT_TEMPLATE)
    with start_server(checkpoint, max_model_len=512) as running:
        yield running


def client(running: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=120)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"guided_json": SCHEMA}, {"schema": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"schema": SCHEMA}),
        ({"guided_regex": "[a-c]{4}"}, {"regex": "[a-c]{4}"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_grammar": 'start: "a" "b"'}, {"grammar": 'start: "a" "b"'}),
        ({"structured_outputs": {"regex": "[a-c]{4}"}}, {"regex": "[a-c]{4}"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"schema": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
            {"schema": SCHEMA},
        ),
        ({"response_format": {"type": "text"}}, {}),
    ],
)
@pytest.mark.sample(5)
def test_completions_equal_generate(server: RunningServer, fields: dict[str, Any], options: dict[str, Any]) -> None:
    (expected,) = ct.generate(server.checkpoint, "def f(", max_new_tokens=32, **options)
    fields = {"model": "tiny", "prompt": "def f(", "max_tokens": 32, "temperature": 0, "extra_body": fields}
    response = client(server).completions.create(**fields)
    assert (response.choices[0].text, response.choices[0].finish_reason) == (expected.text, expected.finish_reason)
    streamed = [chunk.choices[0].text for chunk in client(server).completions.create(**fields, stream=True)]
    assert "".join(streamed) == expected.text


def test_chat_returns_parsed_objects_and_json(chat_server: RunningServer) -> None:
    parsed = client(chat_server).chat.completions.parse(**CHAT, response_format=Point, n=2, seed=1, max_tokens=200)
    for choice in parsed.choices:
        assert isinstance(choice.message.parsed, Point)
        assert choice.finish_reason == "stop"
    response = client(chat_server).chat.completions.create(
        **CHAT, response_format={"type": "json_object"}, max_tokens=100
    )
    choice_content = response.choices[0].message.content or ""
    if response.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(choice_content), dict)
    else:
        assert re.match(r"\s*\{", choice_content)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format has no json_schema.schema"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex and response_format set more",
        ),
        ({"guided_json": {"type": "nothing"}}, "schema cannot be used"),
        ({"guided_regex": "("}, "regex cannot be used"),
        ({"guided_choice": []}, "choice has 0 strings"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"guided_regex": "((a{1,1000}){1,1000}){1,1000}", "max_tokens": 200}, "cannot follow its grammar"),
    ],
)
def test_unusable_formats_are_bad_requests(chat_server: RunningServer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client(chat_server).chat.completions.create(**{**CHAT, "extra_body": fields})
    assert client(chat_server).chat.completions.create(**CHAT, max_tokens=1).choices  # the server still answers
