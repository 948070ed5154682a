"""Chats to prompts: messages, and the template that a model's makers wrote for them."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from cutaway.errors import InputError
from cutaway.tokenizer.chat.resource_meter import CURRENT_METER, MAX_VALUE_SIZE, ResourceMeter
from cutaway.tokenizer.chat.sandbox import ChatTemplateSandbox, TemplateRaisedError

MAX_TEMPLATE_CHARS = 100_000
"""Characters. The longest published templates have about thirty thousand."""


def render_chat_template(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """What the template writes for these messages and values, within the bounds of `resource_meter`."""
    chat = validate_messages(messages)
    given = {name: _to_json_types(value, name) for name, value in variables.items()}
    given.setdefault("documents", None)
    token = CURRENT_METER.set(ResourceMeter())
    try:
        written, size = [], 0
        for part in _compile_template(template).generate(**{**given, "messages": chat}):
            size += len(part)
            if size > MAX_VALUE_SIZE:
                raise SecurityError(f"it writes more than {MAX_VALUE_SIZE:,} characters")
            written.append(part)
        return "".join(written)
    except InputError:
        raise
    except TemplateRaisedError as error:
        raise InputError(f"the chat template refuses these messages: {error}") from error
    except SecurityError as error:
        raise InputError(f"the chat template was stopped: {error}; give another template") from error
    except RecursionError as error:
        raise InputError(
            "the chat template was stopped: it calls itself or is nested too deep; give another template"
        ) from error
    except Exception as error:  # a template may fail in as many ways as a program
        raise InputError(
            f"the chat template fails ({type(error).__name__}: {error}); check the messages' fields or the template"
        ) from error
    finally:
        CURRENT_METER.reset(token)


@functools.lru_cache(maxsize=32)
def _compile_template(template: str) -> Template:
    if len(template) > MAX_TEMPLATE_CHARS:
        raise InputError(
            f"the chat template has {len(template):,} characters, more than {MAX_TEMPLATE_CHARS:,}; give another"
        )
    try:
        return ChatTemplateSandbox().from_string(template)
    except TemplateSyntaxError as error:
        raise InputError(
            f"the chat template has an error in line {error.lineno}: {error.message}; repair it"
        ) from error


def validate_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as plain data: a role, and content that is text, parts of text and other things, or nothing."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            "messages are a list of at least one object with role and content, for example "
            '[{"role": "user", "content": "Hello"}]'
        )
    chat = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"message {place} has no role; give it one, such as user, assistant or system")
        content = message.get("content")
        parts = isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content)
        if not (content is None or isinstance(content, str) or parts):
            raise InputError(f"message {place} has content that is neither text nor a list of parts with a type")
        chat.append(_to_json_types(message, f"message {place}"))
    return chat


def _to_json_types(value: Any, path: str, depth: int = 0) -> Any:
    """A copy of JSON's types only: an object of any other type could hand a template its methods."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if depth > 100:
        raise InputError(f"{path} is nested deeper than 100; give plainer data")
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(item, path, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_to_json_types(item, path, depth + 1) for item in value]
    raise InputError(f"{path} holds a {type(value).__name__}; a chat template takes text, numbers, lists and objects")
