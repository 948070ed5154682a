"""Answers as OpenAI writes them: whole or in chunks, of completions and of chats."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutaway.generate import Generation, Piece
from cutaway.serve.openai.asked import Asked
from cutaway.serve.openai.host import Host


@dataclass
class Form:
    """How this request's answers are written."""

    host: Host
    chat: bool
    wants: int | None
    """Alternatives beside each token; None for no log-probabilities."""
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, asked: Asked, found: Sequence[Generation]) -> dict[str, Any]:
        choices = [self.choice(place, one) for place, one in enumerate(found)]
        return {**self.head("chat.completion" if self.chat else "text_completion", choices), "usage": usage(asked)}

    async def chunks(self, asked: Asked, *, with_usage: bool) -> AsyncIterator[dict[str, Any]]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        more: dict[str, Any] = {"usage": None} if with_usage else {}
        shown = [0] * len(asked.tickets)
        if self.chat:
            for place in range(len(asked.tickets)):
                first = {"role": "assistant", "content": ""}
                yield {**self.head(kind, [self.part(place, delta=first)]), **more}
        async for place, pieces, over in asked.pieces():
            text = "".join(piece.text for piece in pieces)
            reason = asked.result(place).finish_reason if over else None
            logprobs = self.logprobs_of_pieces(pieces, shown[place], self.ended_by_token(asked, place, over))
            shown[place] += len(text)
            if text or logprobs:
                choice = self.part(place, text=text, logprobs=logprobs)
                yield {**self.head(kind, [choice]), **more}
            if reason is not None:
                yield {**self.head(kind, [self.part(place, delta={}, reason=reason)]), **more}
        if with_usage:
            yield {**self.head(kind, []), "usage": usage(asked)}

    def head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        number = f"chatcmpl-{self.number}" if self.chat else f"cmpl-{self.number}"
        return {"id": number, "object": kind, "created": self.created, "model": self.host.name, "choices": choices}

    def part(
        self,
        place: int,
        *,
        text: str = "",
        delta: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """A choice in a chunk."""
        said = {"delta": {"content": text} if delta is None else delta} if self.chat else {"text": text}
        return {"index": place, **said, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, place: int, found: Generation) -> dict[str, Any]:
        text = found.text or ""
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        logprobs = None
        if self.wants is not None:
            count = len(found.tokens) - isinstance(found.stop, int)  # the token that ended it is no part of the text
            tops = found.top_logprobs or [{} for _ in found.tokens]
            logprobs = self.logprobs(found.tokens[:count], (found.logprobs or [])[:count], tops[:count], 0)
        return {"index": place, **said, "logprobs": logprobs, "finish_reason": found.finish_reason}

    def ended_by_token(self, asked: Asked, place: int, over: bool) -> bool:
        return over and isinstance(asked.result(place).stop, int)

    def logprobs_of_pieces(self, pieces: list[Piece], offset: int, ended: bool) -> dict[str, Any] | None:
        if self.wants is None:
            return None
        tokens = [token for piece in pieces for token in piece.tokens]
        values = [value for piece in pieces for value in piece.logprobs or []]
        tops = [top for piece in pieces for top in piece.top_logprobs or [{} for _ in piece.tokens]]
        count = len(tokens) - ended
        return self.logprobs(tokens[:count], values[:count], tops[:count], offset) if count > 0 else None

    def logprobs(
        self, tokens: list[int], values: list[float], tops: list[dict[int, float]], offset: int
    ) -> dict[str, Any]:
        """Beside each token, the likeliest ones: exact, over the whole vocabulary."""
        if self.chat:
            rows = [
                {**self.spelt(token, value), "top_logprobs": [self.spelt(*other) for other in top.items()]}
                for token, value, top in zip(tokens, values, tops, strict=True)
            ]
            return {"content": rows, "refusal": None}
        names = [self.name(token) for token in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        alternatives = None
        if self.wants:
            alternatives = [
                {self.name(other): told for other, told in {**top, token: value}.items()}
                for token, value, top in zip(tokens, values, tops, strict=True)
            ]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": alternatives, "text_offset": offsets}

    def spelt(self, token: int, value: float) -> dict[str, Any]:
        spelling = self.host.spelling
        return {
            "token": self.name(token),
            "logprob": max(value, -9999.0),
            "bytes": None if spelling is None else list(spelling.of(token)),
        }

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.host.spelling is None else self.host.spelling.text(token)


def usage(asked: Asked) -> dict[str, int]:
    given, made = asked.prompt_tokens, asked.generated
    return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
