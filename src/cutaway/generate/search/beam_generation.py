"""Beam search for `generate`: groups prompts by length limits, fits batches to the free memory, builds completions."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from cutaway.device import GIB, free_memory
from cutaway.errors import InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.output import Completion, OutputProcessor
from cutaway.generate.generation_config import EarlyStopping, GenerationConfig
from cutaway.generate.prompts import GenerationInputs, prompt_index_in_errors
from cutaway.generate.sampling.sampling_params import SamplingParams, as_int, format_value
from cutaway.generate.search.beam_logits_processors import BeamSearchParams
from cutaway.generate.search.beam_search import Beam, beam_search
from cutaway.generate.structured_output.grammar import Grammar
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

_MAX_BATCH_BEAMS = 64
"""Maximum number of beams per batch, summed over the prompts."""
_SAMPLING_ONLY = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
]
"""Sampling parameters that beam search does not support."""


def _first_sampling_only_param(sampling_params: SamplingParams) -> str | None:
    """Name of the first sampling parameter that is set and that beam search does not support; None if none is."""
    defaults = SamplingParams()
    return next((name for name in _SAMPLING_ONLY if getattr(sampling_params, name) != getattr(defaults, name)), None)


def default_num_beams(model: Transformer, generation_config: GenerationConfig, sampling_params: SamplingParams) -> int:
    """Number of beams from the checkpoint's generation config; 0 if beam search is not used.

    no_repeat_ngram_size, begin_suppress_tokens and multi-token bad_words_ids are implemented in beam search only, so
    greedy decoding with one of these settings is a beam search with one beam.
    """
    too_many = sampling_params.n > generation_config.num_beams
    if len(model.stacks) == 1 or too_many or _first_sampling_only_param(sampling_params):
        return 0
    has_bad_words = any(len(words) > 1 for words in generation_config.bad_words_ids)
    has_rules = generation_config.no_repeat_ngram_size or generation_config.begin_suppress_tokens or has_bad_words
    return generation_config.num_beams if generation_config.num_beams > 1 or has_rules else 0


def generate_with_beams(
    inputs: GenerationInputs, num_beams: int, length_penalty: float | None, early_stopping: EarlyStopping | None
) -> list[Completion]:
    """Return the n best completions of each prompt, best first, in the order of the prompts.

    Prompts with equal length limits and adapters are searched in one batch. If `length_penalty` or `early_stopping` is
    None, the checkpoint's value is used."""
    engine_config, generation_config = inputs.engine_config, inputs.generation_config
    prompts, sampling_params = inputs.prompts, inputs.sampling_params
    early_stopping = generation_config.early_stopping if early_stopping is None else early_stopping
    if as_int(num_beams) is None or num_beams < 1:
        raise InputError(f"beams is {format_value(num_beams)}; pass an integer, 1 or more")
    unsupported = _first_sampling_only_param(sampling_params[0]) if sampling_params else None
    if unsupported is not None:
        raise InputError(f"{unsupported} applies to sampling, not to beam search; leave out {unsupported} or beams")
    num_beams, model = int(num_beams), engine_config.model
    grammar = engine_config.compile_grammar(sampling_params[0], inputs.tokenizer) if sampling_params else None
    groups: dict[tuple[int, int, str | None], list[int]] = {}
    for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
        with prompt_index_in_errors(i, len(prompts)):
            max_new_tokens = _max_beam_len(engine_config, prompt, params)
        group = (max_new_tokens, min(params.min_new_tokens, max_new_tokens), inputs.adapters[i])
        groups.setdefault(group, []).append(i)
    has_encoder = "encoder" in model.stacks
    has_forced_bos = has_encoder and generation_config.forced_bos_token_id is not None
    batch_size = _max_prompts_per_batch(engine_config, num_beams)
    beams: dict[int, list[Beam]] = {}
    for (max_new_tokens, min_new_tokens, adapter), indices in groups.items():
        params = sampling_params[indices[0]]
        search_params = BeamSearchParams(
            num_beams=num_beams,
            n=params.n,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            length_penalty=generation_config.length_penalty if length_penalty is None else length_penalty,
            early_stopping=num_beams == 1 or early_stopping,  # one beam is greedy only if it stops at the first EOS
            eos_token_ids=params.all_stop_token_ids(engine_config.eos_token_ids),
            decoder_start_token_id=engine_config.decoder_start_token_id if has_encoder else None,
            forced_bos_token_id=generation_config.forced_bos_token_id if has_encoder else None,
            forced_eos_token_ids=generation_config.forced_eos_token_ids if has_encoder else (),
            bad_words_ids=[words for words in generation_config.bad_words_ids if len(words) > 1],
            suppress_tokens=params.suppress_tokens,
            begin_suppress_tokens=generation_config.begin_suppress_tokens,
            no_repeat_ngram_size=generation_config.no_repeat_ngram_size,
            repetition_penalty=params.repetition_penalty,
            grammar=grammar,
        )
        for start in range(0, len(indices), batch_size):
            batch = indices[start : start + batch_size]
            is_applied = not model.adapters or model.has_merged_adapter
            with nullcontext() if is_applied else model.use_adapter(adapter):
                found = beam_search(model, [prompts[i] for i in batch], search_params)
            beams |= zip(batch, found, strict=True)
    return [
        _beam_to_completion(beam, sampling_params[i], prompt, inputs.tokenizer, engine_config, grammar, has_forced_bos)
        for i, prompt in enumerate(prompts)
        for beam in beams[i]
    ]


def _max_beam_len(engine_config: EngineConfig, prompt: Sequence[int], sampling_params: SamplingParams) -> int:
    """Maximum number of completion tokens for a prompt; raise if a beam would cross a LongRoPE switch length."""
    tokens = engine_config.build_model_inputs(prompt, ())[0]
    max_new_tokens = engine_config.resolve_max_tokens(tokens, sampling_params, ())
    max_len = len(tokens) + max_new_tokens - 1
    for switch_len in engine_config.rope_switch_lengths:
        if len(tokens) <= switch_len < max_len:
            raise InputError(
                f"beam search may reach {max_len} tokens, but above {switch_len} tokens LongRoPE changes the"
                " frequencies of all tokens, cached ones included; set max_new_tokens to at most"
                f" {switch_len + 1 - len(tokens)}, or leave out the argument 'beams'"
            )
    return max_new_tokens


def _max_prompts_per_batch(engine_config: EngineConfig, num_beams: int) -> int:
    """Number of prompts per batch whose KV caches fit in the free memory; raise if not even one does."""
    free = free_memory(engine_config.model.device)
    slots = engine_config.num_slots
    full = replace(engine_config, max_model_len=slots, cache_implementation="full", kv_cache_dtype=None)
    bytes_per_prompt = replace(full, max_num_seqs=num_beams).cache_bytes
    if free is not None and bytes_per_prompt > free:
        sizes = f"take {bytes_per_prompt / GIB:.3g} GiB, but only {free / GIB:.3g} GiB are free"
        raise InputError(f"{num_beams} beams of {slots} tokens {sizes}; use fewer beams or tokens")
    max_prompts = max(1, _MAX_BATCH_BEAMS // num_beams)
    return max_prompts if free is None else min(max_prompts, free // max(1, bytes_per_prompt))


def _beam_to_completion(
    beam: Beam,
    sampling_params: SamplingParams,
    prompt: Sequence[int],
    tokenizer: Tokenizer | None,
    engine_config: EngineConfig,
    grammar: Grammar | None,
    forced_bos: bool,
) -> Completion:
    """Convert a beam to a completion, cut at the first stop string."""
    context_tokens = () if len(engine_config.model.stacks) == 2 else prompt
    output = OutputProcessor(
        sampling_params, len(beam.tokens), tokenizer, engine_config.eos_token_ids, prompt_tokens=context_tokens
    )
    # A forced EOS is the last token of a beam that reaches the maximum length. It is not part of the text.
    forced_eos = engine_config.forced_eos_token_id is not None and beam.finish_reason == "length"
    grammar = None if grammar is None else grammar.copy()
    num_forced = int(forced_bos)
    for length, token in enumerate(beam.tokens, 1):
        if grammar is not None and length > num_forced:
            grammar.accept(token, length - 1 - num_forced)
        is_complete = grammar is not None and grammar.is_finished
        output.append_token(token, forced_eos=forced_eos and length == len(beam.tokens), completes_grammar=is_complete)
        if output.finish_reason is not None:
            break
    return replace(output.to_completion(prompt_tokens=len(prompt), seed=None), score=beam.score)
