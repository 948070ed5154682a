"""Parsing and validation of JSON bodies: equal to `json.loads` within the limits, and bounded work outside of them."""

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from cutaway.serve import json_body
from cutaway.serve.errors import APIError
from cutaway.serve.json_body import INLINE_BODY_BYTES, JSONBodyParser, parse_json_body
from cutaway.serve.limits import Limits
from cutaway.serve.openai import protocol

pytestmark = pytest.mark.unchecked
LIMITS = Limits(max_json_depth=4, max_json_values=40)
JSON_TEXT = st.text(alphabet='a"\\[]{},:é\n', max_size=6)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | JSON_TEXT,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(JSON_TEXT, children, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES, st.booleans())
def test_parsed_value_equals_that_of_json(value: Any, ensure_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    assert parse_json_body(body, Limits()) == json.loads(body)


@given(JSON_VALUES)
def test_depth_and_number_of_values_are_those_of_the_value(value: Any) -> None:
    """Brackets, commas and quotes in strings do not count."""

    def depth(value: Any) -> int:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if children is None else 1 + max(map(depth, children), default=0)

    body, exact = json.dumps(value).encode(), Limits(max_json_depth=depth(value))
    assert parse_json_body(body, exact) == value
    if depth(value):
        with pytest.raises(APIError, match="nested deeper"):
            parse_json_body(body, Limits(max_json_depth=depth(value) - 1))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"]", "closing bracket without an opening one"),
        (b"[]]" + b"[" * 9, "closing bracket without an opening one"),
        (b'"' + b"]" * 30, "Unterminated string"),
        (b"[" * 5, "nested deeper than 4"),
        (b'[["]]"' + b"[" * 3 + b"]" * 5, "nested deeper than 4"),
        (b'["\\\\"' + b"[" * 4, "nested deeper than 4"),
        (b'["\\"' + b"[" * 9 + b'"]extra', "Extra data"),
        (b"9" * 5000, "too many digits"),
        (b"]" * 2_000_000, "more than 40 values"),
        (b"[" * 2_000_000, "more than 40 values"),
        (b'""' * 1_000_000, "more than 40 values"),
        (b'"\\\\"' * 500_000, "more than 40 values"),
        (b"[" + b"0," * 40 + b"0]", "more than 40 values"),
    ],
)  # fmt: skip
def test_hostile_structure_is_rejected(body: bytes, message: str) -> None:
    with pytest.raises(APIError, match=message):
        parse_json_body(body, LIMITS)


COMPLETION, CHAT = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
MESSAGE, PART = {"role": "user", "content": "a"}, {"type": "text", "text": "a"}
LONG_LISTS: dict[str, tuple[type[BaseModel], dict[str, Any], str]] = {
    "floats as prompt": (protocol.CompletionRequest, {"prompt": [1.5] * 99_000}, "prompt"),
    "prompts": (protocol.CompletionRequest, {"prompt": ["a"] * 99_000}, "prompt"),
    "token ids": (protocol.CompletionRequest, {"prompt": [[1]] * 49_000}, "prompt"),
    "invalid token ids": (protocol.CompletionRequest, {"prompt": [-1] * 99_000}, "prompt"),
    "stop strings": (protocol.CompletionRequest, COMPLETION | {"stop": ["a"] * 99_000}, "stop"),
    "numbers as stop strings": (protocol.CompletionRequest, COMPLETION | {"stop": [1] * 9}, "stop"),
    "stop_token_ids": (protocol.CompletionRequest, COMPLETION | {"stop_token_ids": [1] * 99_000}, "stop_token_ids"),
    "logit_bias": (
        protocol.CompletionRequest,
        COMPLETION | {"logit_bias": {str(i): 1000 for i in range(49_000)}},
        "logit_bias",
    ),
    "messages": (protocol.ChatCompletionRequest, {"messages": [MESSAGE] * 49_000}, "messages"),
    "invalid messages": (protocol.ChatCompletionRequest, {"messages": [{"role": 1}] * 900}, "messages"),
    "content parts": (
        protocol.ChatCompletionRequest,
        {"messages": [MESSAGE | {"content": [PART] * 16}] * 1000},
        "messages",
    ),
    "embedding inputs": (protocol.EmbeddingRequest, {"input": [1.5] * 99_000}, "input"),
    "texts to classify": (protocol.ClassificationRequest, {"input": [{}] * 99_000}, "input"),
    "messages to tokenize": (protocol.TokenizeRequest, {"messages": [MESSAGE] * 49_000}, "messages"),
    "tokens to detokenize": (protocol.DetokenizeRequest, {"tokens": ["a"] * 99_000}, "tokens"),
}


@pytest.mark.parametrize("name", LONG_LISTS)
def test_validation_of_long_lists_stops_at_the_first_error(name: str) -> None:
    """There is at most one error for each type of a union, not one for each of 99,000 items."""
    model, value, field = LONG_LISTS[name]
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    assert caught.value.error_count() <= 8
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_validation_of_all_lists_stops_at_the_first_error() -> None:
    """Also those of nested models and of fields without a maximum length."""

    class Item(protocol.FailFastModel):
        names: list[str]

    class Request(protocol.OpenAIBaseModel):
        items: dict[str, list[Item]] | None = None
        names: tuple[list[int], ...] | list[list[int]] = []

    for value in ({"items": {"a": [{"names": [1] * 99}] * 9}}, {"names": [["a"] * 99] * 9}):
        with pytest.raises(ValidationError) as caught:
            Request.model_validate(value)
        assert caught.value.error_count() <= 2


def test_values_within_the_limits_are_valid() -> None:
    protocol.CompletionRequest.model_validate(COMPLETION | {"logit_bias": {str(i): 1 for i in range(1024)}})
    protocol.CompletionRequest.model_validate({"prompt": [[1] * 1500] * 64, "stop": ["a"] * 16})
    protocol.ChatCompletionRequest.model_validate({"messages": [MESSAGE | {"content": [PART] * 4}] * 1024})
    protocol.EmbeddingRequest.model_validate({"input": ["a"] * 256})


def large_body(size: int) -> bytes:
    return json.dumps("a" * (size - 2)).encode()


def test_large_bodies_are_parsed_in_a_thread_and_small_ones_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, str] = {}

    def record_thread(body: bytes, limits: Limits) -> object:
        threads[len(body)] = threading.current_thread().name
        return parse_json_body(body, limits)

    async def parse_both() -> None:
        parser = JSONBodyParser(Limits())
        for size in (INLINE_BODY_BYTES, INLINE_BODY_BYTES + 1):
            assert await parser.parse(large_body(size)) == "a" * (size - 2)

    monkeypatch.setattr(json_body, "parse_json_body", record_thread)
    asyncio.run(parse_both())
    assert threads[INLINE_BODY_BYTES] == threading.current_thread().name
    assert threads[INLINE_BODY_BYTES + 1].startswith("cutaway json")


def test_smaller_bodies_are_parsed_first_and_canceled_ones_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    started, proceed = threading.Event(), threading.Event()

    def record_size(body: bytes, limits: Limits) -> object:
        parsed.append(len(body))
        started.set()
        assert proceed.wait(60)
        return parse_json_body(body, limits)

    async def parse_several() -> None:
        parser = JSONBodyParser(Limits())
        sizes = [50_000, 400_000, 300_000, 200_000, 100_000]
        tasks = [asyncio.create_task(parser.parse(large_body(size))) for size in sizes]
        while not started.is_set():
            await asyncio.sleep(0.001)
        tasks[2].cancel()  # while it waits
        tasks[0].cancel()  # while it is parsed
        proceed.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [
            True,
            False,
            True,
            False,
            False,
        ]
        with pytest.raises(APIError, match="not JSON"):
            await parser.parse(b" " * 20_000)  # the parser also continues after an error

    monkeypatch.setattr(json_body, "parse_json_body", record_size)
    asyncio.run(parse_several())
    assert parsed == [50_000, 100_000, 200_000, 400_000, 20_000]
