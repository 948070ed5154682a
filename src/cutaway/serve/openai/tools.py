"""Tools of chat completions: the prompt that describes them, the grammar of calls, and the fields of the response."""

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutaway.generate.structured_output.constraint import JSON_OBJECT_SCHEMA, JSON_WHITESPACE, normalize_schema
from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits
from cutaway.serve.openai.protocol import ChatCompletionRequest, NamedToolChoice, Tool
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.chat.tool_calls import (
    ARGS_MARKER,
    MISTRAL,
    ToolCallDelta,
    ToolCallFormat,
    describe_tools,
    detect_tool_call_format,
    template_reads_tools,
)

MAX_PARALLEL_CALLS = 16
"""Maximum number of calls in one completion, if they are constrained."""


@dataclass(frozen=True)
class ToolUse:
    """The tools that a completion may call, and how the model writes calls."""

    tools: Sequence[Tool]
    call_format: ToolCallFormat
    special_tokens: Mapping[int, str]
    """Markers of the format by token id, if they are special tokens, which are not in the text of a completion."""
    uses_args_marker: bool
    """Whether a call in Mistral format is a name, [ARGS] and arguments."""

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.tools]

    def new_call_id(self) -> str:
        """Random id of a call. Templates in Mistral format require nine letters or digits."""
        if self.call_format is MISTRAL:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def find_tool_use(request: ChatCompletionRequest, tokenizer: Tokenizer | None) -> ToolUse | None:
    """The tools of a request; None if there are none, or if `tool_choice` is 'none'."""
    tools, choice = request.tools or [], request.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise APIError(400, "tools has two functions of the same name; rename one of them", param="tools")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        message = f"tool_choice names the function '{choice.function.name}', which is not in tools; add it"
        raise APIError(400, message, param="tool_choice")
    if choice == "required" and not tools:
        raise APIError(400, "tool_choice is 'required', but there are no tools; add tools", param="tool_choice")
    if not tools or choice == "none" or tokenizer is None or tokenizer.chat_template is None:
        return None
    if sum(len(tool.model_dump_json()) for tool in tools) > Limits.max_tool_characters:
        limit = Limits.max_tool_characters // 1024
        raise APIError(400, f"tools is longer than {limit} KiB; send fewer or shorter tools", param="tools")
    template = tokenizer.select_chat_template(None, with_tools=True)
    call_format = detect_tool_call_format(template)
    ids = {
        tokenizer.token_to_id(marker): marker for marker in (call_format.start, call_format.end, ARGS_MARKER) if marker
    }
    special = {i: marker for i, marker in ids.items() if i is not None and i in tokenizer.decode_skip_ids}
    return ToolUse(tools, call_format, special, ARGS_MARKER in template)


def template_arguments(
    messages: list[dict[str, Any]], tool_use: ToolUse | None, tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and the further arguments of the chat template, which describe the tools to the model."""
    tools = [] if tool_use is None else [_describe(tool) for tool in tool_use.tools]
    has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if not tools and not has_calls:
        return messages, {}
    if not template_reads_tools(tokenizer.select_chat_template(None, with_tools=True)):
        return describe_tools(messages, tools), {}
    return messages, {"tools": tools or None}


def _describe(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}


def tool_grammar(request: ChatCompletionRequest, tool_use: ToolUse) -> str | None:
    """Lark grammar of the completion if `tool_choice` requires a call, or if a tool is strict; None otherwise.

    With a strict tool, text is free, but calls must have the arguments of their schemas."""
    choice, call_format = request.tool_choice, tool_use.call_format
    is_required = choice == "required" or isinstance(choice, NamedToolChoice)
    if not is_required and not any(tool.function.strict for tool in tool_use.tools):
        return None
    tools = list(tool_use.tools)
    if isinstance(choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    is_single = request.parallel_tool_calls is False or isinstance(choice, NamedToolChoice)
    rules = [f"tool_{i}: {_call_rule(tool, tool_use, is_required=is_required)}" for i, tool in enumerate(tools)]
    rules.append("call: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    more = 0 if is_single else MAX_PARALLEL_CALLS - 1
    start, end = (_marker(marker, tool_use) for marker in (call_format.start, call_format.end))
    if tool_use.uses_args_marker:
        calls, separator = f"{start} call", ""
    elif call_format is MISTRAL:
        calls, separator = "call", '", "'
    elif call_format.end:
        calls, separator = f'{start} "\\n" call "\\n" {end}', '"\\n"'
    else:
        calls, separator = "call", '"; "'
    body = f"{calls} ({separator} {calls}){{0,{more}}}" if more else calls
    if call_format is MISTRAL and not tool_use.uses_args_marker:
        body = f'{start} "[" {body} "]"'
    if is_required:
        return "\n".join([f"start: {body}", *rules])
    if call_format.allows_bare_json:  # a completion that begins with JSON is a call
        return "\n".join([f"start: {body} | TEXT", *rules, r"TEXT: /[^{\[ \n](.|\n)*/"])
    # Text is free up to the first marker; then the calls follow.
    if call_format.start in tool_use.special_tokens.values():
        rules.append(f"tagged: TEXT {body}")
    else:
        rules.append(f"before[lazy]: TEXT {start}")
        rules.append(f"tagged: before {body.removeprefix(start)}")
    return "\n".join(["start: tagged | TEXT", *rules, r"TEXT: /(.|\n)*/"])


def _call_rule(tool: Tool, tool_use: ToolUse, *, is_required: bool) -> str:
    """Rule of a call of one tool. The schema is the root of its own JSON grammar, so that its references are valid."""
    function = tool.function
    is_strict = is_required or function.strict
    schema = json.loads(
        normalize_schema(function.parameters or JSON_OBJECT_SCHEMA if is_strict else JSON_OBJECT_SCHEMA)
    )
    arguments = "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}})
    if tool_use.uses_args_marker:
        return f"{_literal(function.name)} {_marker(ARGS_MARKER, tool_use)} {arguments}"
    opening = f'{{"name": {json.dumps(function.name)}, "{tool_use.call_format.arguments_key}": '
    return f"{_literal(opening)} {arguments} {_literal('}')}"


def _marker(marker: str, tool_use: ToolUse) -> str:
    """A marker in a Lark grammar: a special token by its id, or text."""
    token = next((token for token, text in tool_use.special_tokens.items() if text == marker), None)
    return _literal(marker) if token is None else f"<[{token}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def build_tool_calls(deltas: Sequence[ToolCallDelta], tool_use: ToolUse) -> list[dict[str, Any]]:
    """Field `tool_calls` of a message."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, {"name": delta.name, "arguments": ""})
        call["arguments"] += delta.arguments
    return [{"id": tool_use.new_call_id(), "type": "function", "function": call} for call in calls.values()]


def build_tool_call_delta(delta: ToolCallDelta, tool_use: ToolUse) -> dict[str, Any]:
    """Entry of `tool_calls` in a delta. The first one of a call has its id and name."""
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": tool_use.new_call_id(), "type": "function", "function": function}
