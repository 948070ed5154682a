"""A checkpoint at work for many: the engine, threads for tokens and vectors, and what fits."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from cutaway.errors import InputError
from cutaway.generate import BusyError, Engine, EngineError, SamplingParams
from cutaway.generate.engine.config import build_engine_config, reduce_num_seqs_to_fit
from cutaway.generate.generation_config import CheckpointLike, apply_generation_config, unpack_checkpoint
from cutaway.generate.sampling.sampling_params import completion_seeds
from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits
from cutaway.serve.metrics import ServerMetrics
from cutaway.serve.openai.completion_stream import CompletionStream, EventLoopNotifier
from cutaway.serve.openai.token_decoder import TokenDecoder
from cutaway.tokenizer import Tokenizer

T = TypeVar("T")
DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_SOURCE_LEN = 32, 8192, 1024
log = logging.getLogger("cutaway.serve")


class ServingEngine:
    """One checkpoint, its name, and all that answers for it. Everything here is called on the event loop."""

    def __init__(
        self,
        checkpoint: CheckpointLike,
        served_model_name: str,
        limits: Limits,
        *,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        pooling: str | None = None,
        metrics: ServerMetrics | None = None,
        **engine_options: Any,
    ) -> None:
        """`engine_options`: more of an `EngineConfig`'s fields, such as weight_bits."""
        self.model, self.tokenizer, self.generation_config = unpack_checkpoint(checkpoint)
        self.model.eval()
        self.served_model_name, self.limits, self.pooling = served_model_name, limits, pooling
        self.metrics = metrics or ServerMetrics()
        self.token_decoder = None if self.tokenizer is None else TokenDecoder(self.tokenizer)
        self.engine = (
            self._start_engine(max_num_seqs, max_model_len, engine_options) if "decoder" in self.model.stacks else None
        )
        self.is_encoder_decoder = "encoder" in self.model.stacks and self.engine is not None
        """Whether a prompt is a source, which takes no part of the answer's context."""
        self.notifier: EventLoopNotifier | None = None
        self.num_preprocessing = 0
        self.tokenizer_pool = ThreadPoolExecutor(2, "cutaway tokens")
        self.embedding_pool = ThreadPoolExecutor(1, "cutaway vectors")
        if self.engine is not None:
            engine = self.engine
            self.metrics.gauges |= {
                "num_requests_waiting": ("Answers that wait for a row.", lambda: len(engine.waiting)),
                "num_requests_running": ("Answers that are being written.", lambda: len(engine.scheduler.running)),
                "max_num_seqs": ("Answers that can be written at once.", lambda: engine.config.max_num_seqs),
                "kv_cache_usage_ratio": ("Share of the cache that holds tokens.", self.kv_cache_usage),
            }
        self.metrics.gauges["num_requests_preprocessing"] = (
            "Requests whose texts wait to be read.",
            lambda: self.num_preprocessing,
        )

    def _start_engine(
        self, max_num_seqs: int | None, max_model_len: int | None, engine_options: dict[str, Any]
    ) -> Engine:
        own = self.model.config.context
        length = min(own or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN) if max_model_len is None else max_model_len
        both = len(self.model.stacks) == 2
        if both:
            engine_options = engine_options | {
                "max_source_len": min(own or DEFAULT_MAX_SOURCE_LEN, DEFAULT_MAX_SOURCE_LEN)
            }
        plan = build_engine_config(
            self.model,
            self.generation_config,
            max_num_seqs=max_num_seqs or DEFAULT_MAX_NUM_SEQS,
            max_model_len=length,
            **engine_options,
        )
        plan = plan if max_num_seqs is not None else reduce_num_seqs_to_fit(plan)
        return Engine(plan, tokenizer=self.tokenizer, max_waiting=self.limits.max_waiting_requests).start()

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt with its answer, or of a text to embed."""
        if self.engine is not None:
            return self.engine.config.num_slots
        stack = self.model.stacks["encoder"]
        learned = getattr(stack.embed.position, "max_positions", None)
        return min(each for each in (self.model.config.context, learned, DEFAULT_MAX_MODEL_LEN) if each)

    @property
    def max_prompt_len(self) -> int:
        """Tokens of a prompt at most."""
        if self.engine is None:
            return self.max_model_len
        return self.engine.config.max_source_len if self.is_encoder_decoder else self.max_model_len - 1

    @property
    def is_healthy(self) -> bool:
        return self.engine is None or not self.engine.closed

    def kv_cache_usage(self) -> float:
        engine = self.engine
        assert engine is not None
        return sum(ticket.num_computed_tokens for ticket in list(engine.scheduler.running)) / (
            engine.config.max_num_seqs * engine.config.num_slots
        )

    def check_model_name(self, model: str | None) -> None:
        if model is not None and model != self.served_model_name:
            raise APIError(
                404, f"there is no such model here; the one here is {self.served_model_name}", code="model_not_found"
            )

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise APIError(400, "this model has no tokenizer to read text with; give token ids", code="no_tokenizer")
        return self.tokenizer

    # Work in threads

    async def run_in_pool(
        self,
        work: Callable[[], T],
        *,
        use_embedding_pool: bool = False,
        timeout: float | None = None,
        on_abandoned: Callable[[T], object] | None = None,
    ) -> T:
        """The result of some work in a thread, if not too many wait; `on_abandoned` takes one that nobody waits for."""
        if self.num_preprocessing >= self.limits.max_preprocessing_requests:
            raise self.queue_full_error()
        self.num_preprocessing += 1
        task = asyncio.get_running_loop().run_in_executor(
            self.embedding_pool if use_embedding_pool else self.tokenizer_pool, work
        )
        task.add_done_callback(self._on_preprocessed)
        taken = False
        try:
            async with asyncio.timeout(timeout):
                found = await asyncio.shield(task)
            taken = True
            return found
        except TimeoutError:
            raise APIError(400, f"reading this took over {timeout:g} seconds; send less", code="timeout") from None
        finally:
            if on_abandoned is not None and not taken:
                task.add_done_callback(lambda done: on_abandoned(done.result()) if _has_result(done) else None)

    def _on_preprocessed(self, done: "asyncio.Future[Any]") -> None:
        self.num_preprocessing -= 1
        _has_result(done)  # whoever asked has had the error, or is gone

    def queue_full_error(self) -> APIError:
        wait = {"retry-after": str(self.limits.retry_after_seconds)}
        return APIError(429, "too many requests wait for an answer; try again later", code="queue_full", headers=wait)

    # Answers

    async def submit(
        self, encode_prompts: Callable[[], list[list[int]]], params: SamplingParams, *, fill_context: bool = False
    ) -> CompletionStream:
        """Read the prompts and ask the engine for answers to them. `fill_context`: up to the whole context."""
        if self.engine is None:
            raise APIError(400, "this model is an encoder, which continues no text; use /v1/embeddings")
        self.notifier = self.notifier or EventLoopNotifier(asyncio.get_running_loop())
        began = asyncio.get_running_loop().time()
        most = self.limits.tokenize_timeout
        asked = await self.run_in_pool(
            lambda: self._submit_prompts(encode_prompts(), params, fill_context),
            timeout=most,
            on_abandoned=CompletionStream.abort,
        )
        asked.start_time = began
        return asked

    def _submit_prompts(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, fill_context: bool
    ) -> CompletionStream:
        """In a thread: all answers of the request are asked for, or none."""
        engine, tickets = self.engine, []
        assert engine is not None
        assert self.notifier is not None
        begun = (
            [self.generation_config.forced_bos_token_id]
            if self.is_encoder_decoder and self.generation_config.forced_bos_token_id is not None
            else []
        )
        try:
            for prompt in prompts:
                own = self._resolve_max_new_tokens(prompt, params, fill_context)
                tickets += [
                    engine.submit(prompt, own, seed=seed, output_prefix=begun) for seed in completion_seeds(params)
                ]
            return CompletionStream(tickets, sum(map(len, prompts)), self.notifier, self.metrics)
        except BaseException as error:
            for ticket in tickets:
                ticket.abort()
            if isinstance(error, BusyError):
                raise self.queue_full_error() from None
            if isinstance(error, EngineError):
                raise APIError(503, "the engine broke down; the server must be started again") from error
            raise

    def _resolve_max_new_tokens(
        self, prompt: Sequence[int], params: SamplingParams, fill_context: bool
    ) -> SamplingParams:
        """What one prompt asks for, if prompt and answer fit."""
        self.check_prompt_length(len(prompt))
        before = 1 if self.is_encoder_decoder else len(prompt)
        room, most = self.max_model_len - before, params.max_new_tokens
        if most is not None and most > room:
            raise context_length_error(
                f"the prompt has {len(prompt)} tokens and the answer may have {most}", self.max_model_len
            )
        if most is None and fill_context:
            most = min(self.generation_config.max_new_tokens_for(before) or room, room, self.limits.max_tokens)
        return apply_generation_config(replace(params, max_new_tokens=most), self.generation_config, before)

    def check_prompt_length(self, num_tokens: int) -> None:
        if not num_tokens:
            raise APIError(400, "the prompt is empty; give at least one token", param="prompt")
        if num_tokens > min(self.max_prompt_len, self.limits.max_prompt_tokens):
            raise context_length_error(
                f"the prompt has {num_tokens} tokens", min(self.max_prompt_len, self.limits.max_prompt_tokens)
            )

    def check_token_ids(self, tokens: Sequence[int]) -> None:
        size = getattr(self.model.config, "source_vocab_size", None) or self.model.config.vocab_size
        if max(tokens) >= size:
            raise APIError(400, f"a token's id is {max(tokens)}; the vocabulary has ids 0 to {size - 1}", param="input")

    def check_text_length(self, texts: Sequence[str], param: str) -> None:
        """Refuse, before it is read, what is too long by any measure."""
        if sum(map(len, texts)) > self.limits.max_prompt_characters:
            raise APIError(
                400, f"the texts have over {self.limits.max_prompt_characters} characters; send fewer", param=param
            )
        most = self.limits.max_characters_per_token * self.max_prompt_len
        if any(len(text) > most for text in texts):
            raise context_length_error(f"a text has over {most} characters", self.max_prompt_len)

    def close(self) -> None:
        """Whoever still waits is told so."""
        if self.engine is not None:
            self.engine.close()
        self.tokenizer_pool.shutdown(wait=False, cancel_futures=True)
        self.embedding_pool.shutdown(wait=False, cancel_futures=True)


def _has_result(done: "asyncio.Future[Any]") -> bool:
    return not done.cancelled() and done.exception() is None


def context_length_error(description: str, max_tokens: int) -> APIError:
    message = f"{description}; this model has room for {max_tokens} tokens, prompt and answer together: send fewer"
    return APIError(400, message, param="prompt", code="context_length_exceeded")


def to_api_error(error: Exception) -> APIError:
    """What a client is told of an error in the midst of an answer; the log has the rest."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InputError):
        return APIError(400, str(error))
    log.error("an answer failed: %s", error)
    return APIError(500, "the server failed within this answer; its log says why")
