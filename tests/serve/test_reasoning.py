"""Reasoning is separated from the answer, where the chat template marks it."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_templates import STYLES
from support.scripted_model import scripted_checkpoint
from support.server import RunningServer, start_server

from cutaway.serve.openai.reasoning import ReasoningParser, is_opened_by_prompt, marks_reasoning
from cutaway.tokenizer import byte_tokenizer

pytestmark = pytest.mark.unchecked
MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def split(pieces: Sequence[str], *, is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(is_open=is_open)
    parts = [*map(parser.feed, pieces), parser.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\na\n\nb\n</think>\n\nfour", False, "a\n\nb", "four"),
        ("\n<think>a</think>four", False, "a", "four"),
        ("a\nb\n</think>\n\nfour\n", True, "a\nb", "four\n"),
        ("four", False, "", "four"),
        ("", False, "", ""),
        ("\n\nfour <think>no</think>", False, "", "\n\nfour <think>no</think>"),
        ("a < b </thi", True, "a < b </thi", ""),
        ("<think>a\n", False, "a\n", ""),
        ("<thin", False, "", "<thin"),
        ("</think>\n\nfour", True, "", "four"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
    ],
)
def test_split(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert split([text], is_open=is_open) == (reasoning, content)


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<", "</thin", " ", "é"]), max_size=9).map(
        "".join
    ),
    is_open=st.booleans(),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_pieces_of_any_size_give_the_same_split(text: str, is_open: bool, cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert split(pieces, is_open=is_open) == split([text], is_open=is_open)


@pytest.mark.parametrize(
    ("style", "kwargs", "expected"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("qwen3-thinking", {}, True),
        ("chatml", {}, None),
    ],
)
def test_the_generation_prompt_says_whether_reasoning_is_open(style: str, kwargs: Any, expected: bool | None) -> None:
    tokenizer = byte_tokenizer(special_tokens=tuple(STYLES[style].special_tokens.split()))
    tokenizer.chat_template = STYLES[style].template
    assert marks_reasoning(tokenizer) == (expected is not None)
    if expected is not None:
        request: Any = type("Request", (), {"input_ids": tokenizer.encode_chat(MESSAGES, **kwargs)})
        assert is_opened_by_prompt(tokenizer, request) == expected


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }};{% endfor %}a:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}{{ reasoning_effort }}<think>\n{% endif %}"
)


PARTS = ["<think>\n", "Rea", "son\n", "</thi", "nk>", "\n\n", "fo", "ur"]
THINKING = {
    "role": "assistant",
    "reasoning": "Reason",
    "reasoning_content": "Reason",
    "content": "four",
    "refusal": None,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(scripted_checkpoint([PARTS], chat_template=TEMPLATE)) as running:
        yield running


def post(running: RunningServer, body: dict[str, Any]) -> tuple[int, Any]:
    body = {"messages": MESSAGES, "temperature": 0, **body}
    headers = {"Content-Type": "application/json"}
    status, _, content = running.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    if not body.get("stream"):
        return status, json.loads(content)
    events = [event.removeprefix("data: ") for event in content.decode().split("\n\n")]
    return status, [json.loads(event) for event in events[:-2]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, THINKING),
        ({"max_tokens": 1}, THINKING | {"reasoning": "Rea", "reasoning_content": "Rea", "content": None}),
        ({"chat_template_kwargs": {"enable_thinking": False}},
         {"role": "assistant", "content": "\n\nfour", "refusal": None}),
        ({"reasoning_effort": "none"}, THINKING),
        ({"reasoning_effort": "low"}, THINKING),
    ],
)  # fmt: skip
def test_message_has_reasoning_and_content(server: RunningServer, fields: Any, message: Any) -> None:
    status, response = post(server, fields)
    assert status == 200
    assert response["choices"][0]["message"] == message
    deltas = [choice["delta"] for chunk in post(server, fields | {"stream": True})[1] for choice in chunk["choices"]]
    joined = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")}
    assert joined == {name: message.get(name) or "" for name in joined}
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens(stream: bool) -> None:
    """They are not in the text of a completion, but they separate the reasoning."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}go"
    parts = ["go", "<think>", "Rea", "son", "</think>", "four"]
    checkpoint = scripted_checkpoint([parts], chat_template=template, special_tokens=("<think>", "</think>"))
    with start_server(checkpoint) as running:
        _, response = post(running, {"stream": stream})
        assert post(running, {"stream": False})[1]["choices"][0]["message"] == THINKING
    if stream:
        deltas = [choice["delta"] for chunk in response for choice in chunk["choices"]]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "Reason"
        assert "".join(delta.get("content", "") for delta in deltas) == "four"


def test_logprobs_cover_reasoning_and_content(server: RunningServer) -> None:
    body = {"logprobs": True, "stream": True}
    tokens = [
        row["token"]
        for chunk in post(server, body)[1]
        for choice in chunk["choices"]
        for row in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert tokens == PARTS[1:]


def test_reasoning_of_earlier_messages_is_in_the_prompt(server: RunningServer) -> None:
    answer = {"role": "assistant", "content": "four", "reasoning_content": "Reason"}
    texts = []
    for message in (answer, answer | {"reasoning": "other"}, {"role": "assistant", "content": "four"}):
        body = json.dumps({"messages": [*MESSAGES, message]})
        content = server.request("POST", "/tokenize", body, {"Content-Type": "application/json"})[2]
        texts.append("".join(json.loads(content)["token_strs"]))
    assert "Rea" in texts[0]
    assert texts[0] == texts[1]
    assert "Rea" not in texts[2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "sets messages"),
        ({"chat_template_kwargs": {"self": 1}}, "sets self"),
    ],
)
def test_variables_of_the_server_are_refused(server: RunningServer, body: dict[str, Any], message: str) -> None:
    status, response = post(server, body)
    assert status == 400
    assert message in response["error"]["message"]


def test_templates_without_reasoning() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}go"
    with start_server(scripted_checkpoint([["go", "<think>", "a", "</think>"]], chat_template=template)) as running:
        message = post(running, {})[1]["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "<think>a</think>", "refusal": None}
        assert post(running, {"reasoning_effort": "none"})[0] == 200
        status, response = post(running, {"reasoning_effort": "high"})
        assert status == 400
        assert "does not read it" in response["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "echo": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "suffix": "a"}),
        ("/v1/completions", {"prompt": "a", "reasoning_effort": "low"}),
        ("/v1/completions", {"prompt": "a", "chat_template_kwargs": {"a": 1}}),
    ],
)
def test_fields_of_other_routes_are_refused(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    status, _, content = server.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    assert status == 400
    assert json.loads(content)["error"]["code"] == "unsupported_parameter"
