"""What attention heads look at: how widely, and by which rule."""

from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.models import ours
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Subject, Text, resting, subject, wide
from cutaway.lens.trace import trace
from cutaway.measure import equations
from cutaway.model import EncoderDecoder, Transformer

KINDS = ("previous", "duplicate", "induction", "first")
USUAL_LENGTH = 32
"""Random tokens before they are repeated."""


def attention_entropy(model: Any, tokens: Text, *, source: Text | None = None) -> Reading:
    """How widely each head looks: the entropy of its pattern's rows, averaged over the text; 0 is one place alone.

    What a sink takes counts as one more place.
    """
    this = subject(model, tokens, source)
    patterns = patterns_of(this)
    return by_head(
        [entropy(pattern) for _, pattern in patterns], [name for name, _ in patterns], "entropy of attention", "bits"
    )


def entropy(pattern: Tensor) -> Tensor:
    """(B, H, T, S) → (H,), in bits."""
    return entropy_by_token(pattern).mean((0, 2))


def entropy_by_token(pattern: Tensor) -> Tensor:
    """(…, T, S) → (…, T), in bits."""
    bits: Tensor = equations.entropy(equations.with_rest(pattern)) / equations.UNITS["bits"]
    return bits


def patterns_of(this: Subject) -> list[tuple[str, Tensor]]:
    """Every attention's pattern (B, H, T, S) by its layer, and by its stack and kind where there are several."""
    with resting(this.model), trace(this.model, "attn.pattern", *(["cross.pattern"] if this.prefix else [])) as t:
        this.run()
    return [(short(name), wide(t[name])) for name in t]


def short(name: str) -> str:
    return name.removesuffix(".pattern").removesuffix(".attn").replace("blocks.", "")


def by_head(scores: list[Tensor], names: list[str], title: str, unit: str, note: str = "") -> Reading:
    """A row a layer; where layers differ in their heads, the places without one are not a number."""
    most = max(len(row) for row in scores)
    values = scores[0].new_full((len(scores), most, *scores[0].shape[1:]), float("nan"))
    for at, row in enumerate(scores):
        values[at, : len(row)] = row
    labels = (tuple(names), tuple(str(head) for head in range(most)))
    if values.ndim == 3:
        return Reading(title, values, ("layer", "head", "kind"), (*labels, KINDS), unit, note)
    return Reading(title, values, ("layer", "head"), labels, unit, note)


def head_kinds(model: Any, *, length: int | None = None, rows: int = 8, seed: int = 0) -> Reading:
    """How much of its attention each head spends by four rules, on random tokens that are then repeated.

    previous: the token before · duplicate: where this token stood the first time · induction: what came after it then ·
    first: the first token of all, where heads rest. 1 is always.
    """
    inner = ours(model)
    if isinstance(inner, EncoderDecoder):
        raise InputError(
            "kinds of heads are scored on one text, and this model reads two; take a decoder or an encoder"
        )
    tokens = repeated(inner, getattr(model, "tokenizer", None), length, rows, seed)
    half = tokens.shape[1] // 2
    scores, names = [], []
    for name, pattern in patterns_of(Subject(inner, None, tokens, None)):
        names.append(name)
        scores.append(torch.stack(kinds_of(pattern, half), -1))
    later = torch.arange(half + 1, 2 * half + 1)
    chance = float((1.0 / later).mean()) if inner.stacks.keys() == {"decoder"} else 1 / (2 * half)
    note = f"{rows} rows of {half} random tokens, twice; a head that looks everywhere alike spends {chance:.3f}"
    return by_head(scores, names, "kinds of heads", "share of attention", note)


def kinds_of(pattern: Tensor, half: int) -> list[Tensor]:
    """(H,) for each kind, in the second half only, where they can be told apart."""
    back = {
        gap: pattern.diagonal(-gap, -2, -1) for gap in (1, half, half - 1)
    }  # (B, H, T − gap): row t looks at t − gap
    previous = back[1][..., half - 1 :].mean((0, 2))
    duplicate = back[half].mean((0, 2))
    induction = back[half - 1][..., 1:].mean((0, 2))  # from the second half's first token on
    first = pattern[..., half + 1 :, 0].mean((0, 2))
    return [previous, duplicate, induction, first]


def repeated(model: Transformer, tokenizer: Any, length: int | None, rows: int, seed: int) -> Tensor:
    """(rows, 2·length): random tokens, no two alike in a half, and once more."""
    size = model.config.vocab_size
    special = set(getattr(tokenizer, "special_ids", ()))
    usual = torch.tensor([token for token in range(size) if token not in special])
    stack = next(iter(model.stacks.values()))
    context = getattr(stack.embed.position, "length", None) or model.config.context or 2 * USUAL_LENGTH
    length = min(USUAL_LENGTH, context // 2, len(usual)) if length is None else length
    if isinstance(length, bool) or not isinstance(length, int) or not 3 <= length <= len(usual):
        raise InputError(
            f"length is {length!r}; give 3 to {len(usual)}, as the tokens that are repeated are all different"
        )
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise InputError(f"rows is {rows!r}; give at least 1")
    draw = torch.Generator().manual_seed(seed)
    once = torch.stack([usual[torch.randperm(len(usual), generator=draw)[:length]] for _ in range(rows)])
    return torch.cat((once, once), 1).to(model.device)
