"""From a request's fields to what the engine is asked for; each limit is checked before anything is read."""

import re
from collections.abc import Callable
from typing import Any

from cutaway.errors import InputError
from cutaway.generate import Settings
from cutaway.serve.limits import Limits
from cutaway.serve.openai.fields import ChatFields, CompletionFields, Drawing, Message, Texts
from cutaway.serve.openai.host import Host
from cutaway.serve.refusal import Refused

COMPLETION_TOKENS = 16
"""Of a completion whose request names no number, as with OpenAI."""
ID = re.compile(r"[0-9]{1,10}")


def most(name: str, value: int | None, limit: int, what: str = "") -> None:
    if value is not None and value > limit:
        raise Refused(400, f"{name} is more than {limit}{what}; give fewer", param=name)


def settings_of(fields: Drawing, limits: Limits, **more: Any) -> Settings:
    """How the answer is drawn: OpenAI's defaults, not `generate`'s."""
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    most("n", fields.n, limits.n)
    most("max_tokens", fields.max_tokens, limits.max_tokens)
    most("min_tokens", fields.min_tokens, limits.max_tokens)
    most("stop", len(stop), limits.stops, " strings")
    most("stop", max(map(len, stop), default=0), limits.stop_characters, " characters long")
    most("stop_token_ids", len(fields.stop_token_ids or ()), limits.biases, " ids")
    most("logit_bias", len(fields.logit_bias or {}), limits.biases, " tokens")
    if any(ID.fullmatch(key) is None for key in fields.logit_bias or {}):
        raise Refused(400, "logit_bias names tokens by their ids, such as {'50256': -100}", param="logit_bias")
    asked: dict[str, Any] = {
        "n": fields.n,
        "max_new_tokens": fields.max_tokens,
        "min_new_tokens": fields.min_tokens,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "top_p": None if fields.top_p == 1 else fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "logit_bias": {int(key): bias for key, bias in (fields.logit_bias or {}).items()},
        "stop": stop,
        "stop_tokens": fields.stop_token_ids,
        "ignore_eos": fields.ignore_eos,
        "seed": None if fields.seed is None else fields.seed % 2**63,
    }
    try:
        return Settings(**{name: value for name, value in (asked | more).items() if value is not None})
    except InputError as error:
        name = str(error).split(maxsplit=1)[0]
        raise Refused(400, str(error), param=name if name in asked else None) from None


def completion(fields: CompletionFields, host: Host) -> tuple[Callable[[], list[list[int]]], Settings]:
    """The prompts, to be read in a thread, and the settings."""
    limits = host.limits
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise Refused(400, "best_of other than n is not supported here; leave it out", param="best_of")
    most("logprobs", fields.logprobs, limits.logprobs)
    settings = settings_of(fields, limits, logprobs=fields.logprobs)
    if settings.max_new_tokens is None:
        settings = settings_of(fields, limits, logprobs=fields.logprobs, max_new_tokens=COMPLETION_TOKENS)
    prompts = listed(fields.prompt, "prompt", limits.prompts)
    most("prompt", len(prompts) * settings.n, limits.answers, " answers in all, with n")
    return reader(prompts, host, "prompt"), settings


def chat(fields: ChatFields, host: Host) -> tuple[Callable[[], list[list[int]]], Settings]:
    limits = host.limits
    if fields.top_logprobs is not None and not fields.logprobs:
        raise Refused(400, "top_logprobs is for logprobs: true; add it, or leave both out", param="top_logprobs")
    most("top_logprobs", fields.top_logprobs, limits.top_logprobs)
    most("max_completion_tokens", fields.max_completion_tokens, limits.max_tokens)
    if fields.max_completion_tokens is not None and fields.max_tokens not in (None, fields.max_completion_tokens):
        raise Refused(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    told = {"max_new_tokens": fields.max_completion_tokens or fields.max_tokens}
    settings = settings_of(fields, limits, logprobs=(fields.top_logprobs or 0) if fields.logprobs else None, **told)
    return chat_reader(fields.messages, host), settings


def listed(given: Texts, param: str, limit: int) -> list[str | list[int]]:
    """One text or several, or their tokens, as several."""
    several: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not several:
        raise Refused(400, f"{param} is empty; give at least one text", param=param)
    most(param, len(several), limit, " texts")
    return several


def reader(prompts: list[str | list[int]], host: Host, param: str) -> Callable[[], list[list[int]]]:
    """What reads these texts as tokens. Ids are checked before anything is read."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    host.check_characters(texts, param)
    for prompt in prompts:
        if not isinstance(prompt, str):
            host.check_length(len(prompt))
    tokenizer = host.words() if texts else None

    def read() -> list[list[int]]:
        return [tokenizer.encode(one) if isinstance(one, str) and tokenizer else list(one) for one in prompts]  # type: ignore[arg-type]

    return read


def chat_reader(messages: list[Message], host: Host) -> Callable[[], list[list[int]]]:
    """What writes the chat by the checkpoint's template, and reads that as tokens."""
    tokenizer = host.words()
    if tokenizer.chat_template is None:
        message = "this model has no chat template, so it was made for no chats; use /v1/completions"
        raise Refused(400, message, code="no_chat_template")
    most("messages", len(messages), host.limits.messages)
    plain = [plainly(message) for message in messages]
    host.check_characters(["".join(one["content"] or "" for one in plain)], "messages")
    return lambda: [tokenizer.encode_chat(plain)]


def plainly(message: Message) -> dict[str, Any]:
    """A message as templates know it: its text in one piece, and no role that came after they were written."""
    content = message.content
    text = content if content is None or isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    if text is None and role != "assistant":
        raise Refused(400, f"a message of role {message.role} has no content; give it some", param="messages")
    named = {} if message.name is None else {"name": message.name}
    return {"role": role, "content": text or "", **named}
