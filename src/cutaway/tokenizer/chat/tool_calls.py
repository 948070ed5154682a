"""Tool calls in the text of a completion: formats of chat templates, and an incremental parser."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FormatName = Literal["hermes", "llama3_json", "mistral", "json"]


@dataclass(frozen=True)
class ToolCallFormat:
    """How a chat template writes tool calls. The names are those of vLLM's tool parsers."""

    name: FormatName
    start: str
    """Text or token before a call. With '' a call is JSON at the beginning of the completion."""
    end: str = ""
    """Text after a call."""
    arguments_key: str = "arguments"
    allows_bare_json: bool = False
    """Whether a completion that begins with JSON is a call, without `start`."""


HERMES = ToolCallFormat("hermes", "<tool_call>", "</tool_call>")
"""`<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call: Hermes, Qwen and many others."""
LLAMA3_JSON = ToolCallFormat("llama3_json", "<|python_tag|>", arguments_key="parameters", allows_bare_json=True)
"""`{"name": …, "parameters": …}`, sometimes after `<|python_tag|>`: Llama 3.1 to 3.3. Several calls end with `;`."""
MISTRAL = ToolCallFormat("mistral", "[TOOL_CALLS]")
"""`[TOOL_CALLS][{"name": …, "arguments": …}, …]`, or from version 11 `[TOOL_CALLS]name[ARGS]{…}` for each call."""
GENERIC_JSON = ToolCallFormat("json", "", allows_bare_json=True)
"""A JSON object with name and arguments, or a list of them, as the whole completion."""
ARGS_MARKER = "[ARGS]"
_ARGUMENT_KEYS = ("arguments", "parameters")
_SEPARATORS = " \n\t,;]"
"""Characters between calls."""


def template_reads_tools(template: str) -> bool:
    """Whether a chat template describes tools to the model."""
    return "tools" in template and "this chat template has no tools" not in template


def detect_tool_call_format(template: str) -> ToolCallFormat:
    """Format of the tool calls of a chat template. Templates without tools are used with `describe_tools`."""
    if HERMES.start in template or not template_reads_tools(template):
        return HERMES
    if MISTRAL.start in template:
        return MISTRAL
    if LLAMA3_JSON.start in template or LLAMA3_JSON.arguments_key in template:
        return LLAMA3_JSON
    return GENERIC_JSON


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rewrite messages for a template without tools: tools are described in the system message, in Hermes format.

    Calls of the assistant become text, and results of tools become messages of the user."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = (
        "You can call these functions, listed as JSON schemas:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write its name and arguments as JSON between tags, and nothing else:\n"
        '<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>'
    )
    result: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            if result and result[-1]["role"] == "user" and result[-1]["content"].startswith("<tool_response>"):
                result[-1]["content"] += f"\n{response}"
            else:
                result.append({"role": "user", "content": response})
            continue
        calls = [
            f"<tool_call>\n{json.dumps({key: call['function'][key] for key in ('name', 'arguments')})}\n</tool_call>"
            for call in message.get("tool_calls") or ()
        ]
        result.append({"role": message["role"], "content": "\n".join([content, *calls] if content else calls)})
    if not tools:
        return result
    if result and result[0]["role"] == "system":
        result[0]["content"] += f"\n\n{description}"
    else:
        result.insert(0, {"role": "system", "content": description})
    return result


@dataclass
class ToolCallDelta:
    """New text of a tool call: its name, once, and a piece of its arguments, which are JSON."""

    index: int
    """Number of the call in the completion."""
    name: str | None = None
    arguments: str = ""


@dataclass
class ParsedText:
    """Content and tool calls of a completion, or of a new piece of it."""

    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __add__(self, other: "ParsedText") -> "ParsedText":
        return ParsedText(self.content + other.content, self.tool_calls + other.tool_calls)


class ToolCallParser:
    """Splits the text of one completion, in pieces of any size, into content and tool calls.

    JSON that is no call of one of `tool_names` is content, and so is whatever remains unnamed at the end.
    """

    def __init__(self, call_format: ToolCallFormat, tool_names: Collection[str]) -> None:
        self.format, self.tool_names = call_format, frozenset(tool_names)
        self.state: Literal["start", "content", "before call", "call", "after call"] = "start"
        """'start' until the first text that is not whitespace."""
        self.buffer = ""
        """Text that later text can still assign to the content or to a call."""
        self.prefix = ""
        """Text between the content and the JSON of a call, which is content too if the JSON is no call."""
        self.scanner = _CallScanner(0)
        self.num_calls = 0

    def feed(self, text: str) -> ParsedText:
        """Add a piece of text and return what is new and can no longer change."""
        self.buffer += text
        result, steps = ParsedText(), {"before call": self._before_call, "call": self._in_call}
        while (step := steps.get(self.state, self._outside_call)()) is not None:
            result += step
        return result

    def finish(self) -> ParsedText:
        """Return the rest of the text, at the end of the completion."""
        rest, self.buffer = self.buffer, ""
        if self.state == "call":
            return (
                ParsedText(tool_calls=self.scanner.finish()) if self.scanner.name else self._reject(self.scanner.text)
            )
        if self.state == "before call":
            return ParsedText(self.prefix + rest)
        return ParsedText("" if self.state == "after call" and not rest.strip(_SEPARATORS) else rest)

    def _outside_call(self) -> ParsedText | None:
        """Return text up to the next call. None: more text is needed."""
        start, end, text = self.format.start, self.format.end, self.buffer
        if self.state == "after call":
            text = text.lstrip(_SEPARATORS)
            if end and text.startswith(end):
                self.buffer = text[len(end) :]
                return ParsedText()
            if end.startswith(text):
                return None
        stripped = text.lstrip()
        if self.state == "start" and not stripped:
            return None
        is_json = self.format.allows_bare_json and self.state != "content" and stripped[:1] in ("{", "[")
        if is_json or (self.state == "after call" and not end and stripped[:1] == "{"):
            return self._start_call(text, 0)
        index = text.find(start) if start else -1
        if index >= 0:
            return self._start_call(text, index)
        size = _num_stable_chars(text, start)
        if size:
            self.state = "content"
        self.buffer = text[size:]
        return ParsedText(text[:size]) if size else None

    def _start_call(self, text: str, index: int) -> ParsedText:
        length = len(self.format.start) if text.startswith(self.format.start, index) else 0
        content, self.prefix, self.buffer = text[:index].rstrip(), text[index : index + length], text[index + length :]
        self.state = "before call"
        return ParsedText(content)

    def _before_call(self) -> ParsedText | None:
        """Find the JSON of a call: an object, the first of a list, or in Mistral format the arguments after a name."""
        text = self.buffer.lstrip(" \n[")
        name = None
        if text and text[0] != "{":
            name, marker, arguments = text.partition(ARGS_MARKER)
            if self.format is not MISTRAL or name.strip() not in self.tool_names:
                is_unfinished = self.format is MISTRAL and not marker and _is_start_of_call(text, self.tool_names)
                return None if is_unfinished else self._reject("")
            text = arguments if marker else ""
        if not text:
            return None
        self.prefix += self.buffer[: len(self.buffer) - len(text)]
        self.scanner, self.buffer, self.state = _CallScanner(self.num_calls, name), text, "call"
        return ParsedText()

    def _in_call(self) -> ParsedText | None:
        if not self.buffer:
            return None
        deltas, self.buffer = self.scanner.feed(self.buffer)
        if self.scanner.name is None and not self.scanner.is_done:
            return ParsedText()
        if self.scanner.name not in self.tool_names:
            return self._reject(self.scanner.text)
        if self.scanner.is_done:
            self.num_calls += 1
            self.state = "after call"
        return ParsedText(tool_calls=deltas)

    def _reject(self, text: str) -> ParsedText:
        """What follows the prefix is no call: it is content."""
        content, self.state = self.prefix + text, "content"
        return ParsedText(content)


class _CallScanner:
    """Reads the JSON object of one call, in pieces: its name, and the text of its arguments as far as it is known."""

    def __init__(self, index: int, name: str | None = None) -> None:
        """`name`: set if the object is that of the arguments alone."""
        self.index, self.name = index, name
        self.has_bare_arguments = name is not None
        self.text = ""
        self.is_done = False
        self._is_announced = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._key: str | None = None
        """Key at depth 1 whose value is being read."""
        self._string_start = 0
        self._value_start: int | None = None
        self._arguments: tuple[int, int | None] | None = (0, None) if self.has_bare_arguments else None
        """Start and, once it is known, end of the arguments in the text."""
        self._num_emitted = 0

    def feed(self, text: str) -> tuple[list[ToolCallDelta], str]:
        """Add a piece of text; return the new parts of the call, and the text after its end."""
        first = len(self.text)
        self.text += text
        for i in range(first, len(self.text)):
            self._read(self.text[i], i)
            if self.is_done:
                rest, self.text = self.text[i + 1 :], self.text[: i + 1]
                return self._new_parts(), rest
        return self._new_parts(), ""

    def finish(self) -> list[ToolCallDelta]:
        """The rest of a call that was cut off."""
        return self._new_parts()

    def _read(self, character: str, i: int) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1 and self._key is None:
                    self._key = _parse_string(self.text[self._string_start : i + 1])
                elif self._depth == 1:
                    self._end_value(i + 1)
            return
        is_value_start = self._depth == 1 and self._key is not None and self._value_start is None
        if is_value_start and character not in ": \n\t\r,}":
            self._value_start = i
            if self._key in _ARGUMENT_KEYS and character == "{":
                self._arguments = i, None
        if character == '"':
            self._in_string, self._string_start = True, i
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._end_value(i + 1)
            elif self._depth == 0:
                self._end_value(i)
                self.is_done = True
                if self.has_bare_arguments:
                    self._arguments = 0, i + 1
        elif character == "," and self._depth == 1:
            self._end_value(i)

    def _end_value(self, end: int) -> None:
        """The value of the current key is complete."""
        key, start, self._key, self._value_start = self._key, self._value_start, None, None
        if key is None or start is None:
            return
        value = self.text[start:end]
        if key == "name" and self.name is None and value[:1] == '"':
            self.name = _parse_string(value)
        elif key in _ARGUMENT_KEYS and value[:1] == "{":
            self._arguments = start, end

    def _new_parts(self) -> list[ToolCallDelta]:
        """Parts of the call that were not returned yet. None until the name is known."""
        if self.name is None:
            return []
        name = None if self._is_announced else self.name
        self._is_announced = True
        arguments = ""
        if self._arguments is not None:
            start, end = self._arguments
            arguments = self.text[start + self._num_emitted : end]
            self._num_emitted += len(arguments)
        elif self.is_done:
            arguments = "{}"
        return [ToolCallDelta(self.index, name, arguments)] if name or arguments else []


def _parse_string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:  # an invalid escape
        return text[1:-1]


def _is_start_of_call(text: str, names: Collection[str]) -> bool:
    """Whether the text may become `name[ARGS]`."""
    return any((name + ARGS_MARKER).startswith(text.strip()) for name in names)


def _num_stable_chars(text: str, start: str) -> int:
    """Length of the text without a part of `start`, and the whitespace before it, at its end."""
    if not start:
        return len(text)
    for size in range(min(len(start) - 1, len(text)), 0, -1):
        if start.startswith(text[-size:]):
            text = text[:-size]
            break
    return len(text.rstrip())
