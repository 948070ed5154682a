"""Tool calls: formats of chat templates, and a parser whose result does not depend on how the text is split."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import chat_templates

from cutaway.tokenizer.chat import shipped_templates
from cutaway.tokenizer.chat.tool_calls import (
    GENERIC_JSON,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    ParsedText,
    ToolCallParser,
    describe_tools,
    detect_tool_call_format,
)

NAMES = ("get_weather", "add")
WEATHER: dict[str, Any] = {"city": 'K"öln', "days": [1, {"a": "}"}]}
WEATHER_JSON, ADD_JSON = json.dumps(WEATHER), '{"x": 1, "y": 2}'
CASES: dict[str, tuple[Any, str, str, list[tuple[str, str]]]] = {
    "hermes": (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER_JSON}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "add", "arguments": {ADD_JSON}}}\n</tool_call>',
        "Let me see.",
        [("get_weather", WEATHER_JSON), ("add", ADD_JSON)],
    ),
    "arguments before the name": (
        HERMES,
        f'<tool_call>{{"arguments": {ADD_JSON}, "name": "add"}}</tool_call>',
        "",
        [("add", ADD_JSON)],
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "text after a call": (
        HERMES,
        f'<tool_call>{{"name": "add", "arguments": {ADD_JSON}}}</tool_call>\nDone.',
        "Done.",
        [("add", ADD_JSON)],
    ),
    "unknown tool": (HERMES, '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    "cut off": (HERMES, '<tool_call>{"name": "add", "arguments": {"x": 1', "", [("add", '{"x": 1')]),
    "cut off before the name": (HERMES, 'Hm. <tool_call>{"na', 'Hm.<tool_call>{"na', []),
    "a less-than sign": (HERMES, "1 < 2 <tool", "1 < 2 <tool", []),
    "llama3": (
        LLAMA3_JSON,
        f'{{"name": "get_weather", "parameters": {WEATHER_JSON}}}; {{"name": "add", "parameters": {ADD_JSON}}}',
        "",
        [("get_weather", WEATHER_JSON), ("add", ADD_JSON)],
    ),
    "python tag": (
        LLAMA3_JSON,
        f'<|python_tag|>{{"name": "add", "parameters": {ADD_JSON}}}',
        "",
        [("add", ADD_JSON)],
    ),
    "JSON that is no call": (LLAMA3_JSON, '{"answer": {"name": "add"}} x', '{"answer": {"name": "add"}} x', []),
    "JSON in the text": (LLAMA3_JSON, 'It is {"name": "add"}', 'It is {"name": "add"}', []),
    "mistral list": (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER_JSON}}}, '
        f'{{"name": "add", "arguments": {ADD_JSON}}}]',
        "",
        [("get_weather", WEATHER_JSON), ("add", ADD_JSON)],
    ),
    "mistral name": (
        MISTRAL,
        f"Hm.[TOOL_CALLS]get_weather[ARGS]{WEATHER_JSON}[TOOL_CALLS]add[ARGS]{ADD_JSON}",
        "Hm.",
        [("get_weather", WEATHER_JSON), ("add", ADD_JSON)],
    ),
    "mistral unknown name": (MISTRAL, "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    "json object": (GENERIC_JSON, f'{{"name": "add", "arguments": {ADD_JSON}}}', "", [("add", ADD_JSON)]),
    "json list": (
        GENERIC_JSON,
        f' [{{"name": "add", "arguments": {ADD_JSON}}},\n{{"name": "add", "parameters": {ADD_JSON}}}]',
        "",
        [("add", ADD_JSON), ("add", ADD_JSON)],
    ),
    "json answer": (GENERIC_JSON, '{"result": 3}', '{"result": 3}', []),
    "a list of numbers": (GENERIC_JSON, "[1, 2]", "[1, 2]", []),
    "plain text": (GENERIC_JSON, "Hello there.\n", "Hello there.\n", []),
}


def parse(call_format: Any, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser, parsed = ToolCallParser(call_format, NAMES), ParsedText()
    for piece in pieces:
        parsed += parser.feed(piece)
    parsed += parser.finish()
    calls: dict[int, list[str]] = {}
    for delta in parsed.tool_calls:
        name, arguments = calls.setdefault(delta.index, [delta.name or "", ""])
        assert delta.name in (None, name)
        calls[delta.index] = [name, arguments + delta.arguments]
    assert list(calls) == list(range(len(calls)))
    return parsed.content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("case", CASES)
def test_parses_whole_text_and_single_characters(case: str) -> None:
    call_format, text, content, calls = CASES[case]
    assert parse(call_format, [text]) == (content, calls)
    assert parse(call_format, list(text)) == (content, calls)


@given(
    case=st.sampled_from([(case[0], case[1]) for case in CASES.values()]),
    noise=st.text(alphabet='<tool_call>[]{},"\\n ax', max_size=12),
    where=st.integers(0, 100),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_the_result_does_not_depend_on_the_pieces(case: Any, noise: str, where: int, cuts: list[int]) -> None:
    call_format, text = case
    text = text[:where] + noise + text[where:]
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert parse(call_format, pieces) == parse(call_format, [text])


def test_formats_are_detected_from_templates() -> None:
    expected = {"chatml": HERMES, "llama-3": LLAMA3_JSON, "alpaca": HERMES, "plain": HERMES}
    for name, call_format in expected.items():
        file = Path(shipped_templates.__file__).parent / "templates" / f"{name}.jinja"
        assert detect_tool_call_format(file.read_text()) is call_format
    assert detect_tool_call_format("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]") is MISTRAL
    assert detect_tool_call_format("{{ tools | tojson }}") is GENERIC_JSON
    assert detect_tool_call_format(chat_templates.QWEN_TOOLS + chat_templates.QWEN_TOOL_ROLE + "<tool_call>") is HERMES


def test_tools_are_described_for_templates_without_tools() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
        {"role": "tool", "content": "3", "tool_call_id": "b"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    described = describe_tools(messages, tools)
    assert [message["role"] for message in described] == ["system", "user", "assistant", "user"]
    assert described[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(tools[0]) in described[0]["content"]
    assert parse(HERMES, [described[2]["content"]]) == ("", [("add", '{"x": 1}')] * 2)
    assert described[3]["content"].count("<tool_response>\n3\n</tool_response>") == 2
    assert describe_tools(messages[1:2], tools)[0]["role"] == "system"
    assert describe_tools(messages[:2], []) == messages[:2]
