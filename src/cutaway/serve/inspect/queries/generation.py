"""Queries: token-by-token generation with the state of each decode step, and mask filling."""

import time
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig, build_engine_config
from cutaway.generate.engine.engine import Engine
from cutaway.generate.fill_mask import fill_mask
from cutaway.generate.generation_config import GenerationConfig, apply_generation_config
from cutaway.generate.sampling.sampling_params import SamplingParams, build_sampling_params, resolve_temperature
from cutaway.model import EncoderOnly
from cutaway.serve.inspect.model_input import MAX_TOKENS
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, Query, QueryJob, QueryResult, TokenIndex
from cutaway.serve.inspect.queries.model_info import MAX_CHARACTERS
from cutaway.serve.inspect.recording_sampler import RecordingSampler, SamplingStep, compare_with_full_pass

MAX_NEW_TOKENS, MAX_TOKENS_PER_QUERY = 512, 64
PREFILL_CHUNK_RANGE = 16, 512
"""Minimum and maximum number of tokens of a prefill chunk. A chunk has the size of the smallest attention window,
clamped to this range, because larger chunks need larger ring buffers."""


class Generate(InputQuery):
    """Continue a text exactly as `generate` does. Each token is sent as a partial result.

    The input's tokens are the prompt (for an encoder-decoder, the decoder start token), followed by the tokens that
    earlier queries generated. At the end, the logits are compared with those of one full forward pass.
    """

    num_prompt_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
    """How many of the input's tokens are the prompt. The rest was generated in earlier queries."""
    num_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS_PER_QUERY)] = 1
    """Number of tokens to generate in this query."""
    max_new_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_NEW_TOKENS)] = 64
    """Maximum number of tokens of the whole completion. It determines the size of the KV cache."""
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(strict=True, ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**53)] = 0
    regex: Annotated[str, Field(min_length=1, max_length=2000)] | None = None
    """Regular expression that the completion must match."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        inspector.validate_input(self.input)
        if self.num_prompt_tokens > len(self.input.tokens):
            count = len(self.input.tokens)
            raise InputError(f"num_prompt_tokens is {self.num_prompt_tokens}; the input has only {count} tokens")
        if isinstance(inspector.model, EncoderOnly):
            raise InputError("this model is an encoder, which does not generate text; use mask filling")
        session = GenerationSession(inspector, self)
        # The lock is held for all steps, because the KV cache is valid only for the model with these edits.
        with inspector.edited_model(self.input):
            for step in session.run_steps(job):
                job.send_partial(QueryResult({"step": step}))
            return session.finish(job)


class GenerationSession:
    """An engine that generates one completion, with a recording sampler."""

    def __init__(self, inspector: Inspector, query: Generate) -> None:
        self.inspector, self.query = inspector, query
        self.is_encoder_decoder = query.input.source is not None
        self.generation_config: GenerationConfig = inspector.tokenizer.generation_config or GenerationConfig(
            decoder_start_token_id=inspector.tokenizer.decoder_start_token_id
        )
        self.prompt_tokens = list(query.input.tokens[: query.num_prompt_tokens])
        output_prefix = list(query.input.tokens[query.num_prompt_tokens :])
        if self.is_encoder_decoder:
            self.prompt_tokens = list(query.input.source or ())
            forced_bos = self.generation_config.forced_bos_token_id
            output_prefix = output_prefix or ([] if forced_bos is None else [forced_bos])
        params = self._build_sampling_params()
        self.engine_config = self._build_engine_config()
        self.engine = Engine(self.engine_config, tokenizer=inspector.tokenizer.tokenizer)
        self.sampler = RecordingSampler(self.engine.model_runner, inspector.config.vocab_size)
        self.engine.model_runner.sampler = self.sampler
        self.request = self.engine.submit(self.prompt_tokens, params, seed=query.seed, output_prefix=output_prefix)
        self.request.pop_chunks()  # discards the chunk of the output prefix, which the client already has
        self.steps: list[SamplingStep] = []

    def _build_sampling_params(self) -> SamplingParams:
        query = self.query
        names = ("temperature", "top_k", "top_p", "seed", "max_new_tokens", "regex")
        options = {name: getattr(query, name) for name in names}
        params = build_sampling_params(resolve_temperature(options))
        params.check_vocab(self.inspector.config.vocab_size)
        return apply_generation_config(params, self.generation_config, query.num_prompt_tokens)

    def _build_engine_config(self) -> EngineConfig:
        model, query = self.inspector.model, self.query
        windows = [window for window in model.stacks["decoder"].windows if window is not None]
        smallest, largest = PREFILL_CHUNK_RANGE
        prefill_chunk_size = min(max(min(windows, default=largest), smallest), largest)
        if self.is_encoder_decoder and query.num_prompt_tokens != 1:
            raise InputError(f"num_prompt_tokens is {query.num_prompt_tokens}; use 1, the start token of the decoder")
        return build_engine_config(
            model,
            self.generation_config,
            required_len=query.num_prompt_tokens + query.max_new_tokens,
            max_num_seqs=1,
            prefill_chunk_size=prefill_chunk_size,
            compile=False,
            max_source_len=max(1, len(self.prompt_tokens)),
        )

    def run_steps(self, job: QueryJob) -> Iterator[dict[str, object]]:
        """Run the engine and yield each decode step as a dict of JSON values."""
        step_start = time.perf_counter()
        while not self.request.finished.is_set() and len(self.steps) < self.query.num_tokens:
            job.check_cancelled()
            self.engine.step()
            for chunk in self.request.pop_chunks():
                for token in chunk.tokens:
                    step = self.sampler.recorded_steps.popleft()
                    self.steps.append(step)
                    now = time.perf_counter()
                    yield self._step_to_dict(step, token, chunk.text, 1000 * (now - step_start))
                    step_start = now
        if self.request.error is not None:
            raise self.request.error

    def _step_to_dict(self, step: SamplingStep, token: int, text: str, latency_ms: float) -> dict[str, object]:
        tokenizer = self.inspector.tokenizer
        return {
            "token": token,
            "token_str": tokenizer.decode_token(token),
            "text": text,
            **step.token_stats(token),
            "top_tokens": step.top_tokens(tokenizer),
            "grammar": step.grammar_stats(tokenizer),
            "latency_ms": latency_ms,
            "cache": step.cache_state,
            "finish_reason": self.finish_reason,
        }

    @property
    def finish_reason(self) -> str | None:
        return self.request.output.finish_reason if self.request.finished.is_set() else None

    def finish(self, job: QueryJob) -> QueryResult:
        """Return the finish reason, and the number of slots and the kind of the KV cache.

        Also return the differences between the logits of the decode steps and the logits of one full forward pass.
        """
        self.engine.model_runner.release_compiled()
        data: dict[str, object] = {
            "finish_reason": self.finish_reason,
            "num_slots": self.engine_config.num_slots,
            "cache_kind": self.engine_config.cache_implementation,
        }
        if not self.steps:
            return QueryResult({**data, "cache_check": None})
        job.check_cancelled()
        query = self.query
        tokens = (*query.input.tokens[: query.num_prompt_tokens], *self.request.output.tokens[:-1])
        full_input = query.input.model_copy(update={"tokens": tokens})
        cache_check, tensors = compare_with_full_pass(self.inspector, full_input, self.steps)
        return QueryResult({**data, "cache_check": cache_check}, tensors)


class FillMask(Query):
    """Top tokens for each mask token in the text, and the text of the mask token."""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    top_k: TokenIndex = 5

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        tokenizer, model = inspector.tokenizer.tokenizer, inspector.model
        if not isinstance(model, EncoderOnly):
            raise InputError("this model is not an encoder, so it cannot fill masks; use text generation")
        has_mask = tokenizer is not None and tokenizer.mask_token_id is not None
        mask = tokenizer.special_tokens_map["mask_token"] if tokenizer is not None and has_mask else None
        can_fill_mask = has_mask and inspector.head is not None
        if tokenizer is None or not can_fill_mask or tokenizer.mask_token_id not in tokenizer.encode(self.text):
            return QueryResult({"mask_token": mask, "can_fill_mask": can_fill_mask, "predictions": []})
        top_k = min(max(1, self.top_k), inspector.config.vocab_size)
        with inspector.lock:
            [masks] = fill_mask(model, tokenizer, [self.text], top_k=top_k)
        predictions = [[{"token": p.id, "text": p.token, "probability": p.probability} for p in top] for top in masks]
        return QueryResult({"mask_token": mask, "can_fill_mask": True, "predictions": predictions})
