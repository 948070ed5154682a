"""`generate`: complete prompts with the engine, with speculative decoding or with beam search."""

from collections.abc import Callable, Sequence
from typing import Literal, Unpack

import torch

from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.generate.engine.config import EngineOptions, build_engine_config, reduce_num_seqs_to_fit
from cutaway.generate.engine.engine import Engine
from cutaway.generate.engine.output import Completion, CompletionChunk
from cutaway.generate.engine.request import Request
from cutaway.generate.engine.workers import run_on_rank_0
from cutaway.generate.generation_config import CheckpointLike, EarlyStopping, apply_generation_config, unpack_checkpoint
from cutaway.generate.prompts import GenerationInputs, Prompt, encode_prompts, prompt_index_in_errors
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
from cutaway.model.adapters.adapter_methods import BASE_ADAPTER
from cutaway.tokenizer import Tokenizer

DEFAULT_MAX_NUM_SEQS = 32
"""Default maximum number of sequences per batch."""


def generate(
    checkpoint: CheckpointLike | Transformer,
    prompts: Prompt | Sequence[Prompt],
    *,
    adapter: str | Sequence[str | None] | None = None,
    beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: EarlyStopping | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    cache_implementation: Literal["auto", "full", "ring", "paged"] = "auto",
    kv_cache_dtype: torch.dtype | None = None,
    prefill_chunk_size: int | None = None,
    draft_model: CheckpointLike | Transformer | NgramConfig | str | None = None,
    num_draft_tokens: int = 4,
    weight_bits: int | None = None,
    compile: bool | None = None,
    on_chunk: Callable[[int, CompletionChunk], None] | None = None,
    **sampling_params: object,
) -> list[Completion]:
    """Return `n` completions of each prompt: all completions of the first prompt, then those of the next.

    A prompt is a text to continue, a chat to reply to, or the source text of an encoder-decoder. Completions do not
    depend on the other prompts of the batch.

    `adapter`: name of the adapter to apply, or one name per prompt; '__base__' is the base model. Default: the active
    adapter. Prompts with different adapters are completed in one batch.
    `sampling_params`: the fields of `SamplingParams`: max_new_tokens, temperature, top_k, top_p, min_p, seed, stop, n,
    … If top_k, top_p or min_p is set and temperature is not, temperature is 1.
    `beams`: use beam search with this many beams, instead of sampling.
    `draft_model`: use speculative decoding. This smaller model, or n-gram lookup for 'ngram', proposes up to
    `num_draft_tokens` tokens per step, and the model verifies them in one forward pass.
    `weight_bits`: 16, 8 or 4 bits per weight in decode steps. The default is the model's dtype.
    `compile`: whether to use fast decode steps (CUDA graphs on a GPU, torch.compile on the CPU). True: from the first
    step on. False: never. None: on a GPU, as soon as they are expected to save more time than their warm-up takes; on
    the CPU, never.
    `on_chunk(completion_index, chunk)`: called for each new piece of a completion; an exception in it stops generation.
    """
    params = build_sampling_params(sampling_params if beams is not None else resolve_temperature(sampling_params))
    if on_chunk is not None and not callable(on_chunk):
        raise InputError(f"on_chunk is a {type(on_chunk).__name__}; pass a function of (completion_index, chunk)")
    inputs = prepare_inputs(
        checkpoint,
        prompts,
        params,
        adapter=adapter,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        cache_implementation=cache_implementation,
        kv_cache_dtype=kv_cache_dtype,
        prefill_chunk_size=prefill_chunk_size,
        weight_bits=weight_bits,
        compile=compile,
    )
    model = inputs.engine_config.model
    num_beams = default_num_beams(model, inputs.generation_config, params) if beams is None else beams
    if num_beams or beams is not None:
        unsupported: dict[str, object] = {"weight_bits": weight_bits, "compile": compile, "draft_model": draft_model}
        if beams is not None:
            unsupported |= {"cache_implementation": cache_implementation != "auto", "kv_cache_dtype": kv_cache_dtype}
        for name, value in unsupported.items():
            if value:
                source = f" (generation_config.num_beams of this checkpoint is {num_beams})" if beams is None else ""
                raise InputError(f"beam search does not support {name}; leave it out{source}")
        with eval_mode(model):
            completions = generate_with_beams(inputs, num_beams, length_penalty, early_stopping)
        if on_chunk is not None:
            for i, completion in enumerate(completions):
                on_chunk(i, CompletionChunk(completion.text or "", completion.tokens))
        return completions
    if length_penalty is not None or early_stopping is not None:
        raise InputError("length_penalty and early_stopping apply to beam search, but beams is not set; pass beams=4")

    def run() -> list[Completion]:
        engine, requests = start_engine(inputs, params, draft_model=draft_model, num_draft_tokens=num_draft_tokens)
        return _run_engine(engine, requests, inputs, params, on_chunk)

    return run_on_rank_0(model, run)


def _run_engine(
    engine: Engine,
    requests: Sequence[Request],
    inputs: GenerationInputs,
    params: SamplingParams,
    on_chunk: Callable[[int, CompletionChunk], None] | None,
) -> list[Completion]:
    """Run an engine until its requests are finished, and return their completions."""
    try:
        with eval_mode(inputs.engine_config.model):
            while engine.step():
                _emit_chunks(requests, on_chunk)
    finally:
        engine.model_runner.release_compiled()
    _emit_chunks(requests, on_chunk)
    completions = []
    for i, request in enumerate(requests):
        with prompt_index_in_errors(i // params.n, len(inputs.prompts)):
            completions.append(request.result())
    return completions


def prepare_inputs(
    checkpoint: CheckpointLike | Transformer,
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams,
    *,
    adapter: str | Sequence[str | None] | None = None,
    max_num_seqs: int | None,
    max_model_len: int | None = None,
    **engine_options: Unpack[EngineOptions],
) -> GenerationInputs:
    """Tokenize the prompts and build the engine configuration. Both are validated before any forward pass."""
    model, tokenizer, generation_config = unpack_checkpoint(checkpoint)
    sampling_params.check_vocab(model.config.vocab_size)
    if sampling_params.stop and tokenizer is None:
        raise InputError("stop strings are matched in decoded text, but there is no tokenizer; pass stop_token_ids")
    tokens = encode_prompts(prompts, tokenizer)
    adapters = resolve_adapters(model, adapter, len(tokens))
    lengths = [len(prompt) if len(model.stacks) == 1 else 1 for prompt in tokens]
    params = [apply_generation_config(sampling_params, generation_config, length) for length in lengths]
    num_seqs = max(1, min(DEFAULT_MAX_NUM_SEQS, len(tokens) * sampling_params.n))
    total_lens = [length + (p.max_new_tokens or 0) for length, p in zip(lengths, params, strict=True)]
    engine_config = build_engine_config(
        model,
        generation_config,
        max_num_seqs=num_seqs if max_num_seqs is None else max_num_seqs,
        max_model_len=max_model_len,
        max_source_len=max(map(len, tokens), default=1),
        required_len=max(total_lens, default=2),
        adapters=tuple(dict.fromkeys(adapters)) or None,
        **engine_options,
    )
    if max_num_seqs is None:
        engine_config = reduce_num_seqs_to_fit(engine_config)
    return GenerationInputs(engine_config, tokenizer, generation_config, tokens, params, adapters)


def resolve_adapters(
    model: Transformer, adapter: str | Sequence[str | None] | None, num_prompts: int
) -> list[str | None]:
    """Adapter of each prompt from the argument `adapter` of `generate`; None is the base model."""
    if adapter is not None and not isinstance(adapter, str | list | tuple):
        raise InputError(f"adapter is {adapter!r:.60}; pass the name of an adapter, or a list of one name per prompt")
    names = [adapter] * num_prompts if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(names) != num_prompts:
        raise InputError(
            f"adapter has {len(names)} names, but there are {num_prompts} prompts; pass one name, or one per prompt"
        )
    resolved = [model.active_adapter if name is None else None if name == BASE_ADAPTER else name for name in names]
    for name in resolved:
        model.check_adapter(name)
    return resolved


def start_engine(
    inputs: GenerationInputs,
    sampling_params: SamplingParams,
    *,
    draft_model: CheckpointLike | Transformer | NgramConfig | str | None = None,
    num_draft_tokens: int = 4,
) -> tuple[Engine, list[Request]]:
    """Build an engine and submit `n` requests per prompt, in the order of the prompts. Return engine and requests."""
    config, tokenizer = inputs.engine_config, inputs.tokenizer
    max_waiting = max(1, len(inputs.prompts) * sampling_params.n)
    if draft_model is None:
        engine = Engine(config, tokenizer=tokenizer, max_waiting=max_waiting)
    else:
        draft, draft_tokenizer = _resolve_draft_model(draft_model)
        engine = SpeculativeDecoder(
            config,
            draft_model=draft,
            tokenizer=tokenizer,
            draft_tokenizer=draft_tokenizer,
            num_draft_tokens=num_draft_tokens,
            max_waiting=max_waiting,
        )
    forced_bos = inputs.generation_config.forced_bos_token_id
    prefix = [] if forced_bos is None or len(config.model.stacks) == 1 else [forced_bos]
    requests: list[Request] = []
    for i, (prompt, params, adapter) in enumerate(
        zip(inputs.prompts, inputs.sampling_params, inputs.adapters, strict=True)
    ):
        with prompt_index_in_errors(i, len(inputs.prompts)):
            for seed in completion_seeds(sampling_params):
                requests.append(
                    engine.submit(prompt, params, seed=seed, output_prefix=prefix, adapter=adapter or BASE_ADAPTER)
                )
    return engine, requests


def _resolve_draft_model(
    draft_model: CheckpointLike | Transformer | NgramConfig | str,
) -> tuple[Transformer | NgramConfig, Tokenizer | None]:
    if isinstance(draft_model, str):
        if draft_model != "ngram":
            raise InputError(f"draft_model is {draft_model!r:.60}; pass a smaller model (from ct.load), or 'ngram'")
        return NgramConfig(), None
    if isinstance(draft_model, NgramConfig):
        return draft_model, None
    model, tokenizer, _ = unpack_checkpoint(draft_model)
    return model, tokenizer


def _emit_chunks(requests: Sequence[Request], on_chunk: Callable[[int, CompletionChunk], None] | None) -> None:
    """Call `on_chunk(request index, chunk)` for each chunk that the requests produced since the last call."""
    if on_chunk is None:
        return
    for i, request in enumerate(requests):
        for chunk in request.pop_chunks():
            on_chunk(i, chunk)
