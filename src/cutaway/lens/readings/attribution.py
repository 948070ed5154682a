"""Direct logit attribution: which part of a model wrote a token's logit.

The last stream is a sum, x = embed + Σ out, and the final norm, its statistics frozen at the token that is looked at,
is linear; so the logit is a sum too: embed·g + Σ out·g + biases, with one direction g for all parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.readings.frozen import carried_back
from cutaway.lens.readings.reading import Reading, shown
from cutaway.lens.readings.subject import Subject, Text, Token, resting, subject, wide
from cutaway.lens.trace import trace


class Values(Protocol):
    """By the names of sites, as a trace has them."""

    def __getitem__(self, name: str, /) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """What one part added to the logit, by the token it came from (one number, at `own`, if it looked at none)."""

    name: str
    amount: Tensor
    """(tokens,) where attention looked, or a single number."""
    across: bool = False
    """Whether it looked at the source's tokens."""


def attribution(
    model: Any,
    tokens: Text,
    of: Token | None = None,
    *,
    against: Token | None = None,
    position: int = -1,
    source: Text | None = None,
    by_head: bool = False,
    by_token: bool = False,
) -> Reading:
    """What each part added to a token's logit (the likeliest's, if none is named), or to its lead over another's.

    The values add up to the logit. `by_head` parts attention into heads, `by_token` by where they looked. A softcap
    stands behind the sum: what is attributed is the logit before it.
    """
    this = subject(model, tokens, source)
    refuse_unless_sum(this)
    at = this.position(position)
    blocks = f"{this.prefix}blocks.*"
    names = [f"{this.prefix}embed", f"{this.prefix}final_norm", f"{blocks}.attn.out", f"{blocks}.ffn.out"]
    names += [f"{blocks}.resid_post", f"{blocks}.attn.z"] + ([f"{blocks}.attn.pattern"] if by_token else [])
    mixed = [f"{blocks}.attn.v"] if by_token else []
    if this.prefix:
        names += [f"{blocks}.cross.out", f"{blocks}.cross.z"] + ([f"{blocks}.cross.pattern"] if by_token else [])
        mixed += [f"{blocks}.cross.v"] if by_token else []
    with resting(this.model), trace(this.model, *names, positions=at) as here:
        if mixed:
            with trace(this.model, *mixed) as everywhere:
                logits = this.run()
        else:
            everywhere, logits = here, this.run()
        chosen = int(logits[0, at].argmax()) if of is None else this.token(of, "the token to attribute")
        other = None if against is None else this.token(against, "the token to compare with")
        parts = list(parts_of(this, here, everywhere, chosen, other, by_head=by_head, by_token=by_token))
    return told(this, parts, at, chosen, other, logits, by_token=by_token)


def refuse_unless_sum(this: Subject) -> None:
    """Only a stream that is a plain sum, and a head that is linear, can be taken apart."""
    this.need_sum("attribution")
    if this.need_head().transform is not None:
        raise InputError(
            "this model's head has a layer with an activation before the output matrix, so a logit is no sum of "
            "parts; attribution needs a plain head"
        )


def parts_of(
    this: Subject, here: Values, everywhere: Values, chosen: int, other: int | None, *, by_head: bool, by_token: bool
) -> Iterator[Part]:
    head, stack, prefix = this.need_head(), this.stack, this.prefix
    matrix: Any = head.matrix.weight
    direction = wide(matrix[chosen]) * head.scale
    bias = head.scale * wide(head.bias)[chosen] if head.bias is not None else None
    if other is not None:
        direction = direction - wide(matrix[other]) * head.scale
        bias = None if bias is None or head.bias is None else bias - head.scale * wide(head.bias)[other]
    last = here[f"{prefix}blocks.{len(stack.blocks) - 1}.resid_post"][0, 0]
    g, norm_bias = carried_back(stack.final_norm, last, direction)
    yield Part("embed", wide(here[f"{prefix}embed"][0, 0]) @ g)
    for layer, block in enumerate(stack.blocks):
        site = f"{prefix}blocks.{layer}"
        branches = [("attn", block.attn), ("cross", getattr(block, "cross", None))]
        for kind, branch in branches:
            if branch is None:
                continue
            name, out = f"{layer}.{kind}", wide(here[f"{site}.{kind}.out"][0, 0])
            if not by_head and not by_token:
                yield Part(name, out @ g)
                continue
            heads, constant = heads_of(branch, here, everywhere, f"{site}.{kind}", g, by_token=by_token)
            rows = [(f"{name}.{number}", row) for number, row in enumerate(heads)]
            for label, row in rows if by_head else [(name, heads.sum(0))]:
                yield Part(label, row, across=kind == "cross")
            if constant is not None:
                yield Part(f"{name}.bias", constant)
        yield Part(f"{layer}.ffn", wide(here[f"{site}.ffn.out"][0, 0]) @ g)
    if bias is not None or getattr(stack.final_norm, "bias", None) is not None:
        yield Part("bias", norm_bias if bias is None else norm_bias + bias)


def heads_of(
    branch: Any, here: Values, everywhere: Values, site: str, g: Tensor, *, by_token: bool
) -> tuple[Tensor, Tensor | None]:
    """What each head adds, (H,) or (H, S) by where it looked, and what the biases behind them add."""
    f = branch.f
    z = wide(here[f"{site}.z"][0, 0])  # (H, E)
    weight, bias = wide(f.o.weight), None if f.o.bias is None else wide(f.o.bias)
    inner, added = carried_back(branch.norm_out, F.linear(z.flatten(), weight, bias), g)
    back = (inner @ weight).view_as(z)  # each head's slice of o, seen from the logit
    constant = added if bias is None else added + bias @ inner
    has_bias = bias is not None or getattr(branch.norm_out, "bias", None) is not None
    if by_token:
        values = wide(everywhere[f"{site}.v"][0])  # (S, G, E)
        values = values.repeat_interleave(len(z) // values.shape[1], 1)
        heads = torch.einsum("hs,she,he->hs", wide(here[f"{site}.pattern"][0, :, 0]), values, back)
    else:
        heads = (z * back).sum(-1)
    return heads * branch.scale, constant * branch.scale if has_bias else None


def told(
    this: Subject, parts: list[Part], at: int, chosen: int, other: int | None, logits: Tensor, *, by_token: bool
) -> Reading:
    words = this.words
    name = shown(this.texts([chosen])[0])
    title = f"what wrote the logit of '{name}' after '{shown(words[at])}'"
    if other is not None:
        title = f"what put '{name}' before '{shown(this.texts([other])[0])}' after '{shown(words[at])}'"
    labels: tuple[tuple[str, ...], ...] = (tuple(part.name for part in parts),)
    if by_token:
        beside = () if this.source is None else this.texts(this.source[0].tolist())
        beside = tuple(f"source: {word}" for word in beside)
        rows = [spread(part, at, len(words), len(beside)) for part in parts]
        amounts, labels = torch.stack(rows), (*labels, (*words, *beside))
    else:
        amounts = torch.stack([part.amount for part in parts])
    whole = logits[0, at, chosen] - (0 if other is None else logits[0, at, other])
    cap = this.need_head().softcap
    capped = "" if cap is None else f", before the cap at ±{cap:g}"
    note = f"the parts add up to {float(amounts.sum()):.6g}{capped}; the model says {float(whole):.6g}"
    axes = ("part", "token") if by_token else ("part",)
    return Reading(title, amounts, axes, labels, unit="logit" + capped, note=note)


def spread(part: Part, at: int, length: int, beside: int) -> Tensor:
    """A part's amounts, each at the token it came from: what looked at nothing came from the token itself."""
    row = part.amount.new_zeros(length + beside)
    if part.amount.ndim == 0:
        row[at] = part.amount
    elif part.across:
        row[length:] = part.amount
    else:
        row[:length] = part.amount
    return row
