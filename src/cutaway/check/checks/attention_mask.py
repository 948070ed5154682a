"""What is padding is not seen, and what is no padding is."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.probes.op_tracer import AttentionCall, OpTracer
from cutaway.check.probes.padded_batch import (
    choose_lengths,
    choose_pad_token,
    compare_expecting_difference,
    masked_positions,
    pad_rows,
)
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

MAX_PADDING_WEIGHT = 1 - 1e-4
"""A share of attention from which on nothing else is seen."""


@register_check(
    "bidirectional-attention",
    catches="an encoder that sees one side only: a causal mask where there should be none",
    cause="the attention is causal by default, and was not told that this is an encoder",
    fix="pass is_causal=False and no triangular mask; a model that is meant to see the past only is a kind='decoder'",
    kinds=("encoder",),
    preflight=True,
)
@torch.no_grad()
def bidirectional_attention(context: CheckContext) -> Iterator[CaseResult]:
    """Change the token after each position, then the one before: the position's output must change."""
    if context.model.window == 1:
        raise SkipCheckError("in a window of one token, each sees itself only")
    logits, tokens = context.model.logits, context.random_tokens(1, min(8, context.seq_len))
    assert logits is not None
    base, length = logits(tokens), tokens.shape[1]
    blind: dict[str, list[int]] = {"later": [], "earlier": []}
    asked = 0
    for at in range(length):
        other = context.replace_tokens(tokens, slice(at, at + 1))
        out = logits(other)
        for side, r in (("later", at - 1), ("earlier", at + 1)):
            if 0 <= r < length:
                asked += 1
                if compare_expecting_difference(
                    context, lambda: logits(tokens)[:, r], lambda: out[:, r], base[:, r]
                ).within_tolerance:
                    blind[side].append(r)
    for side, readers in blind.items():
        if readers:
            message = f"the output at position {readers[0]} does not change with the {side} token beside it"
            yield CaseResult(
                "fail", f"{message} ({len(readers)} of {length - 1} positions)", 0.0, 0.0, f"position {readers[0]}"
            )
            return
    yield CaseResult("pass", f"each position sees the tokens on both sides, in {asked} cases")


@register_check(
    "mask-polarity",
    catches="a mask upside down: padding is seen, and the text is not",
    cause="True means 'visible' to scaled_dot_product_attention and 'hidden' to nn.MultiheadAttention; one is taken "
    "for the other",
    fix="turn the mask round (~mask) where it is handed on, and say in its name what True means",
    needs=("logits", "logits_with_mask"),
    depends_on=("causality",),
    preflight=True,
)
@torch.no_grad()
def mask_polarity(context: CheckContext) -> Iterator[CaseResult]:
    """Pad a text on the left. Its last token must depend on the tokens of the text before it; and no layer's attention
    may look at padding alone."""
    target = context.model
    padded, logits = target.logits_with_mask, target.logits
    assert padded is not None
    assert logits is not None
    short, width = choose_lengths(context)
    text = context.random_tokens(1, short)
    other = context.replace_tokens(text, slice(0, short - 1))
    pad = choose_pad_token(context)
    tokens, mask = pad_rows([text], width, "left", pad)
    others, _ = pad_rows([other], width, "left", pad)
    base = logits(text)[:, -1]
    with OpTracer(target.module) as witness:
        out = padded(tokens, mask)[:, -1]
    if compare_expecting_difference(
        context, lambda: logits(text)[:, -1], lambda: logits(other)[:, -1], base
    ).within_tolerance:
        raise SkipCheckError("its last token does not depend on those before it, with or without a mask")
    if not out.isfinite().all() and base.isfinite().all():
        raise SkipCheckError("behind padding it gives no numbers, which fully-masked-row looks into")
    gap = compare_expecting_difference(
        context, lambda: padded(tokens, mask)[:, -1], lambda: padded(others, mask)[:, -1], out
    )
    yield context.expect_different(
        gap,
        passed="behind padding, the last token sees those of the text before it",
        failed="behind padding, the last token does not see those of the text before it: the mask hides what is real",
    )
    for each in witness.attentions:
        if each.pattern.shape[-2:] == (width, width) and each.softmax_dim == -1:
            pads = each.pattern[..., -1, : width - short].float().sum(-1)
            if bool((pads > MAX_PADDING_WEIGHT).all()):
                message = "the attention of the last real token lies on padding alone"
                yield CaseResult("fail", message, float(pads.min()), MAX_PADDING_WEIGHT, each.module or None)
                return


@register_check(
    "mask-diagonal",
    catches="a token that cannot attend to itself: the mask cuts out the diagonal too",
    cause="the triangle begins one place too early (j < i in place of j <= i), or a window ends before the token",
    fix="hide key j from query i where j > i, and leave j = i: torch.triu(…, diagonal=1)",
    depends_on=(
        "eval-dropout",
        "causality",
    ),
)
@torch.no_grad()
def mask_diagonal(context: CheckContext) -> Iterator[CaseResult]:
    """Look at each attention's scores and pattern: no mask may hide a token from itself, in any head, at any position.
    And a text of one token, which can see only itself, must give numbers."""
    logits, tokens = context.model.logits, context.random_tokens(1, min(8, context.seq_len))
    assert logits is not None
    if not logits(tokens[:, :1]).isfinite().all() and logits(tokens)[:, -1].isfinite().all():
        yield CaseResult(
            "fail", "a text of one token gives no number, as if it saw nothing at all", location="position 0"
        )
        return
    seen, length = 0, tokens.shape[1]
    for each in context.trace_attention(tokens):
        if (
            each.pattern.shape[-2] != length
            or each.pattern.shape[-1] not in (length, length + 1)
            or each.softmax_dim != -1
        ):
            continue
        seen += 1
        hidden = _masked_diagonal(each, length)
        if bool(hidden.any()):
            heads, places = hidden.any(-1), hidden.any(0)
            first = int(places.long().argmax()) + 1
            message = f"position {first} cannot attend to itself ({int(places.sum())} of {length - 1} positions, "
            message += f"{int(heads.sum())} of {len(heads)} heads): the mask hides it"
            place = f"position {first}" + (f", {each.module}" if each.module else "")
            yield CaseResult("fail", message, float(hidden.float().mean()), 0.0, place)
            return
    if not seen:
        raise SkipCheckError("needs attention by PyTorch's softmax or scaled_dot_product_attention, which was not seen")
    yield CaseResult("pass", f"tokens attend to themselves, in {seen} attentions")


def _masked_diagonal(attention: AttentionCall, seq_len: int) -> Tensor:
    """Heads and positions from the second on (the first, blind, may look anywhere) with no weight on themselves, by a
    mask or by a pattern that was blanked behind softmax."""
    hidden = masked_positions(attention)[0, ..., :seq_len].diagonal(dim1=-2, dim2=-1)
    if attention.applied_pattern is not None and attention.applied_pattern.shape[-2:] == attention.pattern.shape[-2:]:
        used, own = (
            x[0, ..., :seq_len].detach().diagonal(dim1=-2, dim2=-1)
            for x in (attention.applied_pattern, attention.pattern)
        )
        hidden = hidden | (used == 0) & (own > 0)
    return hidden.flatten(0, -2)[:, 1:]
