"""`generate`: prompts in, answers out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cutaway.errors import CutawayError, InputError
from cutaway.generate.engine.config import EngineConfig, build_engine_config, reduce_num_seqs_to_fit
from cutaway.generate.engine.engine import Engine
from cutaway.generate.engine.model_runner import eval_mode
from cutaway.generate.engine.output import Completion, CompletionChunk
from cutaway.generate.engine.request import Request
from cutaway.generate.generation_config import (
    CheckpointLike,
    EarlyStopping,
    GenerationConfig,
    apply_generation_config,
    unpack_checkpoint,
)
from cutaway.generate.prompts import Prompt, add_prompt_index, encode_prompts
from cutaway.generate.sampling.sampling_params import (
    SamplingParams,
    build_sampling_params,
    completion_seeds,
    resolve_temperature,
)
from cutaway.generate.search.beam_generation import default_num_beams, generate_with_beams
from cutaway.generate.speculative.ngram_draft import NgramConfig
from cutaway.generate.speculative.speculative_decoder import SpeculativeDecoder
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

DEFAULT_MAX_NUM_SEQS = 32
"""Texts at once unless told otherwise."""


def generate(
    checkpoint: CheckpointLike | Transformer,
    prompts: Prompt | Sequence[Prompt],
    *,
    beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: EarlyStopping | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    cache_implementation: Literal["auto", "full", "ring", "paged"] = "auto",
    kv_cache_dtype: torch.dtype | None = None,
    prefill_chunk_size: int = 512,
    draft_model: CheckpointLike | Transformer | NgramConfig | str | None = None,
    num_draft_tokens: int = 4,
    weight_bits: int | None = None,
    compile: bool | None = None,
    on_chunk: Callable[[int, CompletionChunk], None] | None = None,
    **sampling_params: Any,
) -> list[Completion]:
    """Continue each prompt, or answer it if it is a chat or the model has an encoder; n answers a prompt, in order.

    `sampling_params` are the fields of `SamplingParams`: max_new_tokens, temperature, top_k, top_p, min_p, seed, stop,
    n, … Who asks for top_k, top_p or min_p and for no temperature draws with temperature 1. With `beams`, the likeliest
    sequences are searched instead of drawn. Each answer is what its prompt alone would get.
    `draft_model`: a smaller model, or 'ngram', that guesses `num_draft_tokens` at a time, of which the model keeps
    those that are its own. `weight_bits`: of a weight in steps, 8 or on a GPU 4. `compile`: steps are made fast at
    once, or never. `on_chunk(index of the completion, chunk)` is called as the answers grow; what it raises stops all
    of them.
    """
    asked = build_sampling_params(sampling_params if beams is not None else resolve_temperature(sampling_params))
    if on_chunk is not None and not callable(on_chunk):
        raise InputError(f"on_chunk is a {type(on_chunk).__name__}; give a function of an answer's number and a chunk")
    work = prepare_inputs(
        checkpoint,
        prompts,
        asked,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        cache_implementation=cache_implementation,
        kv_cache_dtype=kv_cache_dtype,
        prefill_chunk_size=prefill_chunk_size,
        weight_bits=weight_bits,
        compile=compile,
    )
    search = default_num_beams(work.engine_config.model, work.generation_config, asked) if beams is None else beams
    if search or beams is not None:
        if beams is not None and (
            cache_implementation != "auto" or kv_cache_dtype is not None or draft_model is not None
        ):
            raise InputError(
                "beams are led in a cache of their own kind; leave cache_implementation, kv_cache_dtype and draft_model"
                " out"
            )
        options = {"weight_bits": weight_bits, "compile": compile, "draft_model": draft_model}
        quick = [name for name, value in options.items() if value]
        if quick:
            raise InputError(
                f"beams are searched with the model as it is, so {quick[0]} has no part in it; leave it out"
                + (f" (this checkpoint's own settings search with {search} beams)" if beams is None else "")
            )
        penalty = work.generation_config.length_penalty if length_penalty is None else length_penalty
        early = work.generation_config.early_stopping if early_stopping is None else early_stopping
        with eval_mode(work.engine_config.model):
            found = generate_with_beams(
                work.engine_config,
                work.tokenizer,
                work.generation_config,
                work.prompts,
                work.sampling_params,
                num_beams=search,
                length_penalty=penalty,
                early_stopping=early,
            )
        if on_chunk is not None:
            for number, answer in enumerate(found):
                on_chunk(number, CompletionChunk(answer.text or "", answer.tokens))
        return found
    if length_penalty is not None or early_stopping is not None:
        raise InputError("length_penalty and early_stopping weigh beams, but no beams were asked for; give beams=4")
    engine, tickets = start_engine(work, asked, draft_model=draft_model, num_draft_tokens=num_draft_tokens)
    try:
        with eval_mode(work.engine_config.model):
            while engine.step():
                _emit_chunks(tickets, on_chunk)
    finally:
        engine.model_runner.release_compiled()
    _emit_chunks(tickets, on_chunk)
    for number, ticket in enumerate(tickets):
        if ticket.error is not None:
            raise add_prompt_index(ticket.error, number // asked.n, len(work.prompts))
    return [ticket.result() for ticket in tickets]


@dataclass
class GenerationInputs:
    """Prompts as tokens, what each asks for, and the engine's configuration for all of them."""

    engine_config: EngineConfig
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig
    prompts: list[list[int]]
    sampling_params: list[SamplingParams]


def prepare_inputs(
    checkpoint: CheckpointLike | Transformer,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams,
    *,
    max_num_seqs: int | None,
    **engine_options: Any,
) -> GenerationInputs:
    """Read everything that was given, and refuse what cannot be, before any work is done."""
    model, tokenizer, start = unpack_checkpoint(checkpoint)
    sampling_params.check_vocab(model.config.vocab_size)
    if sampling_params.stop and tokenizer is None:
        raise InputError("stop strings are found in text, and there is no tokenizer to make any; give stop_token_ids")
    tokens = encode_prompts(prompts, tokenizer)
    lengths = [len(prompt) if len(model.stacks) == 1 else 1 for prompt in tokens]
    wanted = [apply_generation_config(sampling_params, start, length) for length in lengths]
    plan = build_engine_config(
        model,
        start,
        max_num_seqs=max(1, min(DEFAULT_MAX_NUM_SEQS, len(tokens) * sampling_params.n))
        if max_num_seqs is None
        else max_num_seqs,
        max_source_len=max(map(len, tokens), default=1),
        required_len=max((n + (own.max_new_tokens or 0) for n, own in zip(lengths, wanted, strict=True)), default=2),
        **engine_options,
    )
    return GenerationInputs(
        plan if max_num_seqs is not None else reduce_num_seqs_to_fit(plan), tokenizer, start, tokens, wanted
    )


def start_engine(
    inputs: GenerationInputs,
    sampling_params: SamplingParams,
    *,
    draft_model: CheckpointLike | Transformer | NgramConfig | str | None = None,
    num_draft_tokens: int = 4,
) -> tuple[Engine | SpeculativeDecoder, list[Request]]:
    """An engine at work on these prompts, with a request for each answer, in order."""
    plan, tokenizer = inputs.engine_config, inputs.tokenizer
    engine: Engine | SpeculativeDecoder
    if draft_model is None:
        engine = Engine(plan, tokenizer=tokenizer, max_waiting=max(1, len(inputs.prompts) * sampling_params.n))
    else:
        guess, its_own = _resolve_draft_model(draft_model)
        engine = SpeculativeDecoder(
            plan, draft_model=guess, tokenizer=tokenizer, draft_tokenizer=its_own, num_draft_tokens=num_draft_tokens
        )
    begun = (
        []
        if inputs.generation_config.forced_bos_token_id is None or len(plan.model.stacks) == 1
        else [inputs.generation_config.forced_bos_token_id]
    )
    tickets: list[Request] = []
    for number, (prompt, own) in enumerate(zip(inputs.prompts, inputs.sampling_params, strict=True)):
        try:
            tickets += [
                engine.submit(prompt, own, seed=seed, output_prefix=begun) for seed in completion_seeds(sampling_params)
            ]
        except CutawayError as error:
            raise add_prompt_index(error, number, len(inputs.prompts)) from None
    return engine, tickets


def _resolve_draft_model(
    draft_model: CheckpointLike | Transformer | NgramConfig | str,
) -> tuple[Transformer | NgramConfig, Tokenizer | None]:
    if isinstance(draft_model, str):
        if draft_model != "ngram":
            raise InputError(f"draft_model is {draft_model!r:.60}; give a smaller model (ct.load it first), or 'ngram'")
        return NgramConfig(), None
    if isinstance(draft_model, NgramConfig):
        return draft_model, None
    model, tokenizer, _ = unpack_checkpoint(draft_model)
    return model, tokenizer


def _emit_chunks(requests: Sequence[Request], on_chunk: Callable[[int, CompletionChunk], None] | None) -> None:
    """Hand over what has arrived."""
    if on_chunk is None:
        return
    for number, ticket in enumerate(requests):
        for piece in ticket.pop_chunks():
            on_chunk(number, piece)
