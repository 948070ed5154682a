"""Response bodies of the OpenAI API: completions and chat completions, whole or as stream chunks."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutaway.generate import Completion, CompletionChunk
from cutaway.serve.openai.completion_stream import CompletionStream
from cutaway.serve.openai.serving_engine import ServingEngine


@dataclass
class ResponseBuilder:
    """Builds the response body, or the stream chunks, of one request."""

    serving: ServingEngine
    is_chat: bool
    num_logprobs: int | None
    """Number of alternatives per token; None for no log-probabilities."""
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def build_response(self, stream: CompletionStream, results: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._build_choice(index, result) for index, result in enumerate(results)]
        return {
            **self._build_envelope("chat.completion" if self.is_chat else "text_completion", choices),
            "usage": build_usage(stream),
        }

    async def stream_response(self, stream: CompletionStream, *, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        object_type = "chat.completion.chunk" if self.is_chat else "text_completion"
        usage_field: dict[str, Any] = {"usage": None} if include_usage else {}
        text_lengths = [0] * len(stream.requests)
        if self.is_chat:
            for index in range(len(stream.requests)):
                delta = {"role": "assistant", "content": ""}
                yield {
                    **self._build_envelope(object_type, [self._build_chunk_choice(index, delta=delta)]),
                    **usage_field,
                }
        async for index, chunks, is_finished in stream.stream_chunks():
            text = "".join(chunk.text for chunk in chunks)
            finish_reason = stream.get_result(index).finish_reason if is_finished else None
            logprobs = self._build_chunk_logprobs(
                chunks, text_lengths[index], self._ended_by_stop_token(stream, index, is_finished)
            )
            text_lengths[index] += len(text)
            if text or logprobs:
                choice = self._build_chunk_choice(index, text=text, logprobs=logprobs)
                yield {**self._build_envelope(object_type, [choice]), **usage_field}
            if finish_reason is not None:
                yield {
                    **self._build_envelope(
                        object_type, [self._build_chunk_choice(index, delta={}, finish_reason=finish_reason)]
                    ),
                    **usage_field,
                }
        if include_usage:
            yield {**self._build_envelope(object_type, []), "usage": build_usage(stream)}

    def _build_envelope(self, object_type: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        response_id = f"chatcmpl-{self.request_id}" if self.is_chat else f"cmpl-{self.request_id}"
        return {
            "id": response_id,
            "object": object_type,
            "created": self.created,
            "model": self.serving.served_model_name,
            "choices": choices,
        }

    def _build_chunk_choice(
        self,
        index: int,
        *,
        text: str = "",
        delta: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """Build a choice of a stream chunk."""
        content = {"delta": {"content": text} if delta is None else delta} if self.is_chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _build_choice(self, index: int, result: Completion) -> dict[str, Any]:
        text = result.text or ""
        content = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        )
        logprobs = None
        if self.num_logprobs is not None:
            # A stop token is not part of the text, so it has no entry.
            count = len(result.tokens) - isinstance(result.stop_reason, int)
            top_logprobs = result.top_logprobs or [{} for _ in result.tokens]
            logprobs = self._build_logprobs(
                result.tokens[:count], (result.logprobs or [])[:count], top_logprobs[:count], 0
            )
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": result.finish_reason}

    def _ended_by_stop_token(self, stream: CompletionStream, index: int, finished: bool) -> bool:
        return finished and isinstance(stream.get_result(index).stop_reason, int)

    def _build_chunk_logprobs(
        self, chunks: list[CompletionChunk], offset: int, drop_last: bool
    ) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        tokens = [token for chunk in chunks for token in chunk.tokens]
        logprobs = [value for chunk in chunks for value in chunk.logprobs or []]
        top_logprobs = [top for chunk in chunks for top in chunk.top_logprobs or [{} for _ in chunk.tokens]]
        count = len(tokens) - drop_last
        return (
            self._build_logprobs(tokens[:count], logprobs[:count], top_logprobs[:count], offset) if count > 0 else None
        )

    def _build_logprobs(
        self, tokens: list[int], logprobs: list[float], top_logprobs: list[dict[int, float]], offset: int
    ) -> dict[str, Any]:
        """Build the log-probabilities of tokens and of the top alternatives, exact over the whole vocabulary."""
        if self.is_chat:
            rows = [
                {
                    **self._build_logprob_entry(token, value),
                    "top_logprobs": [self._build_logprob_entry(*other) for other in top.items()],
                }
                for token, value, top in zip(tokens, logprobs, top_logprobs, strict=True)
            ]
            return {"content": rows, "refusal": None}
        token_strs = [self._token_text(token) for token in tokens]
        offsets = []
        for token_str in token_strs:
            offsets.append(offset)
            offset += len(token_str)
        alternatives = None
        if self.num_logprobs:
            alternatives = [
                {self._token_text(other): other_logprob for other, other_logprob in {**top, token: value}.items()}
                for token, value, top in zip(tokens, logprobs, top_logprobs, strict=True)
            ]
        return {"tokens": token_strs, "token_logprobs": logprobs, "top_logprobs": alternatives, "text_offset": offsets}

    def _build_logprob_entry(self, token: int, logprob: float) -> dict[str, Any]:
        decoder = self.serving.token_decoder
        return {
            "token": self._token_text(token),
            "logprob": max(logprob, -9999.0),
            "bytes": None if decoder is None else list(decoder.token_bytes(token)),
        }

    def _token_text(self, token: int) -> str:
        return (
            f"token_id:{token}" if self.serving.token_decoder is None else self.serving.token_decoder.token_text(token)
        )


def build_usage(stream: CompletionStream) -> dict[str, int]:
    num_prompt, num_generated = stream.num_prompt_tokens, stream.num_generated_tokens
    return {"prompt_tokens": num_prompt, "completion_tokens": num_generated, "total_tokens": num_prompt + num_generated}
