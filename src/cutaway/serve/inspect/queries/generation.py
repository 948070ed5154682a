"""A text that is written on token by token, with all that each choice was made from; and masks that are filled."""

import time
from typing import Annotated, Any

from pydantic import Field

from cutaway.errors import InputError
from cutaway.generate.engine.config import build_engine_config
from cutaway.generate.engine.engine import Engine
from cutaway.generate.fill_mask import fill_mask
from cutaway.generate.generation_config import GenerationConfig, apply_generation_config
from cutaway.generate.sampling.sampling_params import SamplingParams, build_sampling_params, resolve_temperature
from cutaway.model import EncoderOnly
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import MAX_TOKENS
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import InputQuery, Query, TokenIndex
from cutaway.serve.inspect.queries.model_info import MAX_CHARACTERS
from cutaway.serve.inspect.recording_sampler import RecordingSampler, SamplingStep, compare_with_full_pass

MAX_NEW_TOKENS, MAX_TOKENS_PER_QUERY = 512, 64
PREFILL_CHUNK_RANGE = 16, 512
"""Tokens of a prompt that are read at once: few where windows are small, so that their rings are small too."""


class Generate(InputQuery):
    """Go on with a text, exactly as `generate` does; each token is a part of the answer as it comes.

    The input's tokens are the prompt and what has been written already: of an encoder-decoder, behind its first token.
    At the end the same positions are read once more, all at once, and the two are compared.
    """

    num_prompt_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
    """How many of the input's tokens were given, not written."""
    num_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS_PER_QUERY)] = 1
    """Tokens to write now."""
    max_new_tokens: Annotated[int, Field(strict=True, ge=1, le=MAX_NEW_TOKENS)] = 64
    """Tokens of the whole answer: what the cache has room for."""
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(strict=True, ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**53)] = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        inspector.validate_input(self.input)
        if self.num_prompt_tokens > len(self.input.tokens):
            raise InputError(
                f"num_prompt_tokens is {self.num_prompt_tokens}, and there are {len(self.input.tokens)} tokens"
            )
        if isinstance(inspector.model, EncoderOnly):
            raise InputError("this model is an encoder: it reads a text and does not write on; it can fill masks")
        work = GenerationSession(inspector, self)
        with inspector.edited_model(
            self.input
        ):  # one pass after another for as long as it writes: its cache is of this model
            for choice in work.run_steps(job):
                job.send_partial(QueryResult({"step": choice}))
            return work.finish(job)


class GenerationSession:
    """An engine at work on one text, and what was heard of it."""

    def __init__(self, inspector: Inspector, query: Generate) -> None:
        self.inspector, self.query = inspector, query
        self.is_encoder_decoder = query.input.source is not None
        self.generation_config: GenerationConfig = inspector.tokenizer.generation_config or GenerationConfig(
            decoder_start_token_id=inspector.tokenizer.decoder_start_token_id
        )
        tokens = list(query.input.tokens)
        self.output_prefix = tokens[query.num_prompt_tokens :]
        self.prompt_tokens = (
            list(query.input.source or ()) if self.is_encoder_decoder else tokens[: query.num_prompt_tokens]
        )
        if (
            self.is_encoder_decoder
            and not self.output_prefix
            and self.generation_config.forced_bos_token_id is not None
        ):
            self.output_prefix = [self.generation_config.forced_bos_token_id]
        self.sampling_params = self._build_sampling_params()
        self.engine_config = self._build_engine_config()
        self.engine = Engine(self.engine_config, tokenizer=inspector.tokenizer.tokenizer)
        self.sampler = RecordingSampler(self.engine.model_runner, inspector.config.vocab_size)
        self.engine.model_runner.sampler = self.sampler
        self.request = self.engine.submit(
            self.prompt_tokens, self.sampling_params, seed=query.seed, output_prefix=self.output_prefix
        )
        self.request.pop_chunks()  # what was begun with is known
        self.steps: list[SamplingStep] = []

    def _build_sampling_params(self) -> SamplingParams:
        asked = self.query
        given = {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p, "seed": asked.seed}
        made = build_sampling_params(resolve_temperature({**given, "max_new_tokens": asked.max_new_tokens}))
        made.check_vocab(self.inspector.config.vocab_size)
        return apply_generation_config(
            made, self.generation_config, 1 if self.is_encoder_decoder else len(self.prompt_tokens)
        )

    def _build_engine_config(self) -> Any:
        model, asked = self.inspector.model, self.query
        windows = [window for window in model.stacks["decoder"].windows if window is not None]
        chunk = min(max(min(windows, default=PREFILL_CHUNK_RANGE[1]), PREFILL_CHUNK_RANGE[0]), PREFILL_CHUNK_RANGE[1])
        if self.is_encoder_decoder and asked.num_prompt_tokens != 1:
            raise InputError(
                "an encoder-decoder's answer is begun with one token of its own; num_prompt_tokens must be 1"
            )
        length = 1 if self.is_encoder_decoder else len(self.prompt_tokens)
        return build_engine_config(
            model,
            self.generation_config,
            required_len=length + asked.max_new_tokens,
            max_num_seqs=1,
            prefill_chunk_size=chunk,
            compile=False,
            max_source_len=max(1, len(self.prompt_tokens)),
        )

    def run_steps(self, job: QueryJob) -> Any:
        """Each choice as it is made, as the page is told of it."""
        began = time.perf_counter()
        while not self.request.finished.is_set() and len(self.steps) < self.query.num_tokens:
            job.check_cancelled()
            self.engine.step()
            for piece in self.request.pop_chunks():
                for token in piece.tokens:
                    choice = self.sampler.recorded_steps.popleft()
                    self.steps.append(choice)
                    now = time.perf_counter()
                    yield self._step_to_dict(choice, token, piece.text, 1000 * (now - began))
                    began = now
        if self.request.error is not None:
            raise self.request.error

    def _step_to_dict(self, step: SamplingStep, token: int, text: str, latency_ms: float) -> dict[str, Any]:
        return {
            "token": token,
            "token_str": self.inspector.tokenizer.decode_token(token),
            "text": text,
            **step.token_stats(token),
            "top_tokens": [
                {**each, "text": self.inspector.tokenizer.decode_token(each["token"])} for each in step.top_tokens
            ],
            "latency_ms": latency_ms,
            "cache": step.cache_state,
            "finish_reason": self.request.output.finish_reason if self.request.finished.is_set() else None,
        }

    def finish(self, job: QueryJob) -> QueryResult:
        """Why it stopped, if it did; the cache; and the proof that one at a time is all at once."""
        answer = self.request.output
        self.engine.model_runner.release_compiled()
        reason = answer.finish_reason if self.request.finished.is_set() else None
        facts: dict[str, Any] = {
            "finish_reason": reason,
            "num_slots": self.engine_config.num_slots,
            "cache_kind": self.engine_config.cache_implementation,
        }
        if not self.steps:
            return QueryResult({**facts, "cache_check": None})
        job.check_cancelled()
        tokens = self.query.input.tokens[: self.query.num_prompt_tokens] + tuple(answer.tokens[:-1])
        found, arrays = compare_with_full_pass(
            self.inspector, self.query.input.model_copy(update={"tokens": tokens}), self.steps
        )
        return QueryResult({**facts, "cache_check": found}, arrays)


class FillMask(Query):
    """What an encoder would put in the place of each mask; without one, how a mask is written."""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    top_k: TokenIndex = 5

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        tokenizer, model = inspector.tokenizer.tokenizer, inspector.model
        if not isinstance(model, EncoderOnly):
            raise InputError("this model writes on from a text, and fills no masks")
        mask = (
            None if tokenizer is None or tokenizer.mask_token_id is None else tokenizer.special_tokens_map["mask_token"]
        )
        able = mask is not None and model.head is not None
        if tokenizer is None or not able or tokenizer.mask_token_id not in tokenizer.encode(self.text):
            return QueryResult({"mask_token": mask, "can_fill_mask": able, "predictions": []})
        with inspector.lock:
            found = fill_mask(model, tokenizer, [self.text], top_k=min(max(1, self.top_k), inspector.config.vocab_size))
        masks = [
            [{"token": each.id, "text": each.token, "probability": each.probability} for each in one]
            for one in found[0]
        ]
        return QueryResult({"mask_token": mask, "can_fill_mask": True, "predictions": masks})
