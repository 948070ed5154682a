"""Routes of the OpenAI-compatible API: completions, chat, embeddings, classify, models, tokenize, health, metrics."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cutaway.errors import InputError
from cutaway.generate import EngineError, SamplingParams
from cutaway.generate.embed import default_prompt
from cutaway.generate.engine.config import SchedulingPolicy
from cutaway.generate.generation_config import CheckpointLike
from cutaway.serve.app import build_app
from cutaway.serve.errors import APIError
from cutaway.serve.json_response import json_response
from cutaway.serve.json_route import JSONRoute
from cutaway.serve.limits import Limits
from cutaway.serve.metrics import ServerMetrics
from cutaway.serve.middleware import AccessPolicy
from cutaway.serve.openai import protocol, request_mapping
from cutaway.serve.openai.classification import add_classify_route
from cutaway.serve.openai.embeddings import compute_embeddings, encode_float32_base64
from cutaway.serve.openai.response_builder import ResponseBuilder
from cutaway.serve.openai.responses import add_responses_route
from cutaway.serve.openai.scoring import add_scoring_routes
from cutaway.serve.openai.served_models import ServedModels
from cutaway.serve.openai.serving_engine import ServingEngine, check_encoded_texts, to_api_error
from cutaway.serve.openai.sse import SSEResponse, with_cancellation
from cutaway.serve.openai.tools import ToolUse
from cutaway.serve.request_context import current_request
from cutaway.serve.request_log import log_request

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "invalid request"},
    401: {"description": "missing or wrong API key"},
    403: {"description": "cross-origin request"},
    404: {"description": "unknown model"},
    408: {"description": "timeout"},
    413: {"description": "request body too large"},
    415: {"description": "request body is not JSON"},
    421: {"description": "unknown Host header"},
    429: {"description": "queue full; retry later"},
    431: {"description": "request headers too large"},
    500: {"description": "internal server error"},
    503: {"description": "engine failed"},
}
STREAMING_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


def build_router(models: ServedModels) -> APIRouter:
    """Build the router with the routes of the OpenAI-compatible API."""
    router = APIRouter(responses=ERROR_RESPONSES, route_class=JSONRoute)

    @router.get("/health")
    async def health() -> Response:
        """Health check: 200 while the engines of all models are running, else 503."""
        status = {"status": "ok"} if models.is_healthy else {"status": "the engine failed; restart the server"}
        return JSONResponse(status, 200 if models.is_healthy else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics in the Prometheus text format."""
        return PlainTextResponse(models.metrics.render(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def list_models() -> dict[str, object]:
        """List the served models and their adapters."""
        return {"object": "list", "data": models.cards()}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, object]:
        """Describe a served model or an adapter."""
        models.find(model)
        return models.card(model)

    @router.post("/v1/completions", responses=STREAMING_RESPONSES)
    async def completions(request: protocol.CompletionRequest, raw_request: Request) -> Response:
        """Generate completions for prompts. For an encoder-decoder, the prompt is the source."""
        serving = _check_request(request, models)
        return await generate(serving, request, raw_request, *request_mapping.map_completion_request(request, serving))

    @router.post("/v1/chat/completions", responses=STREAMING_RESPONSES)
    async def chat(request: protocol.ChatCompletionRequest, raw_request: Request) -> Response:
        """Generate a chat completion with the checkpoint's chat template."""
        serving = _check_request(request, models)
        return await generate(serving, request, raw_request, *request_mapping.map_chat_request(request, serving))

    async def generate(
        serving: ServingEngine,
        request: protocol.GenerationRequest,
        raw_request: Request,
        encode_prompts: Callable[[], list[list[int]]],
        params: SamplingParams,
        tool_use: ToolUse | None = None,
    ) -> Response:
        stream = await serving.submit(
            encode_prompts,
            params,
            serving.adapter_of(request.model),
            priority=request.priority or 0,
        )
        is_chat = isinstance(request, protocol.ChatCompletionRequest)
        model = request.model or serving.served_model_name
        prompt_output = request_mapping.build_prompt_output(request, params, serving)
        builder = ResponseBuilder(
            serving,
            model,
            is_chat=is_chat,
            num_logprobs=params.logprobs,
            prompt_output=prompt_output,
            tool_use=tool_use,
        )
        if request.stream:
            with_usage = bool(request.stream_options and request.stream_options.include_usage)
            return SSEResponse(stream, builder.stream_response(stream, include_usage=with_usage), serving.limits)
        try:
            results = await with_cancellation(raw_request, stream.wait_results(), serving.limits)
        except (EngineError, InputError) as error:
            raise to_api_error(error) from None
        finally:
            stream.abort()
        num_values = 0 if params.logprobs is None else stream.num_generated_tokens * (params.logprobs + 1)
        if prompt_output is not None:
            num_values += stream.num_prompt_tokens * (1 + (params.prompt_logprobs or 0)) * params.n
        return await json_response(lambda: builder.build_response(stream, results), num_values)

    @router.post("/v1/embeddings")
    async def embeddings(request: protocol.EmbeddingRequest, raw_request: Request) -> Response:
        """Compute one embedding per text, with the embedding head, or as the normalized mean of the hidden states."""
        serving = _check_request(request, models)
        prompts = request_mapping.as_prompt_list(request.input, "input", serving.limits.max_embedding_inputs)
        prompt = default_prompt(serving.sentence_transformers_config)
        prompts = [prompt + text if isinstance(text, str) else text for text in prompts]
        encode_prompts = request_mapping.build_prompt_encoder(prompts, serving, "input")
        disconnected = threading.Event()
        adapter = serving.adapter_of(request.model)

        def compute() -> tuple[list[list[float]], int]:
            rows = encode_prompts()
            total = check_encoded_texts(serving, rows)
            with serving.model.use_adapters([adapter]) if serving.model.adapters else nullcontext():
                vectors = compute_embeddings(serving.model, rows, serving.pooling, lambda: not disconnected.is_set())
            return vectors, total

        work = serving.run_in_pool(compute, use_embedding_pool=True)
        try:
            vectors, total = await with_cancellation(raw_request, work, serving.limits)
        finally:
            disconnected.set()
        serving.record_prompt_tokens(total)

        def build() -> dict[str, object]:
            embeddings = map(encode_float32_base64, vectors) if request.encoding_format == "base64" else vectors
            data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(embeddings)]
            usage = {"prompt_tokens": total, "total_tokens": total}
            model = request.model or serving.served_model_name
            return {"object": "list", "data": data, "model": model, "usage": usage}

        return await json_response(build, sum(map(len, vectors)))

    add_classify_route(router, models)
    add_responses_route(router, models)
    add_scoring_routes(router, models)

    @router.post("/tokenize")
    async def tokenize(request: protocol.TokenizeRequest) -> Response:
        """Tokenize a text or a chat."""
        serving = _check_request(request, models)
        if (request.prompt is None) == (request.messages is None):
            raise APIError(400, "prompt and messages are both set or both missing; pass one of them", param="prompt")
        tokenizer = serving.get_tokenizer()
        if request.messages is not None:
            encode_prompts = request_mapping.build_chat_encoder(request.messages, serving)
            tokens = (await serving.run_in_pool(encode_prompts))[0]
        else:
            text = request.prompt or ""
            serving.check_text_length([text], "prompt")
            special = request.add_special_tokens
            tokens = await serving.run_in_pool(lambda: tokenizer.encode(text, add_special_tokens=special))
        decoder = serving.token_decoder

        def build() -> dict[str, object]:
            strings = [] if decoder is None else [decoder.token_text(token) for token in tokens]
            length = serving.max_model_len
            return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": strings}

        return await json_response(build, len(tokens))

    @router.post("/detokenize")
    async def detokenize(request: protocol.DetokenizeRequest) -> dict[str, str]:
        """Decode token ids to text."""
        serving = _check_request(request, models)
        tokenizer = serving.get_tokenizer()
        request_mapping.check_limit("tokens", len(request.tokens), serving.limits.max_prompt_tokens)
        return {"prompt": await serving.run_in_pool(lambda: tokenizer.decode(request.tokens))}

    return router


def _check_request(request: protocol.OpenAIBaseModel, models: ServedModels) -> ServingEngine:
    """Return the engine of the requested model. Raise if there is none, or if the request has an unsupported field."""
    serving = models.find(request.model)
    request.check_unsupported_fields()
    return serving


def build_openai_app(
    checkpoint: CheckpointLike,
    served_model_name: str,
    *,
    access_policy: AccessPolicy | None = None,
    limits: Limits | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    memory_utilization: float | None = None,
    scheduling_policy: SchedulingPolicy = "round-robin",
    pooling: str | None = None,
    weight_bits: int | None = None,
    adapters: Sequence[str] = (),
) -> tuple[FastAPI, ServingEngine]:
    """Build the OpenAI-compatible application and its `ServingEngine`, which is closed when the server shuts down.

    `adapters` are names of adapters of the model, which clients select with the field `model`.
    """
    limits = limits or Limits()
    serving = ServingEngine(
        checkpoint,
        served_model_name,
        limits,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        memory_utilization=memory_utilization,
        scheduling_policy=scheduling_policy,
        pooling=pooling,
        weight_bits=weight_bits,
        adapters=adapters,
    )
    return build_models_app([serving], serving.metrics.server, access_policy=access_policy, limits=limits), serving


def build_models_app(
    engines: Sequence[ServingEngine],
    metrics: ServerMetrics,
    *,
    access_policy: AccessPolicy | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """Build the OpenAI-compatible application of several models. `metrics` are those of the engines.

    Requests without a model name go to the first one.
    """
    models = ServedModels(engines, metrics)

    def on_response(route: str, status: int, seconds: float) -> None:
        metrics.record_response(route, status, seconds)
        log_request(current_request(), route, status, seconds)

    return build_app(
        [build_router(models)],
        access_policy=access_policy,
        limits=limits,
        on_shutdown=[models.close],
        on_response=on_response,
    )
