"""Which heads wrote a logit, and by which rule each head looks."""

from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.readings import attribution, head_kinds
from cutaway.lens.readings.attribution import parts_of, refuse_unless_sum
from cutaway.lens.readings.heads import KINDS
from cutaway.lens.readings.subject import Subject
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.kept import Kept
from cutaway.serve.inspect.look import Look, Token
from cutaway.serve.inspect.question import OfText, Place, Question
from cutaway.serve.inspect.wire import Answer

ROWS = 4
KNOWN: WeakKeyDictionary[Inspector, Answer] = WeakKeyDictionary()
"""Kinds of heads of a model as it is, which take a few passes."""


class Credit(OfText):
    """What each head adds to the logit of the next token (the likeliest, unless one is named) at a place.

    Direct logit attribution: the final norm's scale is held at what it was, so that the logit is a sum.
    """

    at: Place
    token: Token | None = None

    def answer(self, of: Inspector, job: Job) -> Answer:
        if self.at >= len(self.look.tokens):
            raise InputError(f"at is {self.at}; the text has {len(self.look.tokens)} tokens, from 0 on")
        if self.token is not None and self.token >= of.config.vocab_size:
            raise InputError(f"token is {self.token}, and the vocabulary ends at {of.config.vocab_size - 1}")
        this = subject_of(of, self.look)
        refuse_unless_sum(this)
        final = f"{this.prefix}final_norm"
        kept = of.with_values(self.look, [final, *needed(this, of)], job)
        logits = of.logits(kept[final][self.at])
        chosen = int(logits.argmax()) if self.token is None else self.token
        parts = edited_parts(of, self, chosen) if self.look.edits else parts_of_kept(this, kept, self.at, chosen)
        heads: dict[str, list[float]] = {}
        others: list[dict[str, Any]] = []
        for name, amount in parts:
            layer, _, rest = name.partition(".")
            kind, _, number = rest.partition(".")
            if number.isdigit():
                heads.setdefault(f"{this.prefix}blocks.{layer}.{kind}", []).append(amount)
            else:
                others.append({"name": name, "amount": amount})
        share = float(logits.softmax(-1)[chosen])
        facts = {"token": chosen, "text": of.words.of(chosen), "share": share, "logit": float(logits[chosen])}
        total, cap = sum(amount for _, amount in parts), this.need_head().softcap
        return Answer({**facts, "sum": total, "cap": cap, "heads": heads, "others": others})


class Kinds(Question):
    """How much of its attention each head spends by each rule, on random tokens that are then repeated."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        if of not in KNOWN:
            with of.changed(Look(tokens=(0,))):
                found = head_kinds(SimpleNamespace(model=of.model, tokenizer=of.words.tokenizer), rows=ROWS)
            names = [f"blocks.{layer}.attn" for layer in found.labels[0]]
            KNOWN[of] = Answer({"kinds": list(KINDS), "names": names, "note": found.note}, {"scores": found.values})
        return KNOWN[of]


class Standing:
    """What was kept, at one place, as a trace of that place alone."""

    def __init__(self, kept: Kept, at: int) -> None:
        self.kept, self.at = kept, at

    def __getitem__(self, name: str, /) -> Tensor:
        return self.kept.values[name][:, self.at : self.at + 1]


def subject_of(of: Inspector, look: Look) -> Subject:
    source = None if look.source is None else torch.tensor([look.source], device=of.model.device)
    return Subject(of.model, of.words.tokenizer, torch.tensor([look.tokens], device=of.model.device), source)


def needed(this: Subject, of: Inspector) -> list[str]:
    """The sites that a logit is put together from."""
    ends = (".attn.out", ".attn.z", ".cross.out", ".cross.z", ".ffn.out")
    stream = (f"{this.prefix}embed", f"{this.prefix}blocks.{len(this.stack.blocks) - 1}.resid_post")
    return [name for name in of.sites if name in stream or (name.startswith(this.prefix) and name.endswith(ends))]


def parts_of_kept(this: Subject, kept: Kept, at: int, chosen: int) -> list[tuple[str, float]]:
    here = Standing(kept, at)
    with torch.no_grad():
        parts = list(parts_of(this, here, here, chosen, None, by_head=True, by_token=False))
        return [(part.name, float(part.amount)) for part in parts]


def edited_parts(of: Inspector, asked: Credit, chosen: int) -> list[tuple[str, float]]:
    """In a model whose build may be another one, by a pass of its own."""
    look = asked.look
    source = None if look.source is None else list(look.source)
    with of.changed(look):
        found = attribution(of.model, list(look.tokens), chosen, position=asked.at, source=source, by_head=True)
    return list(zip(found.labels[0], found.values.tolist(), strict=True))
