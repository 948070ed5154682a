"""Splits the completion of a chat into reasoning, content and tool calls."""

from collections.abc import Mapping
from typing import NamedTuple

from cutaway.generate import CompletionChunk
from cutaway.serve.openai.reasoning import ReasoningParser, SplitText
from cutaway.tokenizer.chat.tool_calls import ToolCallDelta, ToolCallParser


class MessageDelta(NamedTuple):
    """A completion, or a new piece of it."""

    reasoning: str
    content: str
    tool_calls: list[ToolCallDelta]


class MessageParser:
    """Parser of the text of one completion, in pieces of any size: first of its reasoning, then of its tool calls."""

    def __init__(
        self,
        reasoning_parser: ReasoningParser | None = None,
        tool_call_parser: ToolCallParser | None = None,
        special_tokens: Mapping[int, str] | None = None,
    ) -> None:
        """`special_tokens`: markers by token id that are special tokens, which are not in the text of a completion."""
        self.reasoning_parser, self.tool_call_parser = reasoning_parser, tool_call_parser
        self.special_tokens = special_tokens or {}

    @property
    def is_empty(self) -> bool:
        """Whether all text is content."""
        return self.reasoning_parser is None and self.tool_call_parser is None

    @property
    def is_in_reasoning(self) -> bool:
        return self.reasoning_parser is not None and self.reasoning_parser.state == "reasoning"

    def feed_chunk(self, chunk: CompletionChunk) -> MessageDelta:
        """Add a chunk and return what is new and can no longer change."""
        text = chunk.text + "".join(self.special_tokens.get(token, "") for token in chunk.tokens)
        split = SplitText("", text) if self.reasoning_parser is None else self.reasoning_parser.feed(text)
        if self.tool_call_parser is None:
            return MessageDelta(*split, [])
        parsed = self.tool_call_parser.feed(split.content)
        return MessageDelta(split.reasoning, parsed.content, parsed.tool_calls)

    def finish(self) -> MessageDelta:
        """Return the rest, at the end of the completion."""
        split = SplitText("", "") if self.reasoning_parser is None else self.reasoning_parser.finish()
        if self.tool_call_parser is None:
            return MessageDelta(*split, [])
        parsed = self.tool_call_parser.feed(split.content) + self.tool_call_parser.finish()
        return MessageDelta(split.reasoning, parsed.content, parsed.tool_calls)


def join_deltas(deltas: list[MessageDelta]) -> MessageDelta:
    reasoning, content = ("".join(delta[i] for delta in deltas) for i in range(2))  # type: ignore[misc]
    return MessageDelta(reasoning, content, [call for delta in deltas for call in delta.tool_calls])
