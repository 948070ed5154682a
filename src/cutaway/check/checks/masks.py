"""What is padding is not seen, and what is no padding is."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.exam import CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.padding import batch, filler, masked_out, moves, sizes
from cutaway.check.registry import check
from cutaway.check.witness import Attention, Witness

HIDDEN = 1 - 1e-4
"""A share of attention from which on nothing else is seen."""


@check(
    "both-sides",
    catches="an encoder that sees one side only: a causal mask where there should be none",
    cause="the attention is causal by default, and was not told that this is an encoder",
    fix="pass is_causal=False and no triangular mask; a model that is meant to see the past only is a kind='decoder'",
    kinds=("encoder",),
    quick=True,
)
@torch.no_grad()
def both_sides(exam: Exam) -> Iterator[Part]:
    """Change the token after each position, then the one before: the position's output must change."""
    if exam.target.window == 1:
        raise CannotError("in a window of one token, each sees itself only")
    logits, tokens = exam.target.logits, exam.text(1, min(8, exam.length))
    assert logits is not None
    base, length = logits(tokens), tokens.shape[1]
    blind: dict[str, list[int]] = {"later": [], "earlier": []}
    asked = 0
    for at in range(length):
        other = exam.changed(tokens, slice(at, at + 1))
        out = logits(other)
        for side, r in (("later", at - 1), ("earlier", at + 1)):
            if 0 <= r < length:
                asked += 1
                if moves(exam, lambda: logits(tokens)[:, r], lambda: out[:, r], base[:, r]).ok:
                    blind[side].append(r)
    for side, readers in blind.items():
        if readers:
            message = f"the output at position {readers[0]} does not change with the {side} token beside it"
            yield Part(
                "fail", f"{message} ({len(readers)} of {length - 1} positions)", 0.0, 0.0, f"position {readers[0]}"
            )
            return
    yield Part("pass", f"each position sees the tokens on both sides, in {asked} cases")


@check(
    "mask-polarity",
    catches="a mask upside down: padding is seen, and the text is not",
    cause="True means 'visible' to scaled_dot_product_attention and 'hidden' to nn.MultiheadAttention; one is taken "
    "for the other",
    fix="turn the mask round (~mask) where it is handed on, and say in its name what True means",
    needs=("logits", "padded"),
    after=("causality",),
    quick=True,
)
@torch.no_grad()
def mask_polarity(exam: Exam) -> Iterator[Part]:
    """Pad a text on the left. Its last token must depend on the tokens of the text before it; and no layer's attention
    may look at padding alone."""
    target = exam.target
    padded, logits = target.padded, target.logits
    assert padded is not None
    assert logits is not None
    short, width = sizes(exam)
    text = exam.text(1, short)
    other = exam.changed(text, slice(0, short - 1))
    pad = filler(exam)
    tokens, mask = batch([text], width, "left", pad)
    others, _ = batch([other], width, "left", pad)
    base = logits(text)[:, -1]
    with Witness(target.module) as witness:
        out = padded(tokens, mask)[:, -1]
    if moves(exam, lambda: logits(text)[:, -1], lambda: logits(other)[:, -1], base).ok:
        raise CannotError("its last token does not depend on those before it, with or without a mask")
    if not out.isfinite().all() and base.isfinite().all():
        raise CannotError("behind padding it gives no numbers, which masked-row looks into")
    gap = moves(exam, lambda: padded(tokens, mask)[:, -1], lambda: padded(others, mask)[:, -1], out)
    yield exam.judge_alive(
        gap,
        held="behind padding, the last token sees those of the text before it",
        broken="behind padding, the last token does not see those of the text before it: the mask hides what is real",
    )
    for each in witness.attentions:
        if each.pattern.shape[-2:] == (width, width) and each.axis == -1:
            pads = each.pattern[..., -1, : width - short].float().sum(-1)
            if bool((pads > HIDDEN).all()):
                message = "the attention of the last real token lies on padding alone"
                yield Part("fail", message, float(pads.min()), HIDDEN, each.module or None)
                return


@check(
    "self-visible",
    catches="a token that cannot attend to itself: the mask cuts out the diagonal too",
    cause="the triangle begins one place too early (j < i in place of j <= i), or a window ends before the token",
    fix="hide key j from query i where j > i, and leave j = i: torch.triu(…, diagonal=1)",
    after=(
        "dropout-off",
        "causality",
    ),
)
@torch.no_grad()
def self_visible(exam: Exam) -> Iterator[Part]:
    """Look at each attention's scores and pattern: no mask may hide a token from itself, in any head, at any position.
    And a text of one token, which can see only itself, must give numbers."""
    logits, tokens = exam.target.logits, exam.text(1, min(8, exam.length))
    assert logits is not None
    if not logits(tokens[:, :1]).isfinite().all() and logits(tokens)[:, -1].isfinite().all():
        yield Part("fail", "a text of one token gives no number, as if it saw nothing at all", where="position 0")
        return
    seen, length = 0, tokens.shape[1]
    for each in exam.attentions(tokens):
        if each.pattern.shape[-2] != length or each.pattern.shape[-1] not in (length, length + 1) or each.axis != -1:
            continue
        seen += 1
        hidden = hidden_from_itself(each, length)
        if bool(hidden.any()):
            heads, places = hidden.any(-1), hidden.any(0)
            first = int(places.long().argmax()) + 1
            message = f"position {first} cannot attend to itself ({int(places.sum())} of {length - 1} positions, "
            message += f"{int(heads.sum())} of {len(heads)} heads): the mask hides it"
            place = f"position {first}" + (f", {each.module}" if each.module else "")
            yield Part("fail", message, float(hidden.float().mean()), 0.0, place)
            return
    if not seen:
        raise CannotError("needs attention by PyTorch's softmax or scaled_dot_product_attention, which was not seen")
    yield Part("pass", f"tokens attend to themselves, in {seen} attentions")


def hidden_from_itself(each: Attention, length: int) -> Tensor:
    """Heads and positions from the second on (the first, blind, may look anywhere) with no weight on themselves, by a
    mask or by a pattern that was blanked behind softmax."""
    hidden = masked_out(each)[0, ..., :length].diagonal(dim1=-2, dim2=-1)
    if each.used is not None and each.used.shape[-2:] == each.pattern.shape[-2:]:
        used, own = (x[0, ..., :length].detach().diagonal(dim1=-2, dim2=-1) for x in (each.used, each.pattern))
        hidden = hidden | (used == 0) & (own > 0)
    return hidden.flatten(0, -2)[:, 1:]
