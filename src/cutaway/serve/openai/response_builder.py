"""Response bodies of the OpenAI API: completions and chat completions, whole or as stream chunks."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cutaway.generate import Completion, CompletionChunk, Request
from cutaway.serve.openai.completion_stream import CompletionStream
from cutaway.serve.openai.message_parser import MessageDelta, MessageParser, join_deltas
from cutaway.serve.openai.prompt_output import PromptOutput, logprobs_by_text
from cutaway.serve.openai.reasoning import (
    ReasoningParser,
    is_opened_by_prompt,
    marks_reasoning,
    reasoning_fields,
    special_marker_tokens,
)
from cutaway.serve.openai.serving_engine import ServingEngine
from cutaway.serve.openai.tools import ToolUse, build_tool_call_delta, build_tool_calls
from cutaway.tokenizer.chat.tool_calls import ToolCallParser

Data = dict[str, object]


@dataclass
class ResponseBuilder:
    """Builds the response body, or the stream chunks, of one request."""

    serving: ServingEngine
    model: str
    """Name of the model in the request."""
    is_chat: bool
    num_logprobs: int | None
    """Number of alternatives per token, or None if no log-probabilities were requested."""
    prompt_output: PromptOutput | None = None
    tool_use: ToolUse | None = None
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def build_response(self, stream: CompletionStream, results: Sequence[Completion]) -> Data:
        choices = []
        for index, result in enumerate(results):
            text = result.text or ""
            content: dict[str, Any] = {"text": text}
            if self.is_chat:
                content = {"message": self._build_message(text, stream.requests[index])}
            logprobs = self.build_logprobs([result], 0, drop_last=isinstance(result.stop_reason, int))
            finish_reason = result.finish_reason
            if self.is_chat and "tool_calls" in content["message"] and finish_reason == "stop":
                finish_reason = "tool_calls"
            choices.append(_build_choice(index, content, logprobs, finish_reason))
            if self.prompt_output is not None and not self.is_chat:
                self.prompt_output.add_to_choice(choices[-1], index, stream.requests[index])
        object_type = "chat.completion" if self.is_chat else "text_completion"
        response = self._build_envelope(object_type, choices) | {"usage": self._build_usage(stream)}
        if self.prompt_output is not None and self.is_chat:
            response["prompt_logprobs"] = self.prompt_output.build_prompt_logprobs(stream.requests[0])
        return response

    async def stream_response(self, stream: CompletionStream, *, include_usage: bool) -> AsyncIterator[Data]:
        object_type = "chat.completion.chunk" if self.is_chat else "text_completion"

        def chunk_of(*choices: Data, usage: Data | None = None) -> Data:
            return self._build_envelope(object_type, choices) | ({"usage": usage} if include_usage else {})

        prompts = self.prompt_output
        text_lengths = [0 if prompts is None else len(prompts.text(index)) for index in range(len(stream.requests))]
        is_started, num_tokens = [prompts is None] * len(stream.requests), [0] * len(stream.requests)
        parsers = [self.build_parser(request) for request in stream.requests]
        has_tool_calls = [False] * len(parsers)
        if self.is_chat:
            for index in range(len(stream.requests)):
                yield chunk_of(_build_choice(index, {"delta": {"role": "assistant", "content": ""}}))
        async for index, chunks, is_finished in stream.stream_chunks():
            text = "".join(chunk.text for chunk in chunks)
            result = stream.requests[index].result(0) if is_finished else None
            if prompts is not None and not is_started[index]:
                is_started[index] = True
                choice = _build_choice(index, {"text": prompts.text(index)})
                choice["logprobs"] = await self.serving.run_in_pool(
                    partial(prompts.build_logprobs, index, stream.requests[index])
                )
                yield chunk_of(choice)
            num_tokens[index] += sum(len(chunk.tokens) for chunk in chunks)
            output = stream.requests[index].output
            # A stop token can arrive before the request is marked as finished.
            has_stop_token = isinstance(output.stop_reason, int) and num_tokens[index] == len(output.tokens)
            logprobs = None
            if sum(len(chunk.tokens) for chunk in chunks) > has_stop_token:
                logprobs = self.build_logprobs(chunks, text_lengths[index], drop_last=has_stop_token)
            text_lengths[index] += len(text)
            content: Data = {"text": text}
            if self.is_chat:
                delta = join_deltas([parsers[index].feed_chunk(chunk) for chunk in chunks])
                has_tool_calls[index] |= bool(delta.tool_calls)
                content = {"delta": self._build_delta(delta)}
            if (any(content.values()) or logprobs) and not self._is_without_completion:
                yield chunk_of(_build_choice(index, content, logprobs))
            if result is not None:
                content, finish_reason = {"text": ""}, result.finish_reason
                if self.is_chat:
                    delta = parsers[index].finish()
                    has_tool_calls[index] |= bool(delta.tool_calls)
                    content = {"delta": self._build_delta(delta)}
                if has_tool_calls[index] and finish_reason == "stop":
                    finish_reason = "tool_calls"
                finish_reason = "length" if self._is_without_completion else finish_reason
                yield chunk_of(_build_choice(index, content, finish_reason=finish_reason))
        if include_usage:
            yield chunk_of(usage=self._build_usage(stream))

    @property
    def _is_without_completion(self) -> bool:
        return self.prompt_output is not None and self.prompt_output.without_completion

    def _build_message(self, text: str, request: Request) -> Data:
        parser = self.build_parser(request)
        if parser.is_empty:
            return {"role": "assistant", "content": text, "refusal": None}
        chunks = [parser.feed_chunk(chunk) for chunk in request.pop_chunks()]
        reasoning, content, calls = join_deltas([*chunks, parser.finish()])
        message: Data = {"role": "assistant", "content": content or (None if reasoning or calls else "")}
        message |= {"refusal": None, **reasoning_fields(reasoning)}
        return message | ({"tool_calls": build_tool_calls(calls, self.tool_use)} if calls and self.tool_use else {})

    def _build_delta(self, delta: MessageDelta) -> Data:
        """Fields of a delta with new text. Empty if there is none."""
        fields = reasoning_fields(delta.reasoning) | ({"content": delta.content} if delta.content else {})
        if delta.tool_calls and self.tool_use is not None:
            fields["tool_calls"] = [build_tool_call_delta(call, self.tool_use) for call in delta.tool_calls]
        return fields

    def build_parser(self, request: Request) -> MessageParser:
        """Parser of the text of a chat completion. A completion that is constrained has no reasoning."""
        tokenizer, reasoning_parser, tool_call_parser = self.serving.tokenizer, None, None
        special_tokens: dict[int, str] = {}
        if self.tool_use is not None:
            tool_call_parser = ToolCallParser(self.tool_use.call_format, self.tool_use.names)
            special_tokens |= self.tool_use.special_tokens
        if self.is_chat and tokenizer is not None and marks_reasoning(tokenizer) and request.grammar is None:
            reasoning_parser = ReasoningParser(is_open=is_opened_by_prompt(tokenizer, request))
            special_tokens |= special_marker_tokens(tokenizer)
        return MessageParser(reasoning_parser, tool_call_parser, special_tokens)

    def _build_envelope(self, object_type: str, choices: Sequence[Data]) -> Data:
        return {
            "id": f"chatcmpl-{self.request_id}" if self.is_chat else f"cmpl-{self.request_id}",
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def build_logprobs(
        self, outputs: Sequence[Completion | CompletionChunk], offset: int, *, drop_last: bool
    ) -> Data | None:
        """Build the log-probabilities of tokens and of their alternatives, or None if they were not requested.

        `offset` is the length of the text before these tokens. `drop_last` leaves out the last token. It is set
        if that token is a stop token, which is not part of the text.
        """
        if self.num_logprobs is None:
            return None
        tokens = [token for output in outputs for token in output.tokens]
        count = len(tokens) - drop_last
        tokens = tokens[:count]
        logprobs = [value for output in outputs for value in output.logprobs or []][:count]
        top_logprobs = [top for output in outputs for top in output.top_logprobs or [{} for _ in output.tokens]][:count]
        if self.is_chat:
            rows = [self._build_logprob_entry(*entry) for entry in zip(tokens, logprobs, strict=True)]
            for row, top in zip(rows, top_logprobs, strict=True):
                row["top_logprobs"] = [self._build_logprob_entry(*other) for other in top.items()]
            return {"content": rows, "refusal": None}
        token_strs = [self._token_text(token) for token in tokens]
        offsets = []
        for token_str in token_strs:
            offsets.append(offset)
            offset += len(token_str)
        alternatives = None
        if self.num_logprobs:
            alternatives = [
                logprobs_by_text(self._token_text, top, token, value)
                for token, value, top in zip(tokens, logprobs, top_logprobs, strict=True)
            ]
        return {"tokens": token_strs, "token_logprobs": logprobs, "top_logprobs": alternatives, "text_offset": offsets}

    def _build_logprob_entry(self, token: int, logprob: float) -> Data:
        decoder = self.serving.token_decoder
        token_bytes = None if decoder is None else list(decoder.token_bytes(token))
        return {"token": self._token_text(token), "logprob": max(logprob, -9999.0), "bytes": token_bytes}

    def _token_text(self, token: int) -> str:
        decoder = self.serving.token_decoder
        return f"token_id:{token}" if decoder is None else decoder.token_text(token)

    def _build_usage(self, stream: CompletionStream) -> Data:
        num_prompt = stream.num_prompt_tokens
        num_generated = 0 if self._is_without_completion else stream.num_generated_tokens
        total = num_prompt + num_generated
        return {"prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": total}


def _build_choice(index: int, content: Data, logprobs: Data | None = None, finish_reason: str | None = None) -> Data:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
