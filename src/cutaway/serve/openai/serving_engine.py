"""Serving engine: one checkpoint with its generation engine, thread pools for tokenizing and embedding, and limits."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from cutaway.errors import InputError
from cutaway.generate import BusyError, Engine, EngineError, RequestGroup, SamplingParams
from cutaway.generate.engine.config import EngineOptions, SchedulingPolicy, build_engine_config, reduce_num_seqs_to_fit
from cutaway.generate.generation_config import CheckpointLike, apply_generation_config, unpack_checkpoint
from cutaway.generate.sampling.sampling_params import completion_seeds
from cutaway.model.adapters.adapter_methods import BASE_ADAPTER
from cutaway.serve.errors import APIError, overload_error
from cutaway.serve.limits import Limits
from cutaway.serve.metrics import ModelMetrics, ServerMetrics
from cutaway.serve.openai.completion_stream import CompletionStream, EventLoopNotifier
from cutaway.serve.openai.token_decoder import TokenDecoder
from cutaway.serve.request_context import RequestContext, current_request
from cutaway.tokenizer import Tokenizer

T = TypeVar("T")
DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_SOURCE_LEN = 32, 8192, 1024
log = logging.getLogger("cutaway.serve")


class ServingEngine:
    """One checkpoint, its served name and its engine. `submit` and `run_in_pool` must be called on the event loop."""

    def __init__(
        self,
        checkpoint: CheckpointLike,
        served_model_name: str,
        limits: Limits,
        *,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        memory_utilization: float | None = None,
        scheduling_policy: SchedulingPolicy = "round-robin",
        pooling: str | None = None,
        weight_bits: int | None = None,
        adapters: Sequence[str] = (),
        metrics: ServerMetrics | None = None,
    ) -> None:
        """`adapters`: names of adapters of the model that are served under their names. Requests for
        `served_model_name` use the model's active adapter if it is not one of them, else the base model.
        `metrics`: metrics of the server, to which those of the model are added."""
        self.model, self.tokenizer, self.generation_config = unpack_checkpoint(checkpoint)
        self.model.eval()
        self.hf_config: Mapping[str, Any] = getattr(checkpoint, "hf_config", {})
        self.sentence_transformers_config: Mapping[str, Any] = getattr(checkpoint, "sentence_transformers_config", {})
        self.served_model_name, self.limits, self.pooling = served_model_name, limits, pooling
        active = self.model.active_adapter
        self.adapters = {served_model_name: None if active in adapters else active} | {name: name for name in adapters}
        """Adapter of each served name; None is the base model."""
        if len(self.adapters) <= len(adapters):
            raise InputError(f"the model and an adapter have the same name '{served_model_name}'; rename one of them")
        self.metrics = ModelMetrics(metrics or ServerMetrics(), served_model_name)
        self.token_decoder = None if self.tokenizer is None else TokenDecoder(self.tokenizer)
        self.engine: Engine | None = None
        if "decoder" in self.model.stacks and self.model.config.head.kind == "lm":
            self.engine = self._start_engine(
                max_num_seqs,
                max_model_len,
                cache_implementation="paged",
                memory_utilization=memory_utilization,
                scheduling_policy=scheduling_policy,
                weight_bits=weight_bits,
            )
        self.is_encoder_decoder = "encoder" in self.model.stacks and self.engine is not None
        """If True, prompts are encoder inputs, which do not count toward the decoder's context."""
        self.notifier: EventLoopNotifier | None = None
        self.num_preprocessing = 0
        self.tokenizer_pool = ThreadPoolExecutor(2, "cutaway tokens")
        self.embedding_pool = ThreadPoolExecutor(1, "cutaway vectors")
        add_gauge = self.metrics.add_gauge
        if engine := self.engine:
            add_gauge("num_requests_waiting", "Completions waiting to be scheduled.", lambda: len(engine.waiting))
            add_gauge(
                "num_requests_running",
                "Completions in prefill or decode.",
                lambda: len(engine.scheduler.running),
            )
            max_num_seqs = engine.config.max_num_seqs
            add_gauge("max_num_seqs", "Maximum number of completions in progress.", lambda: max_num_seqs)
            add_gauge("kv_cache_usage_ratio", "Fraction of the KV cache in use.", self.kv_cache_usage)
            stats, add_counter = engine.scheduler.stats, self.metrics.add_counter
            queries, hits = "Prompt tokens looked up in the prefix cache.", "Prompt tokens found in the prefix cache."
            add_counter("prefix_cache_queries", queries, lambda: stats.prefix_cache_queries)
            add_counter("prefix_cache_hits", hits, lambda: stats.prefix_cache_hits)
            add_counter("num_preemptions", "Completions that were preempted.", lambda: stats.num_preemptions)
        description = "Requests waiting for tokenization or embedding."
        add_gauge("num_requests_preprocessing", description, lambda: self.num_preprocessing)

    def _start_engine(
        self, max_num_seqs: int | None, max_model_len: int | None, **options: Unpack[EngineOptions]
    ) -> Engine:
        context = self.model.config.context
        if max_model_len is None:
            max_model_len = min(context or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
        engine_config = build_engine_config(
            self.model,
            self.generation_config,
            max_num_seqs=max_num_seqs or DEFAULT_MAX_NUM_SEQS,
            max_model_len=max_model_len,
            adapters=tuple(self.adapters.values()),
            **options,
            max_source_len=min(context or DEFAULT_MAX_SOURCE_LEN, DEFAULT_MAX_SOURCE_LEN),
        )
        engine_config = engine_config if max_num_seqs is not None else reduce_num_seqs_to_fit(engine_config)
        return Engine(engine_config, tokenizer=self.tokenizer, max_waiting=self.limits.max_waiting_requests).start()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its completion, or of a text to embed."""
        if self.engine is not None:
            return self.engine.config.num_slots
        stack = next(iter(self.model.stacks.values()))
        max_positions = getattr(stack.embed.position, "max_positions", None)
        head_limit = getattr(self.model.config.head, "max_length", None)
        limits = (self.model.config.context, max_positions, head_limit, DEFAULT_MAX_MODEL_LEN)
        return min(limit for limit in limits if limit)

    @property
    def max_prompt_len(self) -> int:
        """Maximum number of tokens of a prompt."""
        if self.engine is None:
            return self.max_model_len
        return self.engine.config.max_source_len if self.is_encoder_decoder else self.max_model_len - 1

    @property
    def is_healthy(self) -> bool:
        return self.engine is None or not self.engine.closed

    def kv_cache_usage(self) -> float:
        engine = self.engine
        assert engine is not None
        assert engine.scheduler.page_pool is not None
        return engine.scheduler.page_pool.usage

    def adapter_of(self, model: str | None) -> str | None:
        """Adapter of a served name, which `ServedModels.find` has checked; None is the base model."""
        return self.adapters[model or self.served_model_name]

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise APIError(400, "this model has no tokenizer; pass token ids instead of text", code="no_tokenizer")
        return self.tokenizer

    # Thread pools

    async def run_in_pool(
        self,
        work: Callable[[], T],
        *,
        use_embedding_pool: bool = False,
        timeout: float | None = None,
        on_abandoned: Callable[[T], object] | None = None,
    ) -> T:
        """Run `work` in a thread pool and return its result. Raise an error with status 429 if too many requests wait.

        If the caller is canceled or times out, `work` runs to its end, and `on_abandoned` is called with its result.
        """
        if self.num_preprocessing >= self.limits.max_preprocessing_requests:
            raise self.queue_full_error()
        self.num_preprocessing += 1
        pool = self.embedding_pool if use_embedding_pool else self.tokenizer_pool
        task = asyncio.get_running_loop().run_in_executor(pool, work)
        task.add_done_callback(self._on_preprocessed)
        delivered = False
        try:
            async with asyncio.timeout(timeout):
                result = await asyncio.shield(task)
            delivered = True
            return result
        except TimeoutError:
            message = f"tokenizing took longer than {timeout:g} seconds; send a shorter text"
            raise APIError(400, message, code="timeout") from None
        finally:
            if on_abandoned is not None and not delivered:
                task.add_done_callback(lambda future: on_abandoned(future.result()) if _has_result(future) else None)

    def _on_preprocessed(self, future: "asyncio.Future[T]") -> None:
        self.num_preprocessing -= 1
        _has_result(future)  # retrieves the exception, so that asyncio does not log that it was never retrieved

    def queue_full_error(self) -> APIError:
        return overload_error("too many requests are waiting; try again later", "queue_full", self.limits)

    # Completions

    async def submit(
        self,
        encode_prompts: Callable[[], list[list[int]]],
        params: SamplingParams,
        adapter: str | None = None,
        *,
        priority: int = 0,
    ) -> CompletionStream:
        """Tokenize the prompts and submit them to the engine. Requests of different clients take turns."""
        if self.engine is None:
            is_classifier = self.model.config.head.kind == "sequence-classification"
            name = "a classifier" if is_classifier else "an encoder" if "encoder" in self.model.stacks else "no LM"
            route = "/classify" if is_classifier else "/v1/embeddings"
            raise APIError(400, f"this model is {name}, which does not generate text; use {route}")
        self.notifier = self.notifier or EventLoopNotifier(asyncio.get_running_loop())
        start_time, context = asyncio.get_running_loop().time(), current_request()
        stream = await self.run_in_pool(
            lambda: self._submit_prompts(encode_prompts(), params, adapter, priority, context),
            timeout=self.limits.tokenize_timeout,
            on_abandoned=CompletionStream.abort,
        )
        stream.start_time = start_time
        return stream

    def _submit_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        adapter: str | None,
        priority: int,
        context: RequestContext,
    ) -> CompletionStream:
        """Submit all completions of the request, or none if there is an error. This runs in a thread."""
        engine, requests = self.engine, []
        assert engine is not None
        assert self.notifier is not None
        group = RequestGroup(context.client, engine.config.resolved_max_seqs_per_request)
        forced_bos = self.generation_config.forced_bos_token_id
        output_prefix = [forced_bos] if self.is_encoder_decoder and forced_bos is not None else []
        try:
            for prompt in prompts:
                prompt_params = self._resolve_max_new_tokens(prompt, params)
                requests += [
                    engine.submit(
                        prompt,
                        prompt_params,
                        seed=seed,
                        output_prefix=output_prefix,
                        adapter=BASE_ADAPTER if adapter is None else adapter,
                        group=group,
                        priority=priority,
                    )
                    for seed in completion_seeds(params)
                ]
            return CompletionStream(requests, sum(map(len, prompts)), self.notifier, self.metrics, context)
        except BaseException as error:
            for request in requests:
                request.abort()
            if isinstance(error, BusyError):
                raise self.queue_full_error() from None
            if isinstance(error, EngineError):
                raise APIError(503, "the engine failed; restart the server") from error
            raise

    def _resolve_max_new_tokens(self, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Return `params` with max_new_tokens and the generation config applied. Raise if the context is too short.

        Without max_new_tokens in the request, the generation config sets it, or else it is the rest of the context.
        """
        self.check_prompt_length(len(prompt))
        num_context_tokens = 1 if self.is_encoder_decoder else len(prompt)
        max_new, max_new_tokens = self.max_model_len - num_context_tokens, params.max_new_tokens
        if max_new_tokens is not None and max_new_tokens > max_new:
            description = f"prompt and max_tokens take {num_context_tokens} + {max_new_tokens} tokens"
            raise context_length_error(description, self.max_model_len)
        if max_new_tokens is None:
            default = self.generation_config.max_new_tokens_for(num_context_tokens) or max_new
            max_new_tokens = min(default, max_new, self.limits.max_tokens)
        params = replace(params, max_new_tokens=max_new_tokens)
        return apply_generation_config(params, self.generation_config, num_context_tokens)

    def check_prompt_length(self, num_tokens: int) -> None:
        if not num_tokens:
            raise APIError(400, "the prompt is empty; pass at least one token", param="prompt")
        max_len = min(self.max_prompt_len, self.limits.max_prompt_tokens)
        if num_tokens > max_len:
            raise context_length_error(f"the prompt has {num_tokens} tokens", max_len)

    def check_token_ids(self, tokens: Sequence[int]) -> None:
        vocab_size = getattr(self.model.config, "source_vocab_size", None) or self.model.config.vocab_size
        if max(tokens) >= vocab_size:
            message = f"a token id is {max(tokens)}; the vocabulary has ids 0 to {vocab_size - 1}"
            raise APIError(400, message, param="input")

    def check_text_length(self, texts: Sequence[str], param: str) -> None:
        """Raise if the texts are too long. This is called before they are tokenized."""
        if sum(map(len, texts)) > self.limits.max_prompt_characters:
            message = f"the texts have more than {self.limits.max_prompt_characters} characters; send fewer"
            raise APIError(400, message, param=param)
        max_characters = self.limits.max_characters_per_token * self.max_prompt_len
        if any(len(text) > max_characters for text in texts):
            raise context_length_error(f"a text has more than {max_characters} characters", self.max_prompt_len)

    def record_prompt_tokens(self, count: int) -> None:
        """Add the tokens of texts that were embedded or classified to the metrics and to the HTTP request."""
        self.metrics.prompt_tokens.inc(count)
        current_request().add_tokens(count)

    def close(self) -> None:
        """Stop the engine and the thread pools. Waiting requests fail."""
        if self.engine is not None:
            self.engine.close()
        self.tokenizer_pool.shutdown(wait=False, cancel_futures=True)
        self.embedding_pool.shutdown(wait=False, cancel_futures=True)


def _has_result(future: "asyncio.Future[T]") -> bool:
    return not future.cancelled() and future.exception() is None


def check_encoded_texts(serving: ServingEngine, rows: Sequence[Sequence[int]]) -> int:
    """Number of tokens of texts to embed or to classify. Raises APIError if they are too long or invalid."""
    for row in rows:
        serving.check_prompt_length(len(row))
        serving.check_token_ids(row)
    total = sum(map(len, rows))
    if total > serving.limits.max_embedding_tokens:
        raise context_length_error(f"the inputs have {total} tokens", serving.limits.max_embedding_tokens)
    return total


def context_length_error(description: str, max_tokens: int) -> APIError:
    message = f"{description}, but the maximum is {max_tokens} tokens; send fewer"
    return APIError(400, message, param="prompt", code="context_length_exceeded")


def to_api_error(error: Exception) -> APIError:
    """Convert an error during generation to an APIError. The text of an internal error is logged, not sent."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InputError):
        return APIError(400, str(error))
    log.error("generation failed: %s", error)
    return APIError(500, "internal server error during generation; see the server log")
