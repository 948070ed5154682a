"""Answers by beam search, for prompts that may be searched together."""

from collections.abc import Sequence
from dataclasses import replace

from cutaway.errors import CutawayError, InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.engine.output import Completion, OutputProcessor
from cutaway.generate.generation_config import EarlyStopping, GenerationConfig
from cutaway.generate.prompts import add_prompt_index
from cutaway.generate.sampling.sampling_params import SamplingParams, as_int, format_value
from cutaway.generate.search.beam_search import Beam, beam_search
from cutaway.model import Transformer
from cutaway.model.device import GIB, free_memory
from cutaway.tokenizer import Tokenizer

MAX_BATCH_BEAMS = 64
"""Beams that are led side by side, of all prompts together."""
SAMPLING_ONLY_PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
)
"""Parameters that the search knows nothing of."""


def _first_sampling_only_param(sampling_params: SamplingParams) -> str | None:
    """The first parameter that belongs to drawing, if there is one."""
    usual = SamplingParams()
    return next((name for name in SAMPLING_ONLY_PARAMS if getattr(sampling_params, name) != getattr(usual, name)), None)


def default_num_beams(model: Transformer, generation_config: GenerationConfig, sampling_params: SamplingParams) -> int:
    """How many beams a checkpoint's own settings search with; 0 if they are not for this request.

    Rules about sequences of tokens are known to the search only, so greedy answers under them are a search with one.
    """
    if (
        _first_sampling_only_param(sampling_params)
        or sampling_params.n > generation_config.num_beams
        or len(model.stacks) == 1
    ):
        return 0
    ruled = (
        generation_config.no_repeat_ngram_size
        or generation_config.begin_suppress_tokens
        or any(len(words) > 1 for words in generation_config.bad_words_ids)
    )
    return generation_config.num_beams if generation_config.num_beams > 1 or ruled else 0


def generate_with_beams(
    engine_config: EngineConfig,
    tokenizer: Tokenizer | None,
    generation_config: GenerationConfig,
    prompts: Sequence[Sequence[int]],
    sampling_params: Sequence[SamplingParams],
    *,
    num_beams: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> list[Completion]:
    """The n best answers to each prompt, in order. Prompts with the same limits are searched together."""
    if as_int(num_beams) is None or num_beams < 1:
        raise InputError(f"beams is {format_value(num_beams)}; give a whole number from 1")
    unknown = _first_sampling_only_param(sampling_params[0]) if sampling_params else None
    if unknown is not None:
        raise InputError(f"{unknown} belongs to drawing, and beams are searched; leave one of the two out")
    num_beams = int(num_beams)
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (prompt, own) in enumerate(zip(prompts, sampling_params, strict=True)):
        try:
            most = _max_beam_len(engine_config, prompt, own)
        except CutawayError as error:
            raise add_prompt_index(error, number, len(prompts)) from None
        groups.setdefault((most, min(own.min_new_tokens, most)), []).append(number)
    both = "encoder" in engine_config.model.stacks
    size = _max_prompts_per_batch(engine_config, num_beams)
    found: dict[int, list[Beam]] = {}
    for (most, least), alike in groups.items():
        for first in range(0, len(alike), size):
            numbers = alike[first : first + size]
            own = sampling_params[numbers[0]]
            results = beam_search(
                engine_config.model,
                [prompts[number] for number in numbers],
                num_beams=num_beams,
                n=own.n,
                max_new_tokens=most,
                min_new_tokens=least,
                length_penalty=length_penalty,
                early_stopping=num_beams == 1 or early_stopping,  # one beam is greedy only if its first end is the end
                eos_token_ids={*own.stop_token_ids, *(() if own.ignore_eos else engine_config.eos_token_ids)},
                decoder_start_token_id=engine_config.decoder_start_token_id if both else None,
                forced_bos_token_id=generation_config.forced_bos_token_id if both else None,
                forced_eos_token_ids=generation_config.forced_eos_token_ids if both else (),
                bad_words_ids=[words for words in generation_config.bad_words_ids if len(words) > 1],
                suppress_tokens=own.suppress_tokens,
                begin_suppress_tokens=generation_config.begin_suppress_tokens,
                no_repeat_ngram_size=generation_config.no_repeat_ngram_size,
                repetition_penalty=own.repetition_penalty,
            )
            found |= dict(zip(numbers, results, strict=True))
    return [
        _beam_to_completion(beam, sampling_params[number], prompt, tokenizer, engine_config)
        for number, prompt in enumerate(prompts)
        for beam in found[number]
    ]


def _max_beam_len(engine_config: EngineConfig, prompt: Sequence[int], sampling_params: SamplingParams) -> int:
    """Tokens of a prompt's answers at most, if they can be searched."""
    tokens = engine_config.build_model_inputs(prompt, ())[0]
    most = engine_config.resolve_max_tokens(tokens, sampling_params, ())
    turn = next(
        (turn for turn in engine_config.rope_switch_lengths if len(tokens) <= turn < len(tokens) + most - 1), None
    )
    if turn is not None:
        raise InputError(
            f"beams of up to {len(tokens) + most - 1} tokens would grow past {turn}, where LongRoPE turns the whole"
            f" text by other angles; ask for {turn + 1 - len(tokens)} tokens at most, or for no beams"
        )
    return most


def _max_prompts_per_batch(engine_config: EngineConfig, num_beams: int) -> int:
    """How many prompts are searched side by side: as many as there is memory for, if there is enough for one."""
    free = free_memory(engine_config.model.device)
    one = replace(
        engine_config,
        max_model_len=engine_config.num_slots,
        cache_implementation="full",
        kv_cache_dtype=None,
        max_num_seqs=num_beams,
    ).cache_bytes
    if free is not None and one > free:
        raise InputError(
            f"{num_beams} beams of {engine_config.num_slots} tokens take {one / GIB:.3g} GiB, and {free / GIB:.3g} are"
            " free; ask for fewer beams or tokens"
        )
    most = max(1, MAX_BATCH_BEAMS // num_beams)
    return most if free is None else min(most, free // max(1, one))


def _beam_to_completion(
    beam: Beam,
    sampling_params: SamplingParams,
    prompt: Sequence[int],
    tokenizer: Tokenizer | None,
    engine_config: EngineConfig,
) -> Completion:
    """A beam as an answer, which may end at a stop string before its last token."""
    before = () if len(engine_config.model.stacks) == 2 else prompt
    answer = OutputProcessor(
        sampling_params, len(beam.tokens), tokenizer, engine_config.eos_token_ids, prompt_tokens=before
    )
    # Then its last token is no word of it.
    forced = engine_config.forced_eos_token_id is not None and beam.finish_reason == "length"
    for place, token in enumerate(beam.tokens, 1):
        answer.append_token(token, forced_eos=forced and place == len(beam.tokens))
        if answer.finish_reason is not None:
            break
    result = answer.to_completion(prompt_tokens=len(prompt), seed=None)
    result.score = beam.score
    return result
