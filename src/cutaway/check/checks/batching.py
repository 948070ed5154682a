"""A text's logits are its own: no row, no neighbor in a pack and no padding has a part in them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.context import CheckContext, TensorFunction
from cutaway.check.module_state import training_mode
from cutaway.check.probes.embedding_gradients import add_embedding_offset
from cutaway.check.probes.padded_batch import choose_lengths, choose_pad_token, pad_rows
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

ZERO_GRADIENT_RATIO = 1e-12
"""Of the largest gradient: what another row may weigh."""


@register_check(
    "batch-isolation",
    catches="rows of a batch that see each other, in logits or in gradients",
    cause="a reshape mixes the batch with heads or time, or a mean, a norm or a capacity is taken over the whole batch",
    fix="keep the batch as the first axis throughout; transpose before a view, and take statistics within a row",
    preflight=True,
)
def batch_isolation(context: CheckContext) -> Iterator[CaseResult]:
    """Change every row of a batch but one: its logits must stay. The gradient of its logits, and of its loss, with
    respect to the other rows must be zero."""
    target, tokens = context.model, context.random_tokens(3, min(8, context.seq_len))
    logits = target.logits
    assert logits is not None
    with torch.no_grad():
        base = logits(tokens)
        for kept in (0, 2) if not context.is_slow else (0,):
            other = context.replace_tokens(tokens)
            other[kept] = tokens[kept]
            gap = context.compare(lambda: logits(tokens)[kept], lambda: logits(other)[kept], first_result=base[kept])
            part = context.expect_equal(
                gap,
                passed=f"row {kept} stays as it is when all other rows change",
                failed=f"the logits of row {kept} change with other rows of the batch",
                location=f"row {kept}, position {gap.index[0]}",
            )
            yield part
            if part.verdict == "fail":
                return
    if target.module is not None:
        try:
            yield from _check_gradient_isolation(context, tokens)
        except SkipCheckError as error:  # the logits were asked about nevertheless
            yield CaseResult("skip", f"skipped: {error}")


def _check_gradient_isolation(context: CheckContext, tokens: Tensor) -> Iterator[CaseResult]:
    """Gradients of one row's logits, as they are and in training mode, and of a loss that asks for one row only."""
    target = context.model
    assert target.logits is not None
    assert target.module is not None
    logits, loss = target.logits, target.loss
    mine: TensorFunction = lambda: logits(tokens)[1].float().logsumexp(-1).sum()  # noqa: E731
    slow = context.is_slow  # training mode sees the same, and more
    if not slow:
        yield _gradient_isolation_result("logits of row 1 have", _embedding_gradient(context, tokens, mine))
    with training_mode(target.module):
        try:
            yield _gradient_isolation_result(
                "logits of row 1, in training mode, have", _embedding_gradient(context, tokens, mine)
            )
        except (RuntimeError, ValueError, TypeError) as error:
            yield CaseResult("skip", f"skipped: in training mode it raised {type(error).__name__}")
    if loss is None or slow:
        return

    def asking(row: int) -> Tensor:
        labels = torch.full_like(tokens, -100)
        labels[row] = tokens[row]
        return loss(tokens, labels)

    one = _embedding_gradient(context, tokens, lambda: asking(1))
    found = _gradient_isolation_result("loss of row 1 has", one)
    if found.verdict == "fail":  # a term that asks for no label, as that which balances experts, is over all rows
        other = _embedding_gradient(context, tokens, lambda: asking(2))
        if float((one[0] - other[0]).abs().max()) <= 1e-4 * float(one[0].abs().max()):
            found = CaseResult("skip", "skipped: its loss has a term over all rows, whatever the labels")
    yield found


def _embedding_gradient(context: CheckContext, tokens: Tensor, compute: TensorFunction) -> Tensor:
    """The gradient of a number by the vectors of all rows."""
    with torch.enable_grad(), add_embedding_offset(context.model.module, lambda _each: compute(), tokens) as added:
        value = compute()
        if not value.requires_grad or not added:
            raise SkipCheckError("its logits carry no gradient")
        (slope,) = torch.autograd.grad(value, added[0], allow_unused=True)
    return torch.zeros_like(added[0]) if slope is None else slope.float()


def _gradient_isolation_result(subject: str, gradient: Tensor) -> CaseResult:
    """Whether rows 0 and 2 have no part in what is row 1's."""
    size = gradient.abs().amax((1, 2))
    if not bool(size.isfinite().all()):
        raise SkipCheckError("its gradients are not finite")
    far, bound = float(torch.maximum(size[0], size[2])), ZERO_GRADIENT_RATIO * float(size[1])
    if not far <= bound:
        return CaseResult("fail", f"the {subject} a gradient with respect to other rows", far, bound, "row 1")
    return CaseResult("pass", f"the {subject} no gradient with respect to other rows", far, bound)


@register_check(
    "batch-invariance",
    catches="a text that gives other logits in a batch than alone",
    cause="a branch on the number of rows (`if len(x) > 1`), a squeeze of an axis of one, or rows that are mixed",
    fix="treat one row like many: no branch on the batch, and squeeze(dim) only where that axis is always one",
    depends_on=("batch-isolation",),
)
@torch.no_grad()
def batch_invariance(context: CheckContext) -> Iterator[CaseResult]:
    """Read texts in a batch, and each alone; then the same behind padding: the logits must be equal."""
    target, length = context.model, min(12, context.seq_len)
    logits = target.logits
    assert logits is not None
    for rows in (2, 5) if not context.is_slow else (2,):
        tokens, ends = context.random_tokens(rows, length), [0, rows - 1]
        gap = context.compare(
            lambda: logits(tokens)[ends],
            lambda: torch.cat([logits(tokens[n : n + 1]) for n in ends]),
        )
        part = context.expect_equal(
            gap,
            passed=f"rows of a batch of {rows} give what they give alone",
            failed=f"rows of a batch of {rows} do not give what they give alone",
            location=f"row {ends[gap.index[0]]}, position {gap.index[1]}",
        )
        yield part
        if part.verdict == "fail":
            return
    if target.logits_with_mask is not None:
        padded = target.logits_with_mask
        short, width = choose_lengths(context)
        tokens, mask = pad_rows(
            [context.random_tokens(1, short), context.random_tokens(1, short)], width, "left", choose_pad_token(context)
        )
        gap = context.compare(
            lambda: padded(tokens, mask)[:, -short:],
            lambda: torch.cat([padded(tokens[n : n + 1], mask[n : n + 1])[:, -short:] for n in (0, 1)]),
        )
        yield context.expect_equal(
            gap,
            passed="padded rows of a batch give what they give alone",
            failed="a padded text gives other logits in a batch of two than alone with the same padding",
            location=f"row {gap.index[0]}, position {gap.index[1]}",
        )


@register_check(
    "packing",
    catches="texts packed into one row that see each other, or whose positions go on from the one before",
    cause="the mask does not stop at the border of a document, or positions are not begun anew there",
    fix="hide keys of other documents, and number the tokens of each from 0",
    needs=("logits", "logits_with_documents"),
    depends_on=("causality",),
)
@torch.no_grad()
def packing(context: CheckContext) -> Iterator[CaseResult]:
    """Pack documents of several lengths (one of a single token) into a row: each must give the logits it has alone."""
    packed, logits = context.model.logits_with_documents, context.model.logits
    assert packed is not None
    assert logits is not None
    length = min(16, context.seq_len)
    if length < 4:
        raise SkipCheckError(f"it reads {length} tokens at most, too few for several documents")
    for cuts in ((length // 4 + 1, 1), (length // 2, max(1, length // 8))):
        lengths = [*cuts, length - sum(cuts)]
        documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].to(context.model.device)
        tokens = context.random_tokens(1, length)
        gap = context.compare(
            lambda: packed(tokens, documents),
            lambda: torch.cat([logits(each) for each in torch.split(tokens, lengths, 1)], 1),
        )
        at = gap.index[1] if gap.index else 0
        part = context.expect_equal(
            gap,
            passed=f"documents of {', '.join(map(str, lengths))} tokens in one row are as if alone",
            failed=f"a document packed behind others gives other logits than alone, at position {at} of the row",
            location=f"document {int(documents[0, at])}, position {at}",
        )
        yield part
        if part.verdict == "fail":
            return
