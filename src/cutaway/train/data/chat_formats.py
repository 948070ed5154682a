"""Forms of fine-tuning data, detected by their keys: messages, ShareGPT, Alpaca, prompt and completion, plain text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutaway.train.data.records import InvalidRecordError, Record

Fields = Mapping[str, Any]
MessageDict = dict[str, Any]

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Role of a message for each value of `from` in ShareGPT data."""
FORMS = {
    "messages": "messages (role and content of each message)",
    "conversations": "conversations (ShareGPT: from and value of each message)",
    "instruction": "instruction, input and output (Alpaca)",
    "prompt": "prompt and completion",
    "text": "text",
}
"""Supported forms by the key that identifies them, for messages."""


@dataclass(frozen=True)
class Conversation:
    """A conversation, which is rendered with the chat template of the model."""

    messages: list[MessageDict]
    tools: list[MessageDict] | None
    train_on: list[bool]
    """For each message, whether the tokens of the assistant are targets."""


@dataclass(frozen=True)
class PlainText:
    """A text without chat template: a prompt, which is not a target, and its completion."""

    prompt: str
    completion: str


def parse_record(record: Record) -> Conversation | PlainText:
    """Parse a record in one of FORMS. Raises InvalidRecordError if it has none of them, or if a value is invalid."""
    fields = {key: value for key, value in record.fields.items() if value is not None}
    for key, parse in _PARSERS.items():
        if key in fields:
            return parse(fields)
    keys = ", ".join(record.fields) or "none"
    raise InvalidRecordError(
        "unknown form of data", f"its keys are {keys}; objective sft needs one of: {'; '.join(FORMS.values())}"
    )


def _parse_messages(fields: Fields) -> Conversation:
    return build_conversation(_read_list(fields, "messages"), fields)


def _parse_sharegpt(fields: Fields) -> Conversation:
    items = _read_list(fields, "conversations")
    if items and all(isinstance(item, Mapping) and "role" in item for item in items):
        return build_conversation(items, fields)
    messages: list[object] = []
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or not isinstance(item.get("from"), str) or "value" not in item:
            raise InvalidRecordError("invalid message", f"conversations[{index}] needs the keys from and value")
        source = item["from"]
        if source not in SHAREGPT_ROLES:
            raise InvalidRecordError(
                "unknown role", f"conversations[{index}] is from '{source}'; use one of {', '.join(SHAREGPT_ROLES)}"
            )
        message: MessageDict = {"role": SHAREGPT_ROLES[source], "content": item["value"]}
        if source == "function_call":
            message = {"role": "assistant", "content": "", "tool_calls": _read_function_calls(item["value"], index)}
        messages.append(message | {key: item[key] for key in ("weight",) if key in item})
    return build_conversation(messages, fields)


def _parse_alpaca(fields: Fields) -> Conversation:
    instruction, given, output = (_read_text(fields, key) for key in ("instruction", "input", "output"))
    if "output" not in fields:
        raise InvalidRecordError("invalid Alpaca record", "it has an instruction, but no output")
    user = "\n\n".join(part for part in (instruction, given) if part)
    turns = fields.get("history", [])
    messages: list[object] = []
    for turn in turns if isinstance(turns, Sequence) and not isinstance(turns, str) else [None]:
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise InvalidRecordError("invalid Alpaca record", "history must be a list of pairs of user and assistant")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages += [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
    return build_conversation(messages, fields)


def _parse_prompt(fields: Fields) -> Conversation | PlainText:
    if "completion" not in fields:
        advice = "; chosen and rejected answers are data of objective dpo" if "chosen" in fields else ""
        raise InvalidRecordError("no completion", f"it has a prompt, but no completion{advice}")
    prompt, completion = (parse_messages_text(fields[key]) for key in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        return plain_text(prompt, completion, fields)
    before, after = as_messages(prompt, "user", "prompt"), as_messages(completion, "assistant", "completion")
    conversation = build_conversation([*before, *after], fields)
    offset = len(conversation.messages) - len(after)
    train_on = [flag and index >= offset for index, flag in enumerate(conversation.train_on)]
    return Conversation(conversation.messages, conversation.tools, train_on)


def plain_text(prompt: str, completion: str, fields: Fields) -> PlainText:
    """A prompt and a completion without chat template. Raises InvalidRecordError if fields are for a chat template."""
    if not completion:
        raise InvalidRecordError("empty text", "the completion is empty")
    for key in ("system", "tools"):
        if fields.get(key):
            raise InvalidRecordError(
                f"{key} without messages",
                f"it has {key}, but texts are not rendered with a chat template; write prompt and answers as lists of"
                " messages",
            )
    return PlainText(prompt, completion)


def _parse_text(fields: Fields) -> PlainText:
    text = _read_text(fields, "text")
    if not text:
        raise InvalidRecordError("empty text", "the text is empty")
    return PlainText("", text)


_PARSERS: dict[str, Callable[[Fields], Conversation | PlainText]] = {
    "messages": _parse_messages,
    "conversations": _parse_sharegpt,
    "instruction": _parse_alpaca,
    "prompt": _parse_prompt,
    "text": _parse_text,
}


def build_conversation(items: Sequence[object], fields: Fields) -> Conversation:
    """Validate messages, and add a system message from the key `system`."""
    messages, train_on = [], []
    if "system" in fields and (system := _read_text(fields, "system")):
        messages.append({"role": "system", "content": system})
        train_on.append(False)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
            raise InvalidRecordError("invalid message", f"message {index} has no role; each needs role and content")
        # Tables store null for keys that a row does not have. Templates test whether the key tool_calls exists.
        message = {key: value for key, value in item.items() if value is not None or key == "content"}
        weight = message.pop("weight", 1)
        if weight not in (0, 1):
            raise InvalidRecordError("invalid weight", f"message {index} has weight {weight!r:.20}; it must be 0 or 1")
        content = read_content(message, index)
        message |= {"content": content} if "content" in message else {}
        if "tool_calls" in message:
            message["tool_calls"] = _read_tool_calls(message["tool_calls"], index)
            if not message["tool_calls"]:
                del message["tool_calls"]
        messages.append(message)
        train_on.append(message["role"] == "assistant" and bool(weight))
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidRecordError("no message of the assistant", "there is nothing to train on; add one")
    return Conversation(messages, read_tools(fields), train_on)


def read_content(message: MessageDict, index: int) -> str | None:
    """Text of a message. Parts with text are joined, because most templates would print them as a list of objects."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and "tool_calls" in message):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        kind = "no content" if content is None else f"a {type(content).__name__} as content"
        raise InvalidRecordError("invalid message", f"message {index} has {kind}; it must be a string")
    for part in content:
        if not isinstance(part.get("text"), str):
            kind = f"a part of type {part.get('type')!r:.20}"
            raise InvalidRecordError("content that is not text", f"message {index} has {kind}; only text is supported")
    return "".join(part["text"] for part in content)


def as_messages(value: object, role: str, key: str) -> list[Any]:
    """Messages of a prompt or an answer. A text is one message with this role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list | tuple) or not value:
        raise InvalidRecordError("invalid messages", f"{key} must be a text or a list of messages, not {value!r:.40}")
    return list(value)


def parse_messages_text(value: object) -> object:
    """Parse JSON text of messages, as in CSV files. Other values are returned as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value  # a text that starts like a list
    is_messages = isinstance(parsed, list) and all(isinstance(item, Mapping) and "role" in item for item in parsed)
    return parsed if is_messages else value


def _read_tool_calls(value: object, index: int) -> list[MessageDict]:
    """Tool calls with arguments as objects. OpenAI's format has them as JSON text, but templates print objects."""
    calls = []
    for call in _as_list(_parse_json(value, f"tool_calls of message {index}"), f"tool_calls of message {index}"):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRecordError("invalid tool call", f"a tool call of message {index} has no function name")
        arguments = _parse_json(function.get("arguments", {}), f"the arguments of message {index}")
        changed = {**function, "arguments": arguments}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return calls


def _read_function_calls(value: object, index: int) -> list[MessageDict]:
    """Function calls of ShareGPT: one JSON object or a list of them, with name and arguments."""
    parsed = _parse_json(value, f"the function call of conversations[{index}]")
    calls = _read_tool_calls(parsed if isinstance(parsed, list) else [parsed], index)
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def read_tools(fields: Fields) -> list[MessageDict] | None:
    if not fields.get("tools"):
        return None
    tools = _as_list(_parse_json(fields["tools"], "tools"), "tools")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRecordError("invalid tools", "tools must be a list of objects")
    return [dict(tool) for tool in tools] or None


def _parse_json(value: object, name: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError("invalid JSON", f"{name}: {error}") from None


def _read_text(fields: Fields, key: str) -> str:
    value = fields.get(key, "")
    if not isinstance(value, str):
        raise InvalidRecordError("invalid text", f"{key} is a {type(value).__name__}; it must be a string")
    return value


def _read_list(fields: Fields, key: str) -> Sequence[object]:
    """A list, or JSON text of a list, as in CSV files."""
    value = fields[key]
    items = _as_list(_parse_json(value, key), key)
    if not items:
        raise InvalidRecordError("empty conversation", f"{key} is empty")
    return items


def _as_list(value: object, name: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidRecordError("not a list", f"{name} is a {type(value).__name__}; it must be a list of objects")
    return value
