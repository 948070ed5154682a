"""`generate`: prompts in, answers out."""

import difflib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from cutaway.errors import CutawayError, InputError
from cutaway.generate.answer import Generation, Piece
from cutaway.generate.engine import Engine
from cutaway.generate.lookup import Lookup
from cutaway.generate.plan import Plan, free_memory
from cutaway.generate.prompts import Prompt, encode, named, several
from cutaway.generate.runner import at_rest
from cutaway.generate.search import own_beams, searched
from cutaway.generate.settings import Settings
from cutaway.generate.speculate import Speculation
from cutaway.generate.start import EarlyStopping, Start, read_start
from cutaway.generate.ticket import Ticket
from cutaway.model import Transformer
from cutaway.text import Tokenizer

UNASKED = 256
"""Tokens of an answer when neither the caller nor the checkpoint says how many."""
MOST_ROWS = 32
"""Texts at once unless told otherwise."""
ELSEWHERE = {
    "bad_words_ids": "banned",
    "best_of": "n",
    "do_sample": "temperature",
    "eos_token_id": "stop_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "num_beams": "beams",
    "num_return_sequences": "n",
    "stop_token_ids": "stop_tokens",
    "streamer": "on_piece",
}
"""What other libraries call it, where the names are not alike."""


class Source(Protocol):
    """A checkpoint: a model with its tokenizer and its own settings."""

    model: Transformer
    generation: dict[str, Any]
    theirs: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer | None: ...


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
    draft: Source | Transformer | Lookup | str | None = None,
    ahead: int = 4,
    bits: int | None = None,
    compiled: bool | None = None,
    on_piece: Callable[[int, Piece], None] | None = None,
    **settings: Any,
) -> list[Generation]:
    """Continue each prompt, or answer it if it is a chat or the model has an encoder; n answers a prompt, in order.

    `settings` are the fields of `Settings`: max_new_tokens, temperature, top_k, top_p, min_p, seed, stop, n, … Who asks
    for top_k, top_p or min_p and for no temperature draws with temperature 1. With
    `beams`, the likeliest sequences are searched instead of drawn. Each answer is what its prompt alone would get.
    `draft`: a smaller model, or 'lookup', that guesses `ahead` tokens at a time, of which the model keeps those that
    are its own. `bits`: of a weight in steps, 8 or on a GPU 4. `compiled`: steps are made fast at once, or never.
    `on_piece(number of the answer, piece)` is called as the answers grow; what it raises stops all of them.
    """
    asked = make_settings(settings if beams is not None else drawing(settings))
    if on_piece is not None and not callable(on_piece):
        raise InputError(f"on_piece is a {type(on_piece).__name__}; give a function of an answer's number and a piece")
    given: dict[str, Any] = {"context": context, "kind": cache, "cache_dtype": cache_dtype, "chunk": chunk}
    work = prepare(checkpoint, prompts, asked, rows=rows, bits=bits, compiled=compiled, **given)
    search = own_beams(work.plan.model, work.start, asked) if beams is None else beams
    if search or beams is not None:
        if beams is not None and (cache != "auto" or cache_dtype is not None or draft is not None):
            raise InputError("beams are led in a cache of their own kind; leave cache, cache_dtype and draft out")
        quick = [name for name, value in (("bits", bits), ("compiled", compiled), ("draft", draft)) if value]
        if quick:
            raise InputError(
                f"beams are searched with the model as it is, so {quick[0]} has no part in it; leave it out"
                + (f" (this checkpoint's own settings search with {search} beams)" if beams is None else "")
            )
        penalty = work.start.length_penalty if length_penalty is None else length_penalty
        early = work.start.early_stopping if early_stopping is None else early_stopping
        how: Any = {"beams": search, "length_penalty": penalty, "early_stopping": early}
        with at_rest(work.plan.model):
            found = searched(work.plan, work.tokenizer, work.start, work.prompts, work.settings, **how)
        if on_piece is not None:
            for number, answer in enumerate(found):
                on_piece(number, Piece(answer.text or "", answer.tokens))
        return found
    if length_penalty is not None or early_stopping is not None:
        raise InputError("length_penalty and early_stopping weigh beams, but no beams were asked for; give beams=4")
    engine, tickets = begin(work, asked, draft=draft, ahead=ahead)
    try:
        with at_rest(work.plan.model):
            while engine.turn():
                show(tickets, on_piece)
    finally:
        engine.runner.let_go()
    show(tickets, on_piece)
    for number, ticket in enumerate(tickets):
        if ticket.error is not None:
            raise named(ticket.error, number // asked.n, len(work.prompts))
    return [ticket.result() for ticket in tickets]


@dataclass
class Work:
    """Prompts as tokens, what each asks for, and the plan for all of them."""

    plan: Plan
    tokenizer: Tokenizer | None
    start: Start
    prompts: list[list[int]]
    settings: list[Settings]


def prepare(
    checkpoint: Source | Transformer,
    prompts: Prompt | Sequence[Prompt],
    asked: Settings,
    *,
    rows: int | None,
    **how: Any,
) -> Work:
    """Read everything that was given, and refuse what cannot be, before any work is done."""
    model, tokenizer, start = opened(checkpoint)
    asked.check(model.config.vocab_size)
    if asked.stop and tokenizer is None:
        raise InputError("stop strings are found in text, and there is no tokenizer to make any; give stop_tokens")
    tokens = encode_all(prompts, tokenizer)
    lengths = [len(prompt) if len(model.stacks) == 1 else 1 for prompt in tokens]
    wanted = [own_limits(asked, start, length) for length in lengths]
    plan = make_plan(
        model,
        start,
        rows=max(1, min(MOST_ROWS, len(tokens) * asked.n)) if rows is None else rows,
        source=max(map(len, tokens), default=1),
        needed=max((n + (own.max_new_tokens or 0) for n, own in zip(lengths, wanted, strict=True)), default=2),
        **how,
    )
    return Work(plan if rows is not None else fitting(plan), tokenizer, start, tokens, wanted)


def begin(
    work: Work, asked: Settings, *, draft: Source | Transformer | Lookup | str | None = None, ahead: int = 4
) -> tuple[Engine | Speculation, list[Ticket]]:
    """An engine at work on these prompts, with a request for each answer, in order."""
    plan, tokenizer = work.plan, work.tokenizer
    engine: Engine | Speculation
    if draft is None:
        engine = Engine(plan, tokenizer=tokenizer, waiting=max(1, len(work.prompts) * asked.n))
    else:
        guess, its_own = guesser(draft)
        engine = Speculation(plan, draft=guess, tokenizer=tokenizer, draft_tokenizer=its_own, ahead=ahead)
    begun = [] if work.start.forced_bos is None or len(plan.model.stacks) == 1 else [work.start.forced_bos]
    tickets: list[Ticket] = []
    for number, (prompt, own) in enumerate(zip(work.prompts, work.settings, strict=True)):
        try:
            tickets += [engine.submit(prompt, own, seed=seed, begun=begun) for seed in seeds(asked)]
        except CutawayError as error:
            raise named(error, number, len(work.prompts)) from None
    return engine, tickets


def guesser(draft: Source | Transformer | Lookup | str) -> tuple[Transformer | Lookup, Tokenizer | None]:
    if isinstance(draft, str):
        if draft != "lookup":
            raise InputError(f"draft is {draft!r:.60}; give a smaller model (ct.load it first), or 'lookup'")
        return Lookup(), None
    if isinstance(draft, Lookup):
        return draft, None
    model, tokenizer, _ = opened(draft)
    return model, tokenizer


def encode_all(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer | None) -> list[list[int]]:
    """The tokens of each prompt."""
    given = several(prompts)
    tokens = []
    for number, prompt in enumerate(given):
        try:
            tokens.append(encode(prompt, tokenizer))
        except CutawayError as error:
            raise named(error, number, len(given)) from None
    return tokens


def show(tickets: Sequence[Ticket], on_piece: Callable[[int, Piece], None] | None) -> None:
    """Hand over what has arrived."""
    if on_piece is None:
        return
    for number, ticket in enumerate(tickets):
        for piece in ticket.arrived():
            on_piece(number, piece)


def fitting(plan: Plan) -> Plan:
    """The plan, or one with fewer rows if there is no memory for so many."""
    free = free_memory(plan.model.device)
    while free is not None and plan.bytes > free and plan.rows > 1:
        plan = replace(plan, rows=plan.rows // 2)
    return plan


def opened(checkpoint: Source | Transformer) -> tuple[Transformer, Tokenizer | None, Start]:
    """The model, its tokenizer, and what its files say about generating."""
    if isinstance(checkpoint, Transformer):
        return checkpoint, None, Start()
    if not isinstance(getattr(checkpoint, "model", None), Transformer):
        raise InputError(f"checkpoint is a {type(checkpoint).__name__}; give what ct.load returns, or a model")
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    start = read_start(checkpoint.generation, checkpoint.theirs, tokenizer)
    return model, tokenizer, start.within(model.config.vocab_size)


def drawing(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, with temperature 1 where filters would have nothing to do for want of one."""
    filtered = any(given.get(name) is not None for name in ("top_k", "top_p", "min_p"))
    return ({"temperature": 1.0} if filtered else {}) | dict(given)


def make_settings(given: Mapping[str, Any]) -> Settings:
    known = tuple(Settings.__dataclass_fields__)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, "beams", "rows", "context", "cache", "chunk"), 1)
            meant = ELSEWHERE.get(name) or next(iter(near), None)
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
            raise InputError(f"there is no setting '{name}'; {hint}")
    return Settings(**given)


def seeds(asked: Settings) -> list[int]:
    """One for each answer, the first as it was given."""
    first = secrets.randbelow(2**63) if asked.seed is None else asked.seed
    return [(first + i * 0x9E3779B97F4A7C15) % 2**63 for i in range(asked.n)]


def own_limits(asked: Settings, start: Start, prompt: int) -> Settings:
    """A request with the checkpoint's limits and bans where it names none of its own."""
    most = asked.max_new_tokens
    if most is None:
        told = start.most_new(prompt)
        most = max(told if told else UNASKED, asked.min_new_tokens)
    least = min(asked.min_new_tokens or start.least_new(prompt), most)
    banned = {*asked.banned, *start.suppressed, *(words[0] for words in start.banned if len(words) == 1)}
    penalty = start.repetition_penalty if asked.repetition_penalty == 1 else asked.repetition_penalty
    return replace(
        asked,
        max_new_tokens=most,
        min_new_tokens=least,
        banned=tuple(sorted(banned)),
        repetition_penalty=penalty,
    )


def make_plan(
    model: Transformer, start: Start, *, needed: int | None = None, context: int | None = None, **how: Any
) -> Plan:
    """An engine's plan for this model; with a cache no longer than `needed`."""
    if how.get("source") == 0:
        raise InputError("the prompt is empty; give at least one token, such as the beginning-of-text token")
    both = len(model.stacks) == 2
    own: dict[str, Any] = {
        "eos": start.eos,
        "decoder_start": start.decoder_start if both else None,
        "forced_eos": min(start.forced_eos) if start.forced_eos and both else None,
    }
    plan = Plan(model, context=context, **own)
    slots = plan.slots
    if needed is not None:
        endless = context is None and plan.longest is None and model.config.context is None
        slots = max(2, needed if endless else min(needed, slots))
    return Plan(model, context=slots, **own, **how)
