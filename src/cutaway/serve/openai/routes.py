"""The addresses of the API, and what each does."""

import threading
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cutaway.generate import EngineError
from cutaway.serve.openai import wishes
from cutaway.serve.openai.answers import Form
from cutaway.serve.openai.asked import Asked
from cutaway.serve.openai.embeddings import embed, packed
from cutaway.serve.openai.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    Drawing,
    EmbeddingFields,
    Fields,
    TokenizeFields,
)
from cutaway.serve.openai.host import Host, too_long, why
from cutaway.serve.openai.sse import Events, unless_left
from cutaway.serve.refusal import Refused

REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"description": what}
    for code, what in (
        (400, "what was asked for cannot be"),
        (401, "no key, or a wrong one"),
        (403, "from another site"),
        (404, "no such model"),
        (408, "too slow"),
        (413, "too large"),
        (415, "not JSON"),
        (421, "not this server's name"),
        (429, "others wait: ask again later"),
        (431, "too many headers"),
        (500, "the server failed"),
        (503, "the engine broke down"),
    )
}

ALSO_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}


def make_router(host: Host) -> APIRouter:
    """Routes for this checkpoint."""
    router = APIRouter(responses=REFUSALS)
    born = int(time.time())
    card = {"id": host.name, "object": "model", "created": born, "owned_by": "cutaway", "max_model_len": host.context}

    @router.get("/health")
    async def health() -> Response:
        """Whether answers can be had."""
        said = {"status": "ok"} if host.alive else {"status": "the engine broke down; start the server again"}
        return JSONResponse(said, 200 if host.alive else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return PlainTextResponse(host.metrics.text(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is here."""
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """What is known of it."""
        host.named(model)
        return card

    @router.post("/v1/completions", responses=ALSO_EVENTS)
    async def completions(fields: CompletionFields, request: Request) -> Response:
        """Continue prompts; an encoder-decoder answers them."""
        checked(fields, host)
        read, settings = wishes.completion(fields, host)
        asked = await host.ask(read, settings)
        return await reply(asked, Form(host, chat=False, wants=settings.logprobs), fields, request)

    @router.post("/v1/chat/completions", responses=ALSO_EVENTS)
    async def chat(fields: ChatFields, request: Request) -> Response:
        """Answer a chat, by the checkpoint's own template."""
        checked(fields, host)
        read, settings = wishes.chat(fields, host)
        asked = await host.ask(read, settings, open_end=True)
        return await reply(asked, Form(host, chat=True, wants=settings.logprobs), fields, request)

    async def reply(asked: Asked, form: Form, fields: Drawing, request: Request) -> Response:
        if fields.stream:
            with_usage = bool(fields.stream_options and fields.stream_options.include_usage)
            return Events(asked, lambda: form.chunks(asked, with_usage=with_usage), host.limits)
        try:
            found = await unless_left(request, asked.results(), host.limits)
        except EngineError as error:
            raise why(error) from None
        finally:
            asked.cancel()
        return JSONResponse(form.whole(asked, found))

    @router.post("/v1/embeddings")
    async def embeddings(fields: EmbeddingFields, request: Request) -> Response:
        """A vector of length one for each text."""
        checked(fields, host)
        given = wishes.listed(fields.input, "input", host.limits.inputs)
        read = wishes.reader(given, host, "input")
        gone = threading.Event()

        def work() -> tuple[list[list[float]], int]:
            rows = read()
            for row in rows:
                host.check_length(len(row))
                host.check_ids(row)
            total = sum(map(len, rows))
            if total > host.limits.input_tokens:
                raise too_long(f"the texts have {total} tokens", host.limits.input_tokens)
            return embed(host.model, rows, host.pooling, lambda: not gone.is_set()), total

        try:
            vectors, total = await unless_left(request, host.aside(work, reader=True), host.limits)
        finally:
            gone.set()
        host.metrics.tokens_in += total
        coded = fields.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": place, "embedding": packed(vector) if coded else vector}
            for place, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": total, "total_tokens": total}
        return JSONResponse({"object": "list", "data": data, "model": host.name, "usage": usage})

    @router.post("/tokenize")
    async def tokenize(fields: TokenizeFields) -> dict[str, Any]:
        """The tokens of a text or a chat."""
        checked(fields, host)
        if (fields.prompt is None) == (fields.messages is None):
            raise Refused(400, "give a prompt or messages, one of the two", param="prompt")
        tokenizer = host.words()
        if fields.messages is not None:
            read = wishes.chat_reader(fields.messages, host)
            tokens = (await host.aside(read))[0]
        else:
            text = fields.prompt or ""
            host.check_characters([text], "prompt")
            tokens = await host.aside(lambda: tokenizer.encode(text, special=fields.add_special_tokens))
        strings = [] if host.spelling is None else [host.spelling.text(token) for token in tokens]
        return {"count": len(tokens), "max_model_len": host.context, "tokens": tokens, "token_strs": strings}

    @router.post("/detokenize")
    async def detokenize(fields: DetokenizeFields) -> dict[str, str]:
        """The text of tokens."""
        checked(fields, host)
        tokenizer = host.words()
        wishes.most("tokens", len(fields.tokens), host.limits.prompt_tokens)
        return {"prompt": await host.aside(lambda: tokenizer.decode(fields.tokens))}

    return router


def checked(fields: Fields, host: Host) -> None:
    """That it is for this model, and asks for nothing that is not here."""
    host.named(fields.model)
    fields.refuse_unsupported()
