"""Spans of the assistant's turns in a rendered conversation: the text that the model generates.

The span of a turn starts after the generation prompt, e.g. after '<|im_start|>assistant\\n', and ends with the token
that ends the turn, e.g. '<|im_end|>'. Templates without generation blocks do not say where turns are, so that the spans
are found by rendering. Every method is verified on the text of the conversation; if all fail, InputError is raised.

1. Prefixes: messages[:i] with a generation prompt, and messages[:i + 1], are rendered. Both must be a prefix of the
   rendered conversation.
2. Markers, for templates in which later messages change the text of earlier turns (tools or the system prompt in the
   last user turn, reasoning that is dropped from earlier turns): a noncharacter is inserted into message i. Removing it
   from the output must yield the conversation. The text between the generation prompt and the marker, and the text from
   the marker to the end of the turn, are taken from a short conversation with the same message, and must occur before
   and after the marker in the conversation.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cutaway.errors import InputError
from cutaway.tokenizer.chat.generation_blocks import find_generation_spans, has_generation_blocks
from cutaway.tokenizer.chat.template import Message

MARKER, OTHER_CONTENT = "\ufdd2", "\ufdd3"
"""Noncharacters: the marker that is inserted into a message, and the content of messages in short conversations."""
Render = Callable[[Sequence[Message], bool], str | None]
"""Renders messages, with a generation prompt if True. None if the template rejects the messages."""
_PROBE_USER: Message = {"role": "user", "content": "User"}
_PROBE_ASSISTANT: Message = {"role": "assistant", "content": OTHER_CONTENT}


@dataclass(frozen=True)
class AssistantTurn:
    """Span of an assistant turn in the text of a conversation."""

    message: int | None
    """Index of the message. None if the template has generation blocks, but not one per assistant message."""
    start: int
    end: int
    has_end_token: bool = True
    """Whether the span ends with the token that ends a turn. False only for a conversation's last turn."""


class AssistantTurnFinder:
    """Finds the assistant turns in conversations rendered with one chat template.

    Args:
        template: The chat template.
        render: Renders messages and tools, with a generation prompt if the last argument is True.
        special_tokens: Texts of the special tokens.
        added_tokens: Texts of all added tokens, of which special tokens are a part.
        stop_tokens: Texts of the tokens that end generation.
    """

    def __init__(
        self,
        template: str,
        render: Callable[[Sequence[Message], Sequence[Mapping[str, object]] | None, bool], str],
        *,
        special_tokens: Sequence[str],
        added_tokens: Sequence[str],
        stop_tokens: Sequence[str],
    ) -> None:
        self.has_generation_blocks = has_generation_blocks(template)
        self._render, self.stop_tokens = render, frozenset(stop_tokens)
        self._added_pattern = _alternatives({*special_tokens, *added_tokens, *stop_tokens})
        self.end_token = self._find_end_token()
        """The token that ends a turn without tool calls. None if the template writes none."""
        ends = {*special_tokens, *stop_tokens, *([] if self.end_token is None else [self.end_token])}
        self._end_pattern = _alternatives(ends)
        self._known_ends = self.stop_tokens | ({self.end_token} - {None})

    def find(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None
    ) -> tuple[str, list[AssistantTurn]]:
        """Render a conversation. Returns its text and its assistant turns. Raises InputError if one is not found."""
        is_assistant = [message.get("role") == "assistant" for message in messages]
        if self.has_generation_blocks:
            return self._find_generation_blocks(messages, tools, is_assistant)
        text = self._render(messages, tools, False)
        if MARKER in text or OTHER_CONTENT in text:
            raise InputError("a message contains the characters U+FDD2 or U+FDD3, which are reserved; remove them")
        render = functools.partial(self._try_render, tools=tools)
        _check_nothing_dropped(messages, text, render)
        search = _TurnSearch(messages, render, text, self)
        turns = [search.find(index) for index in range(len(messages)) if is_assistant[index]]
        for previous, turn in itertools.pairwise(turns):
            if previous.end > turn.start:
                raise InputError(f"the chat template renders message {turn.message} before earlier ones; {_ADVICE}")
        return text, turns

    def _find_generation_blocks(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None, is_assistant: Sequence[bool]
    ) -> tuple[str, list[AssistantTurn]]:
        text, spans = find_generation_spans(lambda: self._render(messages, tools, False))
        if any(is_assistant) and not spans:
            raise InputError("the chat template has generation blocks, but none for these messages; fix the template")
        indices = [index for index, flag in enumerate(is_assistant) if flag]
        owners = indices if len(indices) == len(spans) else [None] * len(spans)
        turns = []
        for owner, (start, end) in zip(owners, spans, strict=True):
            # A block that excludes the end of the turn: the model must generate it too.
            end = self.known_end_after(text, end) or end
            has_end = self.turn_end(text[start:end]) is not None
            is_last = end >= len(text.rstrip())
            if owner is not None and not has_end and not is_last:
                raise _no_end_error(owner)
            turns.append(AssistantTurn(owner, start, end, has_end or not is_last))
        return text, turns

    def _try_render(
        self, messages: Sequence[Message], add_generation_prompt: bool, *, tools: Sequence[Mapping[str, object]] | None
    ) -> str | None:
        try:
            return self._render(messages, tools, add_generation_prompt) if messages else None
        except InputError:
            return None

    def _find_end_token(self) -> str | None:
        """The token after the content of an assistant message. Raises InputError for templates without known turns."""
        [*chat, _] = probe = [_PROBE_USER, _PROBE_ASSISTANT]
        text, prompt, before = (
            self._try_render(messages, add_prompt, tools=None)
            for messages, add_prompt in ((probe, False), (chat, True), (chat, False))
        )
        if text is None or text.count(OTHER_CONTENT) != 1:
            return None
        head, tail = text.split(OTHER_CONTENT)
        if not self.has_generation_blocks and prompt is not None and prompt == before and head.startswith(prompt):
            header = head[len(prompt) :]
            if header.strip():
                raise InputError(
                    f"the chat template writes {header!r} before an assistant message, but does not write it if"
                    " add_generation_prompt is true, so that a trained model would not be prompted as in training;"
                    f" {_ADVICE}"
                )
        match = self._added_pattern.match(tail.lstrip())
        if match is None and tail.strip():
            raise InputError(
                f"the chat template ends an assistant message with {tail.strip()!r}, which is not a token of the"
                f" tokenizer, so that generation would not stop there; {_ADVICE}"
            )
        return None if match is None else match.group()

    def turn_end(self, text: str) -> int | None:
        """End of the token that ends a turn, if the turn's text ends with special tokens and whitespace.

        It is the first one that is known to end turns, because some templates write EOS at the end of a conversation in
        addition (Phi-3), or else the last one, because special tokens may surround tool calls.
        """
        trailing: list[re.Match[str]] = []
        position = len(text)
        for match in reversed(list(self._end_pattern.finditer(text))):
            if text[match.end() : position].strip():
                break
            trailing.append(match)
            position = match.start()
        known = [match for match in trailing if match.group() in self._known_ends]
        return (known[-1] if known else trailing[0]).end() if trailing else None

    def known_end_after(self, text: str, position: int) -> int | None:
        """End of the token that ends a turn, if it is at this position, after optional whitespace."""
        gap = len(text) - position - len(text[position:].lstrip())
        match = self._end_pattern.match(text, position + gap)
        return match.end() if match is not None and match.group() in self._known_ends else None


_ADVICE = "set data.chat_template to another template, e.g. 'chatml', or to one with {% generation %} blocks"


@dataclass
class _TurnSearch:
    """Search for the assistant turns of one conversation."""

    messages: Sequence[Message]
    render: Render
    text: str
    finder: AssistantTurnFinder

    def find(self, index: int) -> AssistantTurn:
        """Turn of message `index`. Raises InputError if it is not found."""
        turn = self._find_by_prefixes(index) or self._find_by_marker(index)
        if turn is None:
            raise InputError(
                f"cannot locate the assistant's text of message {index}, because the chat template changes it depending"
                f" on other messages; {_ADVICE}"
            )
        return turn

    def _find_by_prefixes(self, index: int) -> AssistantTurn | None:
        prompt = self.render(self.messages[:index], True)
        if prompt is None or not self.text.startswith(prompt):
            return None
        is_last = index == len(self.messages) - 1
        through = self.text if is_last else self.render(self.messages[: index + 1], False)
        if through is None or not through.startswith(prompt) or not self.text.startswith(through):
            return None
        start, turn_end = len(prompt), self.finder.turn_end(through[len(prompt) :])
        if turn_end is not None:
            return AssistantTurn(index, start, start + turn_end)
        return self._without_own_end(index, start, len(through))

    def _without_own_end(self, index: int, start: int, end: int) -> AssistantTurn:
        """A turn after which the template writes no token: the next turn's first token may end generation (GLM-4)."""
        after = self.finder.known_end_after(self.text, end)
        if after is not None:
            return AssistantTurn(index, start, after)
        if self.text[end:].strip() or index < len(self.messages) - 1:
            raise _no_end_error(index)
        return AssistantTurn(index, start, end, has_end_token=False)

    def _find_by_marker(self, index: int) -> AssistantTurn | None:
        for marked_message in _mark_message(self.messages[index]):
            marked = self.render([*self.messages[:index], marked_message, *self.messages[index + 1 :]], False)
            if marked is None or marked.count(MARKER) != 1 or marked.replace(MARKER, "") != self.text:
                continue
            position = marked.index(MARKER)
            spans = [
                (position - len(head), position + len(tail))
                for head, tail, prompt in self._probe(index, marked_message)
                if self.text[: position - len(head)].endswith(prompt)
                and self.text[:position].endswith(head)
                and self.text[position:].startswith(tail)
            ]
            if spans:
                start, end = min(spans)  # the longest head
                return AssistantTurn(index, start, end)
        return None

    def _probe(self, index: int, marked: Message) -> Iterator[tuple[str, str, str]]:
        """Short conversations with the marked message.

        Yields the text between generation prompt and marker, the text between the marker and the end of the turn, and
        the generation prompt.
        """
        system = [message for message in self.messages[:1] if message.get("role") in ("system", "developer")]
        followers = [[_PROBE_USER], list(self.messages[index + 1 : index + 2]), []]
        for before in ([*system, _PROBE_USER], [_PROBE_USER], list(self.messages[:index])):
            start, prompt = self.render(before, False), self.render(before, True)
            if start is None or prompt is None:
                continue
            for after in followers:
                text = self.render([*before, marked, *after], False)
                if text is None or text.count(MARKER) != 1:
                    continue
                other = self.render([*before, _PROBE_ASSISTANT, *after], False)
                if other is None or other.count(OTHER_CONTENT) != 1:
                    continue
                num_before = _common_prefix(start, prompt)  # some conversations end with EOS (Phi-3)
                header_end = _header_end(prompt, num_before, other)
                position = text.index(MARKER)
                if header_end is None or header_end > position or text[:header_end] != other[:header_end]:
                    continue
                tail = self._probe_tail(text, other, is_last=not after)
                if tail is not None:
                    yield text[header_end:position], tail, text[num_before:header_end]

    def _probe_tail(self, text: str, other: str, *, is_last: bool) -> str | None:
        """Text from the marker to the end of the turn. None if no token ends the turn.

        `other` has another message instead of the marked one. What follows the message is the same in both.
        """
        position = text.index(MARKER) + 1
        if is_last:
            end = self.finder.turn_end(text[position:])
            return None if end is None else text[position : position + end]
        suffix = _common_prefix(text[::-1], other[::-1])
        end = self.finder.known_end_after(text, len(text) - suffix)
        return None if end is None else text[position:end]


def _header_end(prompt: str, num_before: int, other: str) -> int | None:
    """End of the generation prompt in `other`, a conversation whose last assistant message is OTHER_CONTENT.

    Some generation prompts end with text, such as <think>, that is not rendered before the message. Then the message
    must follow directly, because text that the template adds could begin like the rest of the prompt.
    """
    content = other.index(OTHER_CONTENT)
    common = _common_prefix(prompt, other[:content])
    if common == len(prompt):
        return common
    return common if common == content and common > num_before else None


def _no_end_error(index: int) -> InputError:
    return InputError(
        f"the chat template writes no token that ends the turn of message {index}, so that a trained model would not"
        f" stop there; {_ADVICE}"
    )


def _check_nothing_dropped(messages: Sequence[Message], text: str, render: Render) -> None:
    """Raise InputError if the template leaves out tool calls or the results of tools."""
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            without = {key: value for key, value in message.items() if key != "tool_calls"}
        elif message.get("role") == "tool" and isinstance(message.get("content"), str):
            without = {**message, "content": f"{message['content']}{MARKER}"}
        else:
            continue
        if render([*messages[:index], without, *messages[index + 1 :]], False) == text:
            kind = "tool calls" if message.get("tool_calls") else "results of tools"
            raise InputError(f"the chat template leaves out the {kind} of message {index}; {_ADVICE}")


def _mark_message(message: Message) -> Iterator[Message]:
    """Copies of a message with the marker at several places, of which templates may drop some."""
    for key in ("content", "reasoning_content", "thinking"):
        for marked in _mark_value(message.get(key)):
            yield {**message, key: marked}
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls and isinstance(calls[0], Mapping):
        function = calls[0].get("function", calls[0])
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            marked_function = {**function, "name": MARKER + str(function["name"])}
            first = {**calls[0], "function": marked_function} if "function" in calls[0] else marked_function
            yield {**message, "tool_calls": [first, *calls[1:]]}


def _mark_value(value: object) -> Iterator[object]:
    """Insert the marker into a text: at its start, after its reasoning, and at its end, inside of outer whitespace."""
    if isinstance(value, str) and (core := value.strip()):
        start = value.index(core)
        after_reasoning = len(value) - len(re.split(r"</\w+>\s*", value)[-1])
        for position in dict.fromkeys((start, after_reasoning, start + len(core))):
            yield value[:position] + MARKER + value[position:]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, part in enumerate(value):
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                for marked in _mark_value(part["text"]):
                    yield [*value[:index], {**part, "text": marked}, *value[index + 1 :]]


def _common_prefix(first: str, second: str) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _alternatives(tokens: set[str]) -> re.Pattern[str]:
    """Pattern that matches any of the tokens, the longest first. Without tokens it matches nothing."""
    ordered = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
