"""Reasoning of models whose chat template marks it with <think> and </think>, separated from the answer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cutaway.generate import Request
from cutaway.serve.errors import APIError
from cutaway.serve.openai.protocol import ChatCompletionRequest
from cutaway.tokenizer import Tokenizer

START, END = "<think>", "</think>"
_NUM_PROMPT_TOKENS = 16
"""Number of tokens at the end of the prompt that are searched for START. It can be several tokens."""
_RESERVED_KWARGS = ("add_generation_prompt", "chat_template", "documents", "messages", "self", "tools")


class SplitText(NamedTuple):
    """Text of a completion, or a new piece of it."""

    reasoning: str
    content: str


class ReasoningParser:
    """Splits the text of one completion, in pieces of any size, into reasoning and content.

    The reasoning ends at the first END. It starts at the beginning of the completion, if the prompt opens it, or with
    START as the first text of the completion; otherwise all text is content. Line breaks next to START and END are
    not part of either, because chat templates write them.
    """

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends with START."""
        self.state = "reasoning" if is_open else "start"
        self.buffer = ""
        self.is_first = True
        """Whether line breaks are skipped, because no text of this part was returned yet."""

    def feed(self, text: str) -> SplitText:
        """Add a piece of text and return the new text that later pieces cannot change."""
        self.buffer += text
        if self.state == "start":
            stripped = self.buffer.lstrip()
            if START.startswith(stripped[: len(START)]) and len(stripped) < len(START):
                return SplitText("", "")
            if stripped.startswith(START):
                self.state, self.buffer = "reasoning", stripped[len(START) :]
            else:
                self.state, self.is_first = "content", False  # there is no reasoning, so this is all of the text
        reasoning = ""
        if self.state == "reasoning":
            before, marker, after = self.buffer.partition(END)
            # A line break, or a part of END, at the end of the buffer may belong to the end of the reasoning.
            size = len(before) if marker else _num_stable_chars(before)
            reasoning, self.buffer = before[:size], before[size:]
            if marker:
                self.state, self.buffer = "content", after
                reasoning = reasoning.rstrip("\n")
            reasoning = self._skip_line_breaks(reasoning)
            if not marker:
                return SplitText(reasoning, "")
            self.is_first = True
        content, self.buffer = self._skip_line_breaks(self.buffer), ""
        return SplitText(reasoning, content)

    def finish(self) -> SplitText:
        """Return the rest of the text, at the end of the completion."""
        rest, self.buffer = self.buffer, ""
        return SplitText(rest, "") if self.state == "reasoning" else SplitText("", rest)

    def _skip_line_breaks(self, text: str) -> str:
        if self.is_first:
            text = text.lstrip("\n")
            self.is_first = not text
        return text


def _num_stable_chars(text: str) -> int:
    """Length of the text without line breaks and a part of END at its end."""
    for size in range(min(len(END) - 1, len(text)), 0, -1):
        if END.startswith(text[-size:]):
            text = text[:-size]
            break
    return len(text.rstrip("\n"))


def marks_reasoning(tokenizer: Tokenizer) -> bool:
    """Whether the chat template marks reasoning."""
    return END in _template_source(tokenizer)


def special_marker_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """START and END by token id, if they are special tokens."""
    ids = {tokenizer.token_to_id(marker): marker for marker in (START, END)}
    return {token: marker for token, marker in ids.items() if token is not None and token in tokenizer.decode_skip_ids}


def is_opened_by_prompt(tokenizer: Tokenizer, request: Request) -> bool:
    """Whether the prompt of a completion ends with START, so that the completion starts inside the reasoning."""
    tail = tokenizer.decode(request.input_ids[-_NUM_PROMPT_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(START)


def reasoning_fields(reasoning: str) -> dict[str, object]:
    """Fields of a message or a delta: `reasoning` as in vLLM, and `reasoning_content`, its former name there, which the
    API of DeepSeek and other servers have."""
    return {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}


def chat_template_kwargs(request: ChatCompletionRequest, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Variables of the chat template that the request sets: `chat_template_kwargs` and `reasoning_effort`."""
    kwargs: dict[str, Any] = dict(request.chat_template_kwargs or {})
    for name in _RESERVED_KWARGS:
        if name in kwargs:
            message = f"chat_template_kwargs sets {name}, which the server sets; leave it out"
            raise APIError(400, message, param="chat_template_kwargs")
    effort, template = request.reasoning_effort, "" if tokenizer is None else _template_source(tokenizer)
    if effort is not None and "reasoning_effort" in template:
        return {"reasoning_effort": effort, **kwargs}
    if effort == "none":
        return {"enable_thinking": False, **kwargs} if "enable_thinking" in template else kwargs
    if effort is not None:
        message = f"reasoning_effort is '{effort}', but the chat template of this model does not read it; leave it out"
        raise APIError(400, message, param="reasoning_effort", code="unsupported_parameter")
    return kwargs


def without_thinking(kwargs: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Template variables of a completion that must match a format, which leaves no room for reasoning."""
    reads = tokenizer is not None and "enable_thinking" in _template_source(tokenizer)
    return {**({"enable_thinking": False} if reads else {}), **kwargs}


def _template_source(tokenizer: Tokenizer) -> str:
    """Text of the chat template; all of them if there are several."""
    template = tokenizer.chat_template
    return "".join(template.values()) if isinstance(template, dict) else template or ""
