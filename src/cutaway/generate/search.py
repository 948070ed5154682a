"""Answers by beam search, for prompts that may be searched together."""

from collections.abc import Sequence
from dataclasses import replace

from cutaway.errors import CutawayError, InputError
from cutaway.generate.answer import Answer, Generation
from cutaway.generate.beams import Beam, beam_search
from cutaway.generate.plan import GIB, Plan, free_memory
from cutaway.generate.prompts import named
from cutaway.generate.settings import Settings, index, shown
from cutaway.generate.start import EarlyStopping, Start
from cutaway.model import Transformer
from cutaway.text import Tokenizer

TOGETHER = 64
"""Beams that are led side by side, of all prompts together."""
DRAWING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
)
"""Settings that the search knows nothing of."""


def draws(asked: Settings) -> str | None:
    """The first setting that belongs to drawing, if there is one."""
    usual = Settings()
    return next((name for name in DRAWING if getattr(asked, name) != getattr(usual, name)), None)


def own_beams(model: Transformer, start: Start, asked: Settings) -> int:
    """How many beams a checkpoint's own settings search with; 0 if they are not for this request.

    Rules about sequences of tokens are known to the search only, so greedy answers under them are a search with one.
    """
    if draws(asked) or asked.n > start.beams or len(model.stacks) == 1:
        return 0
    ruled = start.no_repeat_ngram or start.suppressed_first or any(len(words) > 1 for words in start.banned)
    return start.beams if start.beams > 1 or ruled else 0


def searched(
    plan: Plan,
    tokenizer: Tokenizer | None,
    start: Start,
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[Settings],
    *,
    beams: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> list[Generation]:
    """The n best answers to each prompt, in order. Prompts with the same limits are searched together."""
    if index(beams) is None or beams < 1:
        raise InputError(f"beams is {shown(beams)}; give a whole number from 1")
    unknown = draws(wanted[0]) if wanted else None
    if unknown is not None:
        raise InputError(f"{unknown} belongs to drawing, and beams are searched; leave one of the two out")
    beams = int(beams)
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (prompt, own) in enumerate(zip(prompts, wanted, strict=True)):
        try:
            most = length_of_beams(plan, prompt, own)
        except CutawayError as error:
            raise named(error, number, len(prompts)) from None
        groups.setdefault((most, min(own.min_new_tokens, most)), []).append(number)
    both = "encoder" in plan.model.stacks
    size = together(plan, beams)
    found: dict[int, list[Beam]] = {}
    for (most, least), alike in groups.items():
        for first in range(0, len(alike), size):
            numbers = alike[first : first + size]
            own = wanted[numbers[0]]
            results = beam_search(
                plan.model,
                [prompts[number] for number in numbers],
                beams=beams,
                n=own.n,
                max_new_tokens=most,
                min_new_tokens=least,
                length_penalty=length_penalty,
                early_stopping=beams == 1 or early_stopping,  # one beam is greedy only if its first end is the end
                eos={*own.stop_tokens, *(() if own.ignore_eos else plan.eos)},
                decoder_start=plan.decoder_start if both else None,
                forced_bos=start.forced_bos if both else None,
                forced_eos=start.forced_eos if both else (),
                banned=[words for words in start.banned if len(words) > 1],
                suppressed=own.banned,
                suppressed_first=start.suppressed_first,
                no_repeat_ngram=start.no_repeat_ngram,
                repetition_penalty=own.repetition_penalty,
            )
            found |= dict(zip(numbers, results, strict=True))
    return [
        told(beam, wanted[number], prompt, tokenizer, plan)
        for number, prompt in enumerate(prompts)
        for beam in found[number]
    ]


def length_of_beams(plan: Plan, prompt: Sequence[int], own: Settings) -> int:
    """Tokens of a prompt's answers at most, if they can be searched."""
    tokens = plan.begin(prompt, ())[0]
    most = plan.limit(tokens, own, ())
    turn = next((turn for turn in plan.turns if len(tokens) <= turn < len(tokens) + most - 1), None)
    if turn is not None:
        raise InputError(
            f"beams of up to {len(tokens) + most - 1} tokens would grow past {turn}, where LongRoPE turns the whole"
            f" text by other angles; ask for {turn + 1 - len(tokens)} tokens at most, or for no beams"
        )
    return most


def together(plan: Plan, beams: int) -> int:
    """How many prompts are searched side by side: as many as there is memory for, if there is enough for one."""
    free = free_memory(plan.model.device)
    one = replace(plan, context=plan.slots, kind="full", cache_dtype=None, rows=beams).bytes
    if free is not None and one > free:
        raise InputError(
            f"{beams} beams of {plan.slots} tokens take {one / GIB:.3g} GiB, and {free / GIB:.3g} are free; ask for"
            " fewer beams or tokens"
        )
    most = max(1, TOGETHER // beams)
    return most if free is None else min(most, free // max(1, one))


def told(beam: Beam, own: Settings, prompt: Sequence[int], tokenizer: Tokenizer | None, plan: Plan) -> Generation:
    """A beam as an answer, which may end at a stop string before its last token."""
    before = () if len(plan.model.stacks) == 2 else prompt
    answer = Answer(own, len(beam.tokens), tokenizer, plan.eos, after=before)
    forced = plan.forced_eos is not None and beam.finish_reason == "length"  # then its last token is no word of it
    for place, token in enumerate(beam.tokens, 1):
        answer.take(token, cut=forced and place == len(beam.tokens))
        if answer.reason is not None:
            break
    result = answer.result(prompt_tokens=len(prompt), seed=None)
    result.score = beam.score
    return result
