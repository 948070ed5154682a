"""Routes of the OpenAI-compatible API: completions, chat, embeddings, models, tokenize, health, metrics."""

import threading
import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cutaway.generate import EngineError
from cutaway.generate.generation_config import CheckpointLike
from cutaway.serve.app import build_app
from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.openai import request_mapping
from cutaway.serve.openai.completion_stream import CompletionStream
from cutaway.serve.openai.embeddings import compute_embeddings, encode_float32_base64
from cutaway.serve.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    OpenAIBaseModel,
    TokenizeRequest,
)
from cutaway.serve.openai.response_builder import ResponseBuilder
from cutaway.serve.openai.serving_engine import ServingEngine, context_length_error, to_api_error
from cutaway.serve.openai.sse import SSEResponse, with_cancellation

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"description": description}
    for code, description in (
        (400, "invalid request"),
        (401, "missing or wrong API key"),
        (403, "cross-origin request"),
        (404, "unknown model"),
        (408, "timeout"),
        (413, "request body too large"),
        (415, "request body is not JSON"),
        (421, "unknown Host header"),
        (429, "queue full; retry later"),
        (431, "request headers too large"),
        (500, "internal server error"),
        (503, "engine failed"),
    )
}
STREAMING_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


def build_router(serving: ServingEngine) -> APIRouter:
    """Build the routes of the API."""
    router = APIRouter(responses=ERROR_RESPONSES)
    created = int(time.time())
    model_card = {
        "id": serving.served_model_name,
        "object": "model",
        "created": created,
        "owned_by": "cutaway",
        "max_model_len": serving.max_model_len,
    }

    @router.get("/health")
    async def health() -> Response:
        """Health check: 200 while the engine is running, else 503."""
        status = {"status": "ok"} if serving.is_healthy else {"status": "the engine failed; restart the server"}
        return JSONResponse(status, 200 if serving.is_healthy else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the Prometheus text format."""
        return PlainTextResponse(serving.metrics.render(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [model_card]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """Describe the served model."""
        serving.check_model_name(model)
        return model_card

    @router.post("/v1/completions", responses=STREAMING_RESPONSES)
    async def completions(request: CompletionRequest, raw_request: Request) -> Response:
        """Generate completions for prompts; for an encoder-decoder, the prompt is the source."""
        check_request(request, serving)
        encode_prompts, params = request_mapping.map_completion_request(request, serving)
        stream = await serving.submit(encode_prompts, params)
        return await reply(
            stream, ResponseBuilder(serving, is_chat=False, num_logprobs=params.logprobs), request, raw_request
        )

    @router.post("/v1/chat/completions", responses=STREAMING_RESPONSES)
    async def chat(request: ChatCompletionRequest, raw_request: Request) -> Response:
        """Generate a chat completion with the checkpoint's chat template."""
        check_request(request, serving)
        encode_prompts, params = request_mapping.map_chat_request(request, serving)
        stream = await serving.submit(encode_prompts, params, fill_context=True)
        return await reply(
            stream, ResponseBuilder(serving, is_chat=True, num_logprobs=params.logprobs), request, raw_request
        )

    async def reply(
        stream: CompletionStream, builder: ResponseBuilder, request: GenerationRequest, raw_request: Request
    ) -> Response:
        if request.stream:
            with_usage = bool(request.stream_options and request.stream_options.include_usage)
            return SSEResponse(
                stream, lambda: builder.stream_response(stream, include_usage=with_usage), serving.limits
            )
        try:
            results = await with_cancellation(raw_request, stream.wait_results(), serving.limits)
        except EngineError as error:
            raise to_api_error(error) from None
        finally:
            stream.abort()
        return JSONResponse(builder.build_response(stream, results))

    @router.post("/v1/embeddings")
    async def embeddings(request: EmbeddingRequest, raw_request: Request) -> Response:
        """Compute one L2-normalized embedding per text."""
        check_request(request, serving)
        prompts = request_mapping.as_prompt_list(request.input, "input", serving.limits.max_embedding_inputs)
        encode_prompts = request_mapping.build_prompt_encoder(prompts, serving, "input")
        disconnected = threading.Event()

        def compute() -> tuple[list[list[float]], int]:
            rows = encode_prompts()
            for row in rows:
                serving.check_prompt_length(len(row))
                serving.check_token_ids(row)
            total = sum(map(len, rows))
            if total > serving.limits.max_embedding_tokens:
                raise context_length_error(f"the inputs have {total} tokens", serving.limits.max_embedding_tokens)
            return compute_embeddings(serving.model, rows, serving.pooling, lambda: not disconnected.is_set()), total

        try:
            vectors, total = await with_cancellation(
                raw_request, serving.run_in_pool(compute, use_embedding_pool=True), serving.limits
            )
        finally:
            disconnected.set()
        serving.metrics.prompt_tokens += total
        use_base64 = request.encoding_format == "base64"
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": encode_float32_base64(vector) if use_base64 else vector,
            }
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": total, "total_tokens": total}
        return JSONResponse({"object": "list", "data": data, "model": serving.served_model_name, "usage": usage})

    @router.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """Tokenize a text or a chat."""
        check_request(request, serving)
        if (request.prompt is None) == (request.messages is None):
            raise APIError(400, "pass either prompt or messages", param="prompt")
        tokenizer = serving.get_tokenizer()
        if request.messages is not None:
            encode_prompts = request_mapping.build_chat_encoder(request.messages, serving)
            tokens = (await serving.run_in_pool(encode_prompts))[0]
        else:
            text = request.prompt or ""
            serving.check_text_length([text], "prompt")
            tokens = await serving.run_in_pool(
                lambda: tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
            )
        strings = [] if serving.token_decoder is None else [serving.token_decoder.token_text(token) for token in tokens]
        return {"count": len(tokens), "max_model_len": serving.max_model_len, "tokens": tokens, "token_strs": strings}

    @router.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> dict[str, str]:
        """Decode token ids to text."""
        check_request(request, serving)
        tokenizer = serving.get_tokenizer()
        request_mapping.check_limit("tokens", len(request.tokens), serving.limits.max_prompt_tokens)
        return {"prompt": await serving.run_in_pool(lambda: tokenizer.decode(request.tokens))}

    return router


def check_request(request: OpenAIBaseModel, serving: ServingEngine) -> None:
    """Raise unless the request names this model and only supported fields."""
    serving.check_model_name(request.model)
    request.check_unsupported_fields()


def build_openai_app(
    checkpoint: CheckpointLike,
    served_model_name: str,
    *,
    access_policy: AccessPolicy | None = None,
    limits: Limits | None = None,
    **engine_options: Any,
) -> tuple[FastAPI, ServingEngine]:
    """Build the application and its `ServingEngine`, which is closed when the server shuts down.

    `engine_options` are keyword arguments of `ServingEngine`.
    """
    limits = limits or Limits()
    serving = ServingEngine(checkpoint, served_model_name, limits, **engine_options)
    app = build_app(
        [build_router(serving)],
        access_policy=access_policy,
        limits=limits,
        on_shutdown=[serving.close],
        on_response=serving.metrics.record_response,
    )
    return app, serving
