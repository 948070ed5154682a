"""Padding checks: fully-masked-row, left-padding, right-padding, padding-leak, moe-padding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.checked_model import TokensFunction, require
from cutaway.check.context import CheckContext, compute_once
from cutaway.check.probes.embedding_gradients import forward_with_offset
from cutaway.check.probes.op_tracer import OpTracer
from cutaway.check.probes.padded_batch import (
    choose_lengths,
    forward_rows_alone,
    locate_token,
    pad_rows,
    random_ragged_rows,
    select_real_tokens,
)
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, MeasuredArray, SkipCheckError, failure, skipped, success, warning

_MAX_GRADIENT_NUMEL = 1 << 16
"""Largest parameter, in elements, whose gradient is inspected."""
_MAX_EXTRA_PADDING = 48
"""Maximum number of padding tokens added to a sequence."""
_PREREQUISITES = ("causality", "batch-isolation", "batch-invariance", "mask-polarity", "mask-diagonal")
"""Checks whose bugs would make every padding check fail."""


@register_check("fully-masked-row", needs=("logits", "logits_with_mask"), depends_on=_PREREQUISITES)
def fully_masked_row(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches NaN from a fully masked row, which the backward pass propagates to all weights.

    Run a batch of a left-padded row (right-padded if left padding is unsupported) and a row of padding only. The logits
    of the first row must be finite and the same as beside a row with real tokens; their gradients must be finite.

    Cause: softmax over -inf only is 0/0; its output is discarded, but its gradient is not.
    Fix: leave fully masked queries one visible key and zero the result, or use a kernel that returns zeros for them.
    """
    logits_with_mask, logits = require(ctx.model.logits_with_mask), ctx.logits
    short_len, seq_len = choose_lengths(ctx)
    row = ctx.random_tokens(1, short_len)
    side = "right" if _unsupported_side_reason(ctx, "left") else "left"
    tokens, mask = pad_rows(ctx, [row, row], seq_len, side)
    empty_mask = mask.clone()
    empty_mask[1] = False
    real = slice(0, short_len) if side == "right" else slice(-short_len, None)
    base = logits_with_mask(tokens, mask)[:1, real]
    if not base.isfinite().all():
        if bool(logits(row).isfinite().all()):
            yield failure(f"with {side} padding, the logits of a row are not finite", location="row 0")
        else:
            yield skipped("the logits are not finite, even without padding")
        return
    diff = ctx.compare(
        lambda: logits_with_mask(tokens, mask)[:1, real],
        lambda: logits_with_mask(tokens, empty_mask)[:1, real],
        first_result=base,
    )
    yield diff.expect_equal(
        passed="a row of padding only does not change the other row",
        failed="a row of padding only changes the logits of the other row",
        location=f"position {diff.index[1]}",
    )
    if not diff.within_tolerance:
        return
    gradients = _row_gradients(ctx, logits_with_mask, tokens, empty_mask, real)
    not_finite = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if not_finite:
        message = "with a row of padding only in the batch, gradients of the other row's loss are not finite"
        count = len(not_finite)
        yield failure(f"{message} ({count} of {len(gradients)} gradients)", count, 0, not_finite[-1])
    elif gradients:
        yield success("with a row of padding only in the batch, gradients are finite")
    elif not logits_with_mask(tokens, empty_mask)[1].isfinite().all():
        yield warning("a row of padding only gives NaN, which a backward pass would propagate", location="row 1")


def _row_gradients(
    ctx: CheckContext, forward: TokensFunction, tokens: Tensor, mask: Tensor, real_positions: slice
) -> dict[str, Tensor]:
    """Gradients of the first row's logits with respect to the token embeddings and to small parameters; empty if the
    logits require no gradient."""
    try:
        out, offset = forward_with_offset(ctx.model.module, lambda x: forward(x, mask), tokens)
    except SkipCheckError:
        return {}
    trainable = {name: param for name, param in ctx.module.named_parameters() if param.requires_grad}
    tensors: dict[str, Tensor] = {"the token embeddings": offset}
    tensors |= {name: param for name, param in trainable.items() if param.numel() <= _MAX_GRADIENT_NUMEL}
    with torch.enable_grad():
        value = out[:1, real_positions].float().logsumexp(-1).sum()
    gradients = torch.autograd.grad(value, list(tensors.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(tensors, gradients, strict=True) if gradient is not None}


def _check_padded_rows(ctx: CheckContext, side: str) -> Iterator[CaseResult]:
    """Compare each row of a padded batch of three lengths with the row alone, without and with gradients."""
    logits_with_mask, logits = require(ctx.model.logits_with_mask), ctx.logits
    (rows, seq_len), base = _ragged_rows_with_logits(ctx)
    tokens, mask = pad_rows(ctx, rows, seq_len, side)
    for path in ("", " with gradients"):

        def padded_logits(path: str = path) -> Tensor:
            with torch.set_grad_enabled(bool(path)):
                return select_real_tokens(logits_with_mask(tokens, mask), mask).detach()

        padded = padded_logits()
        diff = ctx.compare(
            lambda: forward_rows_alone(rows, logits), padded_logits, first_result=base, second_result=padded
        )
        array = _difference_by_row(rows, base, padded, side)
        if not diff.within_tolerance:
            row, position = locate_token(rows, diff.index[0])
            num_pads = seq_len - rows[row].shape[1]
            reason = _unsupported_side_reason(ctx, side)
            if reason:
                yield skipped(reason)
                return
            message = f"with {num_pads} padding tokens on the {side}{path}, the logits at position {position}"
            yield diff.failure(
                f"{message} differ from those of the row alone", f"row {row}, position {position}", array=array
            )
            return
        yield diff.success(f"with {side} padding{path}, each row gives the same logits as alone", array)


def _difference_by_row(rows: list[Tensor], alone: Tensor, padded: Tensor, side: str) -> MeasuredArray:
    """Largest difference of the logits of each token (N, V) in a padded batch and alone, by row and position."""
    lengths = [row.shape[1] for row in rows]
    by_token = (alone.float() - padded.float()).abs().amax(-1)
    return MeasuredArray(
        "lines",
        f"Logits in a {side}-padded batch − logits of the row alone",
        "position of the token in its row",
        "largest absolute difference",
        [part.tolist() for part in torch.split(by_token, lengths)],
        [f"{length} tokens" for length in lengths],
        "differences within rounding",
    )


@compute_once
def _ragged_rows_with_logits(ctx: CheckContext) -> tuple[tuple[list[Tensor], int], Tensor]:
    """Rows of different lengths with their padded length, and the logits of each row alone."""
    rows, seq_len = random_ragged_rows(ctx)
    return (rows, seq_len), forward_rows_alone(rows, ctx.base_logits)


def _unsupported_side_reason(ctx: CheckContext, side: str) -> str | None:
    """Return the reason why the model does not support padding on this side, or None if the model supports it."""
    model = ctx.model
    if side == "left" and model.padding_side == "right":
        return "the model supports right padding only (the property padding_side=)"
    if side == "right" or model.positions_skip_padding or model.relative_positions:
        return None
    if model.kind == "decoder" and model.positions_skip_padding is None:
        return None
    return "positions count padding and cannot be passed, so the model supports right padding only"


@register_check("left-padding", needs=("logits", "logits_with_mask"), depends_on=(*_PREREQUISITES, "fully-masked-row"))
def left_padding(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches left padding that changes the logits: positions count the padding, or padding is visible.

    Run three rows of different lengths in one left-padded batch: each must give the same logits as alone.

    Cause: positions start at the first padding token instead of the first real token, or the mask is not applied.
    Fix: compute positions as mask.cumsum(-1) - 1, and mask padding for every query.
    """
    yield from _check_padded_rows(ctx, "left")


@register_check("right-padding", needs=("logits", "logits_with_mask"), depends_on=(*_PREREQUISITES, "fully-masked-row"))
def right_padding(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches right padding that changes the logits: padding is visible.

    Run three rows of different lengths in one right-padded batch: each must give the same logits as alone.

    Cause: the mask is not applied, is applied to queries instead of keys, or one row's mask is used for all rows.
    Fix: mask padding keys, per row, on every code path: mask[:, None, None, :].
    """
    yield from _check_padded_rows(ctx, "right")


@register_check("padding-leak", needs=("logits", "logits_with_mask"), depends_on=(*_PREREQUISITES, "fully-masked-row"))
def padding_leak(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches visible padding: the tokens in padding change the logits of real tokens.

    Replace the padding tokens, on either side: the logits of real tokens must not change.

    Cause: the padding mask is not applied in some layer, or another op than attention mixes positions.
    Fix: mask padding for every query, and zero it where other ops mix positions (convolutions, states, means).
    """
    logits_with_mask, logits_with_mask_only = require(ctx.model.logits_with_mask), ctx.model.logits_with_mask_only
    rows, seq_len = random_ragged_rows(ctx)
    for side, forward in (("right", logits_with_mask), ("left", logits_with_mask_only or logits_with_mask)):
        if side == "left" and ctx.model.positions_from_pad_token:
            yield skipped("left padding is not tested, because positions are derived from the pad token")
            continue
        tokens, mask = pad_rows(ctx, rows, seq_len, side)
        other = torch.where(mask, tokens, ctx.random_tokens(len(rows), seq_len))
        diff = ctx.compare(
            lambda: select_real_tokens(forward(tokens, mask), mask),
            lambda: select_real_tokens(forward(other, mask), mask),
        )
        row, position = locate_token(rows, diff.index[0])
        yield diff.expect_equal(
            passed=f"the tokens in {side} padding do not change the logits",
            failed=f"the logits at position {position} change with the tokens in {side} padding",
            location=f"row {row}, position {position}",
        )


@register_check(
    "moe-padding",
    needs=("logits", "logits_with_mask"),
    depends_on=(*_PREREQUISITES, "fully-masked-row", "padding-leak", "left-padding", "right-padding"),
)
def moe_padding(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches padding that is routed to experts: it uses their capacity, or counts in the load-balancing loss.

    For models with a router: many padding tokens, all equal to one real token, must give the same logits as one padding
    token, and the load-balancing loss must not depend on padding.

    Cause: the router and its loss get all tokens of a batch, including padding.
    Fix: pass the padding mask to the router: exclude padding from expert capacity and from the load-balancing loss.
    """
    model = ctx.model
    logits_with_mask = require(model.logits_with_mask)
    short_len, seq_len = choose_lengths(ctx)
    row = ctx.random_tokens(1, short_len)
    with OpTracer() as tracer:
        ctx.logits(row)
    if model.load_balancing_loss is None and not tracer.num_routing_calls:
        raise SkipCheckError("needs a mixture of experts; no routing was recorded")
    num_pads = min(_MAX_EXTRA_PADDING, (model.max_seq_len or _MAX_EXTRA_PADDING + seq_len) - short_len)
    right_only = model.kind != "decoder" and not model.positions_skip_padding and not model.relative_positions
    right_only = right_only or model.padding_side == "right"
    for side in ["right"] if right_only or model.positions_from_pad_token else ["left", "right"]:
        few, few_mask = pad_rows(ctx, [row, row], short_len + 1, side, int(row[0, -1]))
        many, many_mask = pad_rows(ctx, [row, row], short_len + num_pads, side, int(row[0, -1]))
        diff = ctx.compare(
            lambda: logits_with_mask(few, few_mask)[few_mask], lambda: logits_with_mask(many, many_mask)[many_mask]
        )
        yield diff.expect_equal(
            passed=f"{num_pads} padding tokens on the {side} do not change the routing",
            failed=f"{num_pads} padding tokens on the {side} instead of one change the routing of real tokens",
            location=f"position {diff.index[0] % short_len}",
        )
    if (loss := model.load_balancing_loss) is not None:
        rows = [row, ctx.random_tokens(1, short_len - 1)]
        tokens, mask = pad_rows(ctx, rows, seq_len, "right")
        other = torch.where(mask, tokens, ctx.random_tokens(2, seq_len))
        for change, other_tokens, other_mask in (
            ("the tokens in padding", other, mask),
            ("the amount of padding", *pad_rows(ctx, rows, seq_len + 1, "right")),
        ):
            if other_tokens.shape[1] > (model.max_seq_len or 1 << 30):
                continue
            diff = ctx.compare(lambda: loss(tokens, mask).reshape(1), lambda: loss(other_tokens, other_mask).reshape(1))
            yield diff.expect_equal(
                passed=f"the load-balancing loss does not depend on {change}",
                failed=f"the load-balancing loss changes with {change}",
            )
