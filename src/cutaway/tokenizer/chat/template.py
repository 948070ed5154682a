"""Render chat messages to a prompt with the chat template of a model."""

import functools
from collections.abc import Mapping, Sequence

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from cutaway.errors import InputError
from cutaway.tokenizer.chat.resource_limits import CURRENT_METER, MAX_VALUE_SIZE, ResourceMeter
from cutaway.tokenizer.chat.sandbox import ChatTemplateSandbox, TemplateRaisedError

Message = Mapping[str, object]
"""A chat message: role, content and other keys that the template reads."""
_MAX_TEMPLATE_CHARS = 100_000
"""Maximum template length. The longest published templates have about thirty thousand characters."""


def render_chat_template(template: str, messages: Sequence[Message], variables: Mapping[str, object]) -> str:
    """Render a chat template with messages and variables, within the limits of `resource_limits`."""
    chat = _validate_messages(messages)
    values = {name: _to_json_types(value, name) for name, value in variables.items()}
    values.setdefault("documents", None)
    token = CURRENT_METER.set(ResourceMeter())
    try:
        parts, size = [], 0
        for part in _compile_template(template).generate(**{**values, "messages": chat}):
            size += len(part)
            if size > MAX_VALUE_SIZE:
                raise SecurityError(f"its output has more than {MAX_VALUE_SIZE:,} characters")
            parts.append(part)
        return "".join(parts)
    except InputError:
        raise
    except TemplateRaisedError as error:
        raise InputError(f"the chat template rejects these messages: {error}") from error
    except SecurityError as error:
        raise InputError(f"the chat template was stopped: {error}; pass another template") from error
    except RecursionError as error:
        reason = "it is recursive or nested too deeply"
        raise InputError(f"the chat template was stopped: {reason}; pass another template") from error
    except Exception as error:  # template code can raise any exception
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"the chat template failed ({reason}); check the messages and the template") from error
    finally:
        CURRENT_METER.reset(token)


@functools.lru_cache(maxsize=32)
def _compile_template(template: str) -> Template:
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise InputError(f"the chat template has more than {_MAX_TEMPLATE_CHARS:,} characters; pass a shorter one")
    try:
        return ChatTemplateSandbox().from_string(template)
    except TemplateSyntaxError as error:
        raise InputError(f"the chat template has an error in line {error.lineno}: {error.message}; fix it") from error


def _validate_messages(messages: object) -> list[object]:
    """Copy messages as JSON types. Each must have a role, and content that is text, a list of parts, or None."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InputError(
            "messages must be a non-empty list of objects with role and content, for example "
            '[{"role": "user", "content": "Hello"}]'
        )
    chat = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"message {i} has no role; set it, for example to user, assistant or system")
        content = message.get("content")
        parts = isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content)
        if not (content is None or isinstance(content, str) or parts):
            raise InputError(f"message {i} has a {type(content).__name__} as content; pass text or a list of objects")
        chat.append(_to_json_types(message, f"message {i}"))
    return chat


def _to_json_types(value: object, path: str, depth: int = 0) -> object:
    """Copy a value of JSON types; raise for other types, since a template could call their methods."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if depth > 100:
        raise InputError(f"{path} is nested deeper than 100 levels; pass simpler data")
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(item, path, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_to_json_types(item, path, depth + 1) for item in value]
    raise InputError(f"{path} contains a {type(value).__name__}; templates take strings, numbers, lists and objects")
