"""A text's logits are its own: no row, no neighbour in a pack and no padding has a part in them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cutaway.check.exam import CannotError, Exam, Make
from cutaway.check.finding import Part
from cutaway.check.padding import batch, filler, sizes
from cutaway.check.registry import check
from cutaway.check.vectors import moved

EXACT = 1e-12
"""Of the largest gradient: what another row may weigh."""
MOST = 1 << 20
"""Numbers of a buffer that training may change."""


@check(
    "rows-apart",
    catches="rows of a batch that see each other, in logits or in gradients",
    cause="a reshape mixes the batch with heads or time, or a mean, a norm or a capacity is taken over the whole batch",
    fix="keep the batch as the first axis throughout; transpose before a view, and take statistics within a row",
    quick=True,
)
def rows_apart(exam: Exam) -> Iterator[Part]:
    """Change every row of a batch but one: its logits must stay. The gradient of its logits, and of its loss, with
    respect to the other rows must be zero."""
    target, tokens = exam.target, exam.text(3, min(8, exam.length))
    logits = target.logits
    assert logits is not None
    with torch.no_grad():
        base = logits(tokens)
        for kept in (0, 2) if not exam.slow else (0,):
            other = exam.changed(tokens)
            other[kept] = tokens[kept]
            gap = exam.same(lambda: logits(tokens)[kept], lambda: logits(other)[kept], first=base[kept])
            part = exam.judge(
                gap,
                held=f"row {kept} stays as it is when all other rows change",
                broken=f"the logits of row {kept} change with other rows of the batch",
                where=f"row {kept}, position {gap.index[0]}",
            )
            yield part
            if part.verdict == "fail":
                return
    if target.module is not None:
        try:
            yield from slopes_apart(exam, tokens)
        except CannotError as error:  # the logits were asked about nevertheless
            yield Part("skip", f"skipped: {error}")


def slopes_apart(exam: Exam, tokens: Tensor) -> Iterator[Part]:
    """Gradients of one row's logits, as they are and in training mode, and of a loss that asks for one row only."""
    target = exam.target
    assert target.logits is not None
    assert target.module is not None
    logits, loss = target.logits, target.loss
    mine: Make = lambda: logits(tokens)[1].float().logsumexp(-1).sum()  # noqa: E731
    slow = exam.slow  # training mode sees the same, and more
    if not slow:
        yield stands_apart("logits of row 1 have", slopes(exam, tokens, mine))
    with in_training(target.module):
        try:
            yield stands_apart("logits of row 1, in training mode, have", slopes(exam, tokens, mine))
        except (RuntimeError, ValueError, TypeError) as error:
            yield Part("skip", f"skipped: in training mode it raised {type(error).__name__}")
    if loss is None or slow:
        return

    def asking(row: int) -> Tensor:
        labels = torch.full_like(tokens, -100)
        labels[row] = tokens[row]
        return loss(tokens, labels)

    one = slopes(exam, tokens, lambda: asking(1))
    found = stands_apart("loss of row 1 has", one)
    if found.verdict == "fail":  # a term that asks for no label, as that which balances experts, is over all rows
        other = slopes(exam, tokens, lambda: asking(2))
        if float((one[0] - other[0]).abs().max()) <= 1e-4 * float(one[0].abs().max()):
            found = Part("skip", "skipped: its loss has a term over all rows, whatever the labels")
    yield found


def slopes(exam: Exam, tokens: Tensor, make: Make) -> Tensor:
    """The gradient of a number by the vectors of all rows."""
    with torch.enable_grad(), moved(exam.target.module, lambda _each: make(), tokens) as added:
        value = make()
        if not value.requires_grad or not added:
            raise CannotError("its logits carry no gradient")
        (slope,) = torch.autograd.grad(value, added[0], allow_unused=True)
    return torch.zeros_like(added[0]) if slope is None else slope.float()


def stands_apart(what: str, slope: Tensor) -> Part:
    """Whether rows 0 and 2 have no part in what is row 1's."""
    size = slope.abs().amax((1, 2))
    if not bool(size.isfinite().all()):
        raise CannotError("its gradients are not finite")
    far, bound = float(torch.maximum(size[0], size[2])), EXACT * float(size[1])
    if not far <= bound:
        return Part("fail", f"the {what} a gradient with respect to other rows", far, bound, "row 1")
    return Part("pass", f"the {what} no gradient with respect to other rows", far, bound)


@contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    """Training mode for as long as it lasts; what it counts in buffers is put back."""
    modes = {part: part.training for part in module.modules()}
    before = [(each, each.detach().clone()) for each in module.buffers() if each.numel() <= MOST]
    module.train()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        with torch.no_grad():
            for each, kept in before:
                if not torch.equal(each, kept):
                    each.copy_(kept)


@check(
    "batch-size",
    catches="a text that gives other logits in a batch than alone",
    cause="a branch on the number of rows (`if len(x) > 1`), a squeeze of an axis of one, or rows that are mixed",
    fix="treat one row like many: no branch on the batch, and squeeze(dim) only where that axis is always one",
    after=("rows-apart",),
)
@torch.no_grad()
def batch_size(exam: Exam) -> Iterator[Part]:
    """Read texts in a batch, and each alone; then the same behind padding: the logits must be equal."""
    target, length = exam.target, min(12, exam.length)
    logits = target.logits
    assert logits is not None
    for rows in (2, 5) if not exam.slow else (2,):
        tokens, ends = exam.text(rows, length), [0, rows - 1]
        gap = exam.same(
            lambda: logits(tokens)[ends],
            lambda: torch.cat([logits(tokens[n : n + 1]) for n in ends]),
        )
        part = exam.judge(
            gap,
            held=f"rows of a batch of {rows} give what they give alone",
            broken=f"rows of a batch of {rows} do not give what they give alone",
            where=f"row {ends[gap.index[0]]}, position {gap.index[1]}",
        )
        yield part
        if part.verdict == "fail":
            return
    if target.padded is not None:
        padded = target.padded
        short, width = sizes(exam)
        tokens, mask = batch([exam.text(1, short), exam.text(1, short)], width, "left", filler(exam))
        gap = exam.same(
            lambda: padded(tokens, mask)[:, -short:],
            lambda: torch.cat([padded(tokens[n : n + 1], mask[n : n + 1])[:, -short:] for n in (0, 1)]),
        )
        yield exam.judge(
            gap,
            held="padded rows of a batch give what they give alone",
            broken="a padded text gives other logits in a batch of two than alone with the same padding",
            where=f"row {gap.index[0]}, position {gap.index[1]}",
        )


@check(
    "packing",
    catches="texts packed into one row that see each other, or whose positions go on from the one before",
    cause="the mask does not stop at the border of a document, or positions are not begun anew there",
    fix="hide keys of other documents, and number the tokens of each from 0",
    needs=("logits", "packed"),
    after=("causality",),
)
@torch.no_grad()
def packing(exam: Exam) -> Iterator[Part]:
    """Pack documents of several lengths (one of a single token) into a row: each must give the logits it has alone."""
    packed, logits = exam.target.packed, exam.target.logits
    assert packed is not None
    assert logits is not None
    length = min(16, exam.length)
    if length < 4:
        raise CannotError(f"it reads {length} tokens at most, too few for several documents")
    for cuts in ((length // 4 + 1, 1), (length // 2, max(1, length // 8))):
        lengths = [*cuts, length - sum(cuts)]
        documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].to(exam.target.device)
        tokens = exam.text(1, length)
        gap = exam.same(
            lambda: packed(tokens, documents),
            lambda: torch.cat([logits(each) for each in torch.split(tokens, lengths, 1)], 1),
        )
        at = gap.index[1] if gap.index else 0
        part = exam.judge(
            gap,
            held=f"documents of {', '.join(map(str, lengths))} tokens in one row are as if alone",
            broken=f"a document packed behind others gives other logits than alone, at position {at} of the row",
            where=f"document {int(documents[0, at])}, position {at}",
        )
        yield part
        if part.verdict == "fail":
            return
