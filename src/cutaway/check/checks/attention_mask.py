"""Attention mask checks: bidirectional-attention, mask-polarity, mask-diagonal."""

from collections.abc import Iterator

from torch import Tensor

from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext
from cutaway.check.probes.op_tracer import AttentionCall, OpTracer
from cutaway.check.probes.padded_batch import choose_lengths, masked_positions, pad_rows
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, MeasuredArray, SkipCheckError, failure, success

_MAX_PADDING_WEIGHT = 1 - 1e-4
"""If a larger share of the attention is on padding, real tokens are effectively masked."""


@register_check("bidirectional-attention", kinds=("encoder",), preflight=True)
def bidirectional_attention(ctx: CheckContext) -> CaseResult:
    """Catches an encoder with a causal mask: tokens attend to one side only.

    Replace the token after each position, then the token before it: the output at the position must change.

    Cause: the attention is causal by default, and the encoder does not disable it.
    Fix: pass is_causal=False and no triangular mask; check a causal model with kind='decoder'.
    """
    if ctx.model.window == 1:
        raise SkipCheckError("with a window of one token, each token attends only to itself")
    logits, tokens = ctx.logits, ctx.random_tokens(1, min(8, ctx.seq_len))
    base, length = ctx.base_logits(tokens), tokens.shape[1]
    unaffected: dict[str, list[int]] = {"next": [], "previous": []}
    num_pairs = 0
    for replaced in range(length):
        other = ctx.replace_tokens(tokens, slice(replaced, replaced + 1))
        out = logits(other)
        for side, position in (("next", replaced - 1), ("previous", replaced + 1)):
            if 0 <= position < length:
                num_pairs += 1
                if ctx.compare_expecting_difference(
                    lambda: logits(tokens)[:, position], lambda: out[:, position], first_result=base[:, position]
                ).within_tolerance:
                    unaffected[side].append(position)
    for side, positions in unaffected.items():
        if positions:
            message = f"the output at position {positions[0]} does not change with the {side} token"
            return failure(
                f"{message} ({len(positions)} of {length - 1} positions)", 0.0, 0.0, f"position {positions[0]}"
            )
    return success(f"each position attends to the tokens on both sides ({num_pairs} pairs)")


@register_check("mask-polarity", needs=("logits", "logits_with_mask"), depends_on=("causality",), preflight=True)
def mask_polarity(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches an inverted attention mask: padding is visible, and real tokens are masked.

    Pad a sequence on the left. The logits of its last token must depend on the earlier real tokens, and no layer may
    put all attention of that token on padding.

    Cause: True means 'visible' in scaled_dot_product_attention and 'masked' in nn.MultiheadAttention; the two are
    confused.
    Fix: invert the mask (~mask) where it is passed on, and name it after the meaning of True.
    """
    logits_with_mask, logits = require(ctx.model.logits_with_mask), ctx.logits
    short_len, seq_len = choose_lengths(ctx)
    row = ctx.random_tokens(1, short_len)
    other_row = ctx.replace_tokens(row, slice(0, short_len - 1))
    tokens, mask = pad_rows(ctx, [row], seq_len, "left")
    other_tokens, _ = pad_rows(ctx, [other_row], seq_len, "left")
    base = ctx.base_logits(row)[:, -1]
    with OpTracer(ctx.model.module) as tracer:
        out = logits_with_mask(tokens, mask)[:, -1]
    if ctx.compare_expecting_difference(
        lambda: logits(row)[:, -1], lambda: logits(other_row)[:, -1], first_result=base
    ).within_tolerance:
        raise SkipCheckError("the last token does not depend on earlier tokens, with or without a mask")
    if not out.isfinite().all() and base.isfinite().all():
        raise SkipCheckError("with left padding the logits are not finite; see fully-masked-row")
    diff = ctx.compare_expecting_difference(
        lambda: logits_with_mask(tokens, mask)[:, -1],
        lambda: logits_with_mask(other_tokens, mask)[:, -1],
        first_result=out,
    )
    if diff.within_tolerance:
        message = "with left padding, the last token does not attend to the earlier real tokens: the mask is inverted"
        yield diff.failure(message)
    else:
        yield diff.success("with left padding, the last token attends to the earlier real tokens")
    for call in tracer.attentions:
        if call.pattern.shape[-2:] == (seq_len, seq_len) and call.softmax_dim == -1:
            padding_weight = call.pattern[..., -1, : seq_len - short_len].float().sum(-1)
            if bool((padding_weight > _MAX_PADDING_WEIGHT).all()):
                message = "the last real token attends only to padding"
                yield failure(message, float(padding_weight.min()), _MAX_PADDING_WEIGHT, call.module or None)
                return


@register_check("mask-diagonal", depends_on=("eval-dropout", "causality"))
def mask_diagonal(ctx: CheckContext) -> CaseResult:
    """Catches a token that cannot attend to itself: the mask also covers the diagonal.

    Inspect the scores and the pattern of each attention call: the key at a query's own position must be visible in
    every head. A sequence of one token, which can attend only to itself, must give finite logits.

    Cause: query i attends only to keys j < i instead of j <= i, or a window excludes the token itself.
    Fix: mask key j for query i where j > i, and keep j = i: torch.triu(…, diagonal=1).
    """
    logits, tokens = ctx.base_logits, ctx.random_tokens(1, min(8, ctx.seq_len))
    if not logits(tokens[:, :1]).isfinite().all() and logits(tokens)[:, -1].isfinite().all():
        return failure(
            "the logits of a sequence of one token are not finite: it cannot attend to itself", location="position 0"
        )
    num_calls, length = 0, tokens.shape[1]
    array: MeasuredArray | None = None
    for call in ctx.trace_attention(tokens):
        if (
            call.pattern.shape[-2] != length
            or call.pattern.shape[-1] not in (length, length + 1)
            or call.softmax_dim != -1
        ):
            continue
        num_calls += 1
        array = array or MeasuredArray(
            "matrix",
            f"Attention weights of head 0, {call.module or 'first attention call'}",
            "key position",
            "query position",
            call.pattern.reshape(-1, *call.pattern.shape[-2:])[0, :, :length].float().tolist(),
            expected="nonzero on the diagonal",
        )
        masked = _masked_diagonal(call, length)  # (heads, T - 1)
        if bool(masked.any()):
            heads, positions = masked.any(-1), masked.any(0)
            first = int(positions.long().argmax()) + 1
            message = f"position {first} cannot attend to itself ({int(positions.sum())} of {length - 1} positions, "
            message += f"{int(heads.sum())} of {len(heads)} heads): it is masked"
            location = f"position {first}" + (f", {call.module}" if call.module else "")
            return failure(message, float(masked.float().mean()), 0.0, location, array=array)
    if not num_calls:
        raise SkipCheckError("needs attention by PyTorch's softmax or scaled_dot_product_attention; none was recorded")
    return success(f"tokens attend to themselves in {num_calls} attention calls", array=array)


def _masked_diagonal(attention: AttentionCall, seq_len: int) -> Tensor:
    """Boolean (heads, T - 1): True where a token cannot attend to itself: masked before the softmax or zero after it.
    The first position is left out, because a fully masked row may have any pattern."""
    masked = masked_positions(attention)[0, ..., :seq_len].diagonal(dim1=-2, dim2=-1)
    if attention.applied_pattern is not None and attention.applied_pattern.shape[-2:] == attention.pattern.shape[-2:]:
        applied, pattern = (
            x[0, ..., :seq_len].detach().diagonal(dim1=-2, dim2=-1)
            for x in (attention.applied_pattern, attention.pattern)
        )
        masked = masked | (applied == 0) & (pattern > 0)
    return masked.flatten(0, -2)[:, 1:]
