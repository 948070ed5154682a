"""Batching checks: batch-isolation, batch-invariance, packing."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext, TensorFunction
from cutaway.check.module_state import preserve_state, require_unscripted
from cutaway.check.probes.embedding_gradients import forward_with_offset
from cutaway.check.probes.padded_batch import choose_lengths, pad_rows
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, skipped, success

_MAX_HEADS = 16
"""Largest number of heads for which a batch of as many rows is run."""
_ZERO_GRADIENT_RATIO = 1e-12
"""Maximum gradient with respect to another row, relative to the gradient with respect to the row itself."""


@register_check("batch-isolation", preflight=True)
def batch_isolation(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches rows of a batch that affect each other, in logits or in gradients.

    Replace all rows of a batch except one: the logits of that row must not change. The gradients of its logits and of
    its loss with respect to the other rows must be zero.

    Cause: a reshape mixes the batch axis with heads or time, or a mean, norm or expert capacity is over all rows.
    Fix: keep the batch as the first axis; transpose before a view, and compute statistics per row.
    """
    logits, tokens = ctx.logits, ctx.random_tokens(3, min(8, ctx.seq_len))
    base = ctx.base_logits(tokens)
    for row in (0, 2) if not ctx.is_slow else (0,):
        other = ctx.replace_tokens(tokens)
        other[row] = tokens[row]
        diff = ctx.compare(lambda: logits(tokens)[row], lambda: logits(other)[row], first_result=base[row])
        yield diff.expect_equal(
            passed=f"the logits of row {row} do not change with other rows",
            failed=f"the logits of row {row} change with other rows of the batch",
            location=f"row {row}, position {diff.index[0]}",
        )
        if not diff.within_tolerance:
            return
    if ctx.model.module is not None:
        try:
            yield from _check_gradient_isolation(ctx, tokens)
        except SkipCheckError as error:  # the logits are checked nevertheless
            yield skipped(error)


def _check_gradient_isolation(ctx: CheckContext, tokens: Tensor) -> Iterator[CaseResult]:
    """Check that one row's logits (in eval and training mode) and loss have no gradient with respect to other rows."""
    logits, loss = ctx.logits, ctx.model.loss

    def row_logits() -> Tensor:
        return logits(tokens)[1].float().logsumexp(-1).sum()

    if not ctx.is_slow:  # training mode covers eval mode too
        yield _gradient_isolation_result("logits of row 1 have", _embedding_gradient(ctx, tokens, row_logits))
    with preserve_state(ctx.module, training=True):
        try:
            yield _gradient_isolation_result(
                "logits of row 1, in training mode, have", _embedding_gradient(ctx, tokens, row_logits)
            )
        except (RuntimeError, ValueError, TypeError) as error:
            yield skipped(f"in training mode the model raised {type(error).__name__}")
    if loss is None or ctx.is_slow:
        return

    def row_loss(row: int) -> Tensor:
        labels = torch.full_like(tokens, -100)
        labels[row] = tokens[row]
        return loss(tokens, labels)

    gradient = _embedding_gradient(ctx, tokens, lambda: row_loss(1))
    case = _gradient_isolation_result("loss of row 1 has", gradient)
    if case.verdict == "fail":  # a term without labels, such as a load-balancing loss, may depend on all rows
        other = _embedding_gradient(ctx, tokens, lambda: row_loss(2))
        if float((gradient[0] - other[0]).abs().max()) <= 1e-4 * float(gradient[0].abs().max()):
            case = skipped("the loss has a term over all rows that does not depend on the labels")
    yield case


def _embedding_gradient(ctx: CheckContext, tokens: Tensor, compute: TensorFunction) -> Tensor:
    """Gradient of the scalar `compute()` with respect to the token embeddings of all rows, (B, T, d)."""
    value, offset = forward_with_offset(ctx.model.module, lambda _: compute(), tokens)
    (gradient,) = torch.autograd.grad(value, offset, allow_unused=True)
    return torch.zeros_like(offset) if gradient is None else gradient.float()


def _gradient_isolation_result(subject: str, gradient: Tensor) -> CaseResult:
    """Check that the gradient of row 1's output is zero in rows 0 and 2."""
    max_abs = gradient.abs().amax((1, 2))  # per row
    if not bool(max_abs.isfinite().all()):
        raise SkipCheckError("the gradients are not finite")
    other, tolerance = float(torch.maximum(max_abs[0], max_abs[2])), _ZERO_GRADIENT_RATIO * float(max_abs[1])
    if not other <= tolerance:
        return failure(f"the {subject} a gradient with respect to other rows", other, tolerance, "row 1")
    return success(f"the {subject} no gradient with respect to other rows", other, tolerance)


@register_check("batch-invariance", depends_on=("batch-isolation",))
def batch_invariance(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a row whose logits in a batch differ from those of the row alone.

    Run rows in a batch and each row alone, without and with left padding, also with as many rows as heads: the logits
    must be equal.

    Cause: a branch on the batch size (`if len(x) > 1`), a squeeze of an axis of size one, or mixed or broadcast rows.
    Fix: use the same code for one row and many: squeeze(dim) only on fixed axes, and masks of shape (B, 1, T, S).
    """
    logits, length = ctx.logits, min(12, ctx.seq_len)
    num_heads = 0 if ctx.is_slow else _num_heads(ctx)
    for batch_size in sorted({2, 5, num_heads} - {0, 1}) if not ctx.is_slow else (2,):
        tokens, ends = ctx.random_tokens(batch_size, length), [0, batch_size - 1]
        diff = ctx.compare(
            lambda: logits(tokens)[ends], lambda: torch.cat([logits(tokens[row : row + 1]) for row in ends])
        )
        yield diff.expect_equal(
            passed=f"rows in a batch of {batch_size} give the same logits as alone",
            failed=f"rows in a batch of {batch_size} give other logits than alone",
            location=f"row {ends[diff.index[0]]}, position {diff.index[1]}",
        )
        if not diff.within_tolerance:
            return
    if (logits_with_mask := ctx.model.logits_with_mask) is not None:
        short_len, seq_len = choose_lengths(ctx)
        rows = [ctx.random_tokens(1, short_len), ctx.random_tokens(1, short_len)]
        tokens, mask = pad_rows(ctx, rows, seq_len, "left")
        diff = ctx.compare(
            lambda: logits_with_mask(tokens, mask)[:, -short_len:],
            lambda: torch.cat(
                [logits_with_mask(tokens[row : row + 1], mask[row : row + 1])[:, -short_len:] for row in (0, 1)]
            ),
        )
        yield diff.expect_equal(
            passed="padded rows in a batch give the same logits as alone",
            failed="a padded row gives other logits in a batch of two than alone with the same padding",
            location=f"row {diff.index[0]}, position {diff.index[1]}",
        )
        if num_heads > 2 and diff.within_tolerance:
            yield _check_as_many_rows_as_heads(ctx, num_heads)


def _num_heads(ctx: CheckContext) -> int:
    """Number of heads of the first attention call, up to a limit; 0 if no call can be traced."""
    try:
        require_unscripted(ctx.model.module)
    except SkipCheckError:
        return 0
    sizes = [call.pattern.shape[1] for call in ctx.trace_attention(ctx.random_tokens(1, 3)) if call.pattern.ndim == 4]
    return sizes[0] if sizes and sizes[0] <= _MAX_HEADS else 0


def _check_as_many_rows_as_heads(ctx: CheckContext, num_heads: int) -> CaseResult:
    """Check a padded batch with as many rows as heads: a mask (B, T, T) is then broadcast over heads without error."""
    logits_with_mask, (short_len, seq_len) = require(ctx.model.logits_with_mask), choose_lengths(ctx)
    rows = [ctx.random_tokens(1, seq_len if n % 2 else short_len) for n in range(num_heads + 1)]
    tokens, mask = pad_rows(ctx, rows, seq_len, "left")
    diff = ctx.compare(
        lambda: logits_with_mask(tokens, mask)[:num_heads, -short_len:],
        lambda: logits_with_mask(tokens[:num_heads], mask[:num_heads])[:, -short_len:],
    )
    return diff.expect_equal(
        passed=f"a padded batch of {num_heads} rows, the number of heads, gives the same logits as with one more row",
        failed=f"a padded batch of {num_heads} rows, the number of heads, gives other logits than with one more row",
        location=f"row {diff.index[0]}, position {diff.index[1]}",
    )


@register_check("packing", needs=("logits", "logits_with_documents"), depends_on=("causality",))
def packing(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches packed documents that attend to each other, or whose positions continue from the previous document.

    Pack documents of several lengths (one of a single token) into a row: each must give the same logits as alone.

    Cause: the mask does not stop at document boundaries, or positions do not restart there.
    Fix: mask keys of other documents, and number the tokens of each document from 0.
    """
    logits_with_documents, logits = require(ctx.model.logits_with_documents), ctx.logits
    length = min(16, ctx.seq_len)
    if length < 4:
        raise SkipCheckError(f"the maximum length is {length}, too short for several documents")
    for cuts in ((length // 4 + 1, 1), (length // 2, max(1, length // 8))):
        lengths = [*cuts, length - sum(cuts)]
        document_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].to(ctx.model.device)
        tokens = ctx.random_tokens(1, length)
        diff = ctx.compare(
            lambda: logits_with_documents(tokens, document_ids),
            lambda: torch.cat([logits(document) for document in torch.split(tokens, lengths, 1)], 1),
        )
        position = diff.index[1] if diff.index else 0
        yield diff.expect_equal(
            passed=f"packed documents of {', '.join(map(str, lengths))} tokens give the same logits as alone",
            failed=f"a packed document gives other logits than alone, at position {position} of the row",
            location=f"document {int(document_ids[0, position])}, position {position}",
        )
        if not diff.within_tolerance:
            return
