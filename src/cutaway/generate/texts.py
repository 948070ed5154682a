"""`generate`: prompts in, answers out."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch

from cutaway.errors import InputError
from cutaway.generate.answer import Answer, Generation
from cutaway.generate.beams import beam_search
from cutaway.generate.engine import Engine
from cutaway.generate.plan import Plan
from cutaway.generate.settings import Settings
from cutaway.generate.start import EarlyStopping, Start, read_start
from cutaway.model import Transformer
from cutaway.text import Tokenizer

UNASKED = 256
"""Tokens of an answer when neither the caller nor the checkpoint says how many."""
MOST_ROWS = 32
"""Texts at once unless told otherwise."""


class Source(Protocol):
    """A checkpoint: a model with its tokenizer and its own settings."""

    model: Transformer
    generation: dict[str, Any]
    theirs: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer | None: ...


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, its tokens, or the messages of a chat."""


def generate(
    checkpoint: Source | Transformer,
    prompts: Prompt | Sequence[Prompt],
    *,
    beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: EarlyStopping | None = None,
    rows: int | None = None,
    context: int | None = None,
    cache: Literal["auto", "full", "ring", "paged"] = "auto",
    cache_dtype: torch.dtype | None = None,
    chunk: int = 512,
    **settings: Any,
) -> list[Generation]:
    """Continue each prompt, or answer it if it is a chat or the model has an encoder; n answers a prompt, in order.

    `settings` are the fields of `Settings`: max_new_tokens, temperature, top_k, top_p, min_p, seed, stop, n, … With
    `beams`, the likeliest sequences are searched instead of drawn. Each answer is what its prompt alone would get.
    """
    model, tokenizer, start = opened(checkpoint)
    asked = make_settings(settings)
    asked.check(model.config.vocab_size)
    tokens = [encode(prompt, tokenizer) for prompt in several(prompts)]
    search = beams if beams is not None else own_beams(model, start, asked)
    if search:
        penalty = start.length_penalty if length_penalty is None else length_penalty
        early = start.early_stopping if early_stopping is None else early_stopping
        return searched(model, tokenizer, start, tokens, asked, search, penalty, early)
    if length_penalty is not None or early_stopping is not None:
        raise InputError("length_penalty and early_stopping weigh beams, but no beams were asked for; give beams=4")
    wanted = [own_limits(asked, start, len(prompt) if len(model.stacks) == 1 else 1) for prompt in tokens]
    plan = make_plan(
        model,
        start,
        rows=rows or min(MOST_ROWS, len(tokens) * asked.n),
        context=context,
        kind=cache,
        cache_dtype=cache_dtype,
        chunk=chunk,
        source=max(map(len, tokens), default=1),
        needed=max((len(p) + (s.max_new_tokens or 0) for p, s in zip(tokens, wanted, strict=True)), default=2),
    )
    engine = Engine(plan, tokenizer=tokenizer, waiting=len(tokens) * asked.n)
    begun = [] if start.forced_bos is None or len(model.stacks) == 1 else [start.forced_bos]
    tickets = [
        engine.submit(prompt, own, seed=seed, begun=begun)
        for prompt, own in zip(tokens, wanted, strict=True)
        for seed in seeds(asked)
    ]
    engine.run()
    return [ticket.result() for ticket in tickets]


def opened(checkpoint: Source | Transformer) -> tuple[Transformer, Tokenizer | None, Start]:
    """The model, its tokenizer, and what its files say about generating."""
    if isinstance(checkpoint, Transformer):
        return checkpoint, None, Start()
    if not isinstance(getattr(checkpoint, "model", None), Transformer):
        raise InputError(f"checkpoint is a {type(checkpoint).__name__}; give what ct.load returns, or a model")
    tokenizer = checkpoint.tokenizer
    return checkpoint.model, tokenizer, read_start(checkpoint.generation, checkpoint.theirs, tokenizer)


def make_settings(given: Mapping[str, Any]) -> Settings:
    known = Settings.__dataclass_fields__
    for name in given:
        if name not in known:
            raise InputError(f"there is no setting '{name}'; there are {', '.join(known)}")
    return Settings(**given)


def several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        if isinstance(prompts, torch.Tensor):
            raise InputError("prompts are a tensor; pass lists of ids, as from tokens.tolist(), without padding")
        raise InputError(f"prompts are a {type(prompts).__name__}; give a text, a list of ids, or a list of those")
    if len(prompts) and isinstance(prompts[0], int | Mapping):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def encode(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """A prompt's tokens."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
        if not any(isinstance(part, Mapping) for part in prompt):
            return list(prompt)  # type: ignore[arg-type]
    elif not isinstance(prompt, str):
        raise InputError(f"a prompt is a {type(prompt).__name__}; give a text, a list of ids, or a chat's messages")
    if tokenizer is None:
        raise InputError("this model has no tokenizer to read text with; give lists of token ids")
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)  # type: ignore[arg-type]


def seeds(asked: Settings) -> list[int]:
    """One for each answer, the first as it was given."""
    first = secrets.randbelow(2**63) if asked.seed is None else asked.seed
    return [(first + i * 0x9E3779B97F4A7C15) % 2**63 for i in range(asked.n)]


def own_beams(model: Transformer, start: Start, asked: Settings) -> int:
    """How many beams a checkpoint's own settings search with; 0 if they are not for this request.

    Rules about sequences of tokens are known to the search only, so greedy answers under them are a search with one.
    """
    ruled = start.no_repeat_ngram or start.suppressed_first or any(len(words) > 1 for words in start.banned)
    plain = asked == Settings(
        max_new_tokens=asked.max_new_tokens, min_new_tokens=asked.min_new_tokens, stop=asked.stop, n=asked.n
    )
    if not plain or asked.n > start.beams or len(model.stacks) == 1:
        return 0
    return start.beams if start.beams > 1 or ruled else 0


def own_limits(asked: Settings, start: Start, prompt: int) -> Settings:
    """A request with the checkpoint's limits and bans where it names none of its own."""
    most = asked.max_new_tokens
    if most is None:
        told = start.most_new(prompt)
        most = told if told else UNASKED
    least = min(asked.min_new_tokens or start.least_new(prompt), most)
    banned = {*asked.banned, *start.suppressed, *(words[0] for words in start.banned if len(words) == 1)}
    return replace(asked, max_new_tokens=most, min_new_tokens=least, banned=tuple(sorted(banned)))


def make_plan(
    model: Transformer, start: Start, *, needed: int | None = None, context: int | None = None, **how: Any
) -> Plan:
    """An engine's plan for this model; with a cache no longer than `needed`."""
    forced = start.forced_eos[0] if start.forced_eos and len(model.stacks) == 2 else None
    plan = Plan(model, context=context, eos=start.eos, decoder_start=start.decoder_start, forced_eos=forced, **how)
    if needed is not None and needed < plan.slots:
        plan = replace(plan, context=max(2, needed))
    return plan


def searched(
    model: Transformer,
    tokenizer: Tokenizer | None,
    start: Start,
    prompts: Sequence[Sequence[int]],
    asked: Settings,
    beams: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
) -> list[Generation]:
    """Answers by beam search."""
    for name in ("temperature", "top_k", "top_p", "min_p", "logprobs", "logit_bias"):
        if getattr(asked, name):
            raise InputError(f"{name} belongs to drawing, and beams are searched; leave one of the two out")
    plan = make_plan(model, start, source=max(map(len, prompts), default=1))
    answers = []
    wanted = [own_limits(asked, start, len(prompt) if len(model.stacks) == 1 else 1) for prompt in prompts]
    begun = [plan.begin(prompt, ()) for prompt in prompts]
    limits = [plan.limit(tokens, own, ()) for (tokens, _), own in zip(begun, wanted, strict=True)]
    for prompt, own, most in zip(prompts, wanted, limits, strict=True):
        found = beam_search(
            model,
            [prompt],
            beams=beams,
            n=asked.n,
            max_new_tokens=most,
            min_new_tokens=min(own.min_new_tokens, most),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos={*own.stop_tokens, *(() if own.ignore_eos else start.eos)},
            decoder_start=start.decoder_start,
            forced_bos=start.forced_bos if len(model.stacks) == 2 else None,
            forced_eos=start.forced_eos if len(model.stacks) == 2 else (),
            banned=[words for words in start.banned if len(words) > 1],
            suppressed=own.banned,
            suppressed_first=start.suppressed_first,
            no_repeat_ngram=start.no_repeat_ngram,
        )
        for beam in found[0]:
            answer = Answer(own, len(beam.tokens), tokenizer, start.eos)
            for token in beam.tokens:
                answer.take(token)
                if answer.reason is not None:
                    break
            result = answer.result(prompt_tokens=len(prompt), seed=None)
            result.score = beam.score
            answers.append(result)
    return answers
