"""Answers as OpenAI writes them: whole or in chunks, of completions and of chats."""

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
    """How this request's answers are written."""

    serving: ServingEngine
    is_chat: bool
    num_logprobs: int | None
    """Alternatives beside each token; None for no log-probabilities."""
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def build_response(self, stream: CompletionStream, results: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._build_choice(place, one) for place, one in enumerate(results)]
        return {
            **self._build_envelope("chat.completion" if self.is_chat else "text_completion", choices),
            "usage": build_usage(stream),
        }

    async def stream_response(self, stream: CompletionStream, *, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        more: dict[str, Any] = {"usage": None} if include_usage else {}
        shown = [0] * len(stream.requests)
        if self.is_chat:
            for place in range(len(stream.requests)):
                first = {"role": "assistant", "content": ""}
                yield {**self._build_envelope(kind, [self._build_chunk_choice(place, delta=first)]), **more}
        async for place, pieces, over in stream.stream_chunks():
            text = "".join(piece.text for piece in pieces)
            reason = stream.get_result(place).finish_reason if over else None
            logprobs = self._build_chunk_logprobs(pieces, shown[place], self._ended_by_stop_token(stream, place, over))
            shown[place] += len(text)
            if text or logprobs:
                choice = self._build_chunk_choice(place, text=text, logprobs=logprobs)
                yield {**self._build_envelope(kind, [choice]), **more}
            if reason is not None:
                yield {
                    **self._build_envelope(kind, [self._build_chunk_choice(place, delta={}, finish_reason=reason)]),
                    **more,
                }
        if include_usage:
            yield {**self._build_envelope(kind, []), "usage": build_usage(stream)}

    def _build_envelope(self, object_type: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        number = f"chatcmpl-{self.request_id}" if self.is_chat else f"cmpl-{self.request_id}"
        return {
            "id": number,
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
        """A choice in a chunk."""
        said = {"delta": {"content": text} if delta is None else delta} if self.is_chat else {"text": text}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}

    def _build_choice(self, index: int, result: Completion) -> dict[str, Any]:
        text = result.text or ""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        logprobs = None
        if self.num_logprobs is not None:
            count = len(result.tokens) - isinstance(
                result.stop_reason, int
            )  # the token that ended it is no part of the text
            tops = result.top_logprobs or [{} for _ in result.tokens]
            logprobs = self._build_logprobs(result.tokens[:count], (result.logprobs or [])[:count], tops[:count], 0)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": result.finish_reason}

    def _ended_by_stop_token(self, stream: CompletionStream, index: int, finished: bool) -> bool:
        return finished and isinstance(stream.get_result(index).stop_reason, int)

    def _build_chunk_logprobs(
        self, chunks: list[CompletionChunk], offset: int, drop_last: bool
    ) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        tokens = [token for piece in chunks for token in piece.tokens]
        values = [value for piece in chunks for value in piece.logprobs or []]
        tops = [top for piece in chunks for top in piece.top_logprobs or [{} for _ in piece.tokens]]
        count = len(tokens) - drop_last
        return self._build_logprobs(tokens[:count], values[:count], tops[:count], offset) if count > 0 else None

    def _build_logprobs(
        self, tokens: list[int], logprobs: list[float], top_logprobs: list[dict[int, float]], offset: int
    ) -> dict[str, Any]:
        """Beside each token, the likeliest ones: exact, over the whole vocabulary."""
        if self.is_chat:
            rows = [
                {
                    **self._build_logprob_entry(token, value),
                    "top_logprobs": [self._build_logprob_entry(*other) for other in top.items()],
                }
                for token, value, top in zip(tokens, logprobs, top_logprobs, strict=True)
            ]
            return {"content": rows, "refusal": None}
        names = [self._token_text(token) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        alternatives = None
        if self.num_logprobs:
            alternatives = [
                {self._token_text(other): told for other, told in {**top, token: value}.items()}
                for token, value, top in zip(tokens, logprobs, top_logprobs, strict=True)
            ]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": alternatives, "text_offset": offsets}

    def _build_logprob_entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelling = self.serving.token_decoder
        return {
            "token": self._token_text(token),
            "logprob": max(logprob, -9999.0),
            "bytes": None if spelling is None else list(spelling.token_bytes(token)),
        }

    def _token_text(self, token: int) -> str:
        return (
            f"token_id:{token}" if self.serving.token_decoder is None else self.serving.token_decoder.token_text(token)
        )


def build_usage(stream: CompletionStream) -> dict[str, int]:
    given, made = stream.num_prompt_tokens, stream.num_generated_tokens
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
