"""A text's logits are its own: no row, no neighbour in a pack and no padding has a part in them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cutaway.check.exam import CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.padding import batch, filler, sizes
from cutaway.check.registry import check
from cutaway.check.vectors import moved

FLOOD = 48
"""Padding tokens that are more than a text, all of one kind."""
EXACT = 1e-12
"""Of the largest gradient: what another row may weigh."""
CHOICES = {torch.topk, Tensor.topk, torch.argmax, Tensor.argmax, torch.sort, Tensor.sort, torch.argsort, Tensor.argsort}


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
        for kept in (0, 2):
            other = exam.changed(tokens)
            other[kept] = tokens[kept]
            gap = exam.same(lambda k=kept: logits(tokens)[k], lambda k=kept, o=other: logits(o)[k], first=base[kept])  # type: ignore[misc]  # fmt: skip
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
    """Gradients of one row's logits, and of a loss that asks for one row only, by the vectors of all rows."""
    target = exam.target
    labels = torch.full_like(tokens, -100)
    labels[1] = tokens[1]
    asked: dict[str, Any] = {"logits": lambda: target.logits(tokens)[1].float().logsumexp(-1).sum()}  # type: ignore[misc]
    if target.loss is not None:
        asked["loss"] = lambda: target.loss(tokens, labels)  # type: ignore[misc]
    for what, make in asked.items():
        with torch.enable_grad(), moved(target.module, lambda _each, make=make: make(), tokens) as added:
            value = make()
            if not value.requires_grad or not added:
                raise CannotError("its logits carry no gradient")
            (slope,) = torch.autograd.grad(value, added[0], allow_unused=True)
        if slope is None:
            continue
        size = slope.float().abs().amax((1, 2))
        far = float(torch.maximum(size[0], size[2]))
        bound = EXACT * float(size[1])
        if not far <= bound:
            yield Part("fail", f"the {what} of row 1 has a gradient with respect to other rows", far, bound, "row 1")
            return
        yield Part("pass", f"the {what} of a row has no gradient with respect to others", far, bound)


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
    for rows in (2, 5):
        tokens = exam.text(rows, length)
        gap = exam.same(
            lambda t=tokens: logits(t),  # type: ignore[misc]
            lambda t=tokens: torch.cat([logits(t[n : n + 1]) for n in (0, len(t) - 1)]) if len(t) == 2  # type: ignore[misc]
            else torch.cat([logits(t[n : n + 1]) for n in range(len(t))]),
        )  # fmt: skip
        part = exam.judge(
            gap,
            held=f"rows of a batch of {rows} give what they give alone",
            broken=f"rows of a batch of {rows} do not give what they give alone",
            where=f"row {gap.index[0]}, position {gap.index[1]}",
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
            lambda t=tokens, d=documents: packed(t, d),  # type: ignore[misc]
            lambda t=tokens, n=lengths: torch.cat([logits(each) for each in t.split(n, 1)], 1),  # type: ignore[misc]
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


class Choosing(TorchFunctionMode):
    """While it is on, it is counted how often something is chosen by its size, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in CHOICES
        return func(*args, **(kwargs or {}))


@check(
    "routing-padding",
    catches="padding that is routed: it takes the room of experts, or counts in the loss that balances them",
    cause="the router and its loss are given all tokens of a batch, padding too",
    fix="hand the padding mask to the router: padding takes no slot of an expert and no part in the balance",
    needs=("logits", "padded"),
    after=("causality", "mask-polarity", "pad-contents", "left-padding", "right-padding"),
)
@torch.no_grad()
def routing_padding(exam: Exam) -> Iterator[Part]:
    """Where tokens are routed: a text beside many padding tokens that are all like one of its own must give what it
    gives beside few, and the loss that balances experts must not depend on padding."""
    target = exam.target
    padded, logits = target.padded, target.logits
    assert padded is not None
    assert logits is not None
    short, width = sizes(exam)
    text = exam.text(1, short)
    with Choosing() as choosing:
        logits(text)
    if target.balance is None and not choosing.count:
        raise CannotError("needs a mixture of experts, and no choice of one was seen")
    room = min(FLOOD, (target.longest or FLOOD + width) - short)
    sides = ["right"] if target.kind != "decoder" and not target.counted and not target.relative else ["left", "right"]
    for side in sides:
        few, few_mask = batch([text, text], short + 1, side, int(text[0, -1]))
        many, many_mask = batch([text, text], short + room, side, int(text[0, -1]))
        if target.pads_counted and side == "left":
            continue
        gap = exam.same(
            lambda t=few, m=few_mask: padded(t, m)[m],  # type: ignore[misc]
            lambda t=many, m=many_mask: padded(t, m)[m],  # type: ignore[misc]
        )
        yield exam.judge(
            gap,
            held=f"{room} padding tokens on the {side} change no route",
            broken=f"with {room} padding tokens on the {side} in place of one, a text is routed otherwise",
            where=f"position {gap.index[0] % short}",
        )
    if target.balance is not None:
        balance = target.balance
        tokens, mask = batch([text, exam.text(1, short - 1)], width, "right", filler(exam))
        other = torch.where(mask, tokens, exam.text(2, width))
        for what, changed, told in (
            ("what stands in padding", other, mask),
            ("more padding", *batch([tokens[:1, :short], tokens[1:, : short - 1]], width + 1, "right", filler(exam))),
        ):
            if changed.shape[1] > (target.longest or 1 << 30):
                continue
            gap = exam.same(
                lambda: balance(tokens, mask).reshape(1),
                lambda c=changed, t=told: balance(c, t).reshape(1),  # type: ignore[misc]
            )
            yield exam.judge(
                gap,
                held=f"the loss that balances experts does not depend on {what}",
                broken=f"the loss that balances experts changes with {what}",
            )
