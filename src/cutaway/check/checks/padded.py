"""Texts behind and before padding: each is as if alone, and padding costs nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cutaway.check.exam import CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.padding import alone, batch, filler, place_of, ragged, real, sizes
from cutaway.check.registry import check
from cutaway.check.vectors import moved

Padded = Callable[[Tensor, Tensor], Tensor]
MOST = 1 << 16
"""Numbers of a weight whose gradient is looked at."""
FLOOD = 48
"""Padding tokens that are more than a text, all of one kind."""
CHOICES = {torch.topk, Tensor.topk, torch.argmax, Tensor.argmax, torch.sort, Tensor.sort, torch.argsort, Tensor.argsort}
NEARER = ("causality", "rows-apart", "batch-size", "mask-polarity", "self-visible")
"""What would show in every padded batch."""


@check(
    "masked-row",
    catches="NaN from a row in which all is masked, which the backward pass carries into every weight",
    cause="softmax over nothing but -inf is 0/0; what it gives is thrown away, but its gradient is not",
    fix="give queries that see nothing a key to look at and blank the result, or use a kernel that gives them zeros",
    needs=("logits", "padded"),
    after=NEARER,
)
def masked_row(exam: Exam) -> Iterator[Part]:
    """A batch of a text padded on the left (on the right where it cannot be otherwise) and a row of padding alone: the
    text's logits must be numbers, those of the text beside a usual row, and so must gradients by them."""
    target = exam.target
    padded, logits = target.padded, target.logits
    assert padded is not None
    assert logits is not None
    short, width = sizes(exam)
    text = exam.text(1, short)
    side = "right" if limit(exam, "left") else "left"
    tokens, mask = batch([text, text], width, side, filler(exam))
    empty = mask.clone()
    empty[1] = False
    own = slice(0, short) if side == "right" else slice(-short, None)
    with torch.no_grad():
        usual = padded(tokens, mask)[:1, own]
        if not usual.isfinite().all():
            broken = bool(logits(text).isfinite().all())
            said = f"with padding on the {side}, the logits of a text are not numbers"
            yield Part("fail", said, where="row 0") if broken else Part("skip", "skipped: it gives no numbers at all")
            return
    gap = exam.same(lambda: padded(tokens, mask)[:1, own], lambda: padded(tokens, empty)[:1, own], first=usual)
    yield exam.judge(
        gap,
        held="a row of padding alone changes nothing for the row beside it",
        broken="a row of padding alone changes the logits of the row beside it",
        where=f"position {gap.index[1]}",
    )
    if not gap.ok:
        return
    slopes = by_weights(exam, padded, tokens, empty, own)
    bad = [name for name, slope in slopes.items() if not slope.isfinite().all()]
    if bad:
        message = "beside a row of padding alone, the gradients of a real row's loss are not finite"
        yield Part("fail", f"{message} ({len(bad)} of {len(slopes)})", len(bad), 0, bad[-1])
    elif slopes:
        yield Part("pass", "gradients beside a row of padding alone are finite")
    elif not padded(tokens, empty)[1].isfinite().all():
        yield Part("warn", "a row of padding alone gives NaN, which a backward pass would carry on", where="row 1")


def by_weights(exam: Exam, padded: Padded, tokens: Tensor, mask: Tensor, own: slice) -> dict[str, Tensor]:
    """The gradients of the first row's logits by the vectors of all rows and by small weights; none where there are
    none."""
    module = exam.target.module
    try:
        with torch.enable_grad(), moved(module, lambda each: padded(each, mask), tokens) as added:
            out = padded(tokens, mask)
    except CannotError:
        return {}
    if module is None or not out.requires_grad or not added:
        return {}
    small = {name: each for name, each in module.named_parameters() if each.requires_grad and each.numel() <= MOST}
    asked: dict[str, Tensor] = {"the text's vectors": added[0], **small}
    slopes = torch.autograd.grad(out[:1, own].float().logsumexp(-1).sum(), list(asked.values()), allow_unused=True)
    return {name: slope for name, slope in zip(asked, slopes, strict=True) if slope is not None}


def padded_rows(exam: Exam, side: str) -> Iterator[Part]:
    """A batch of three lengths, each row beside itself alone; without and with gradients."""
    target = exam.target
    padded, logits = target.padded, target.logits
    assert padded is not None
    assert logits is not None
    with torch.no_grad():
        (rows, width), base = exam.once("ragged rows", lambda: with_own(exam, logits))
    tokens, mask = batch(rows, width, side, filler(exam))
    for path in ("", " with gradients"):

        def make(path: str = path) -> Tensor:
            with torch.set_grad_enabled(bool(path)):
                return real(padded(tokens, mask), mask).detach()

        gap = exam.same(lambda: alone(rows, logits), make, first=base)
        if not gap.ok:
            row, at = place_of(rows, gap.index[0])
            pads = width - rows[row].shape[1]
            reason = limit(exam, side)
            if reason:
                yield Part("skip", f"skipped: {reason}")
                return
            told = f"with {pads} padding tokens on the {side}{path}, the logits at position {at}"
            yield Part(
                "fail", f"{told} are not those of the text alone", gap.worst, gap.bound, f"row {row}, position {at}"
            )
            return
        yield Part("pass", f"padded on the {side}{path}, each row is as if alone", gap.worst, gap.bound)


def with_own(exam: Exam, logits: Callable[[Tensor], Tensor]) -> tuple[tuple[list[Tensor], int], Tensor]:
    """Rows of different lengths, and what each gives alone."""
    drawn = ragged(exam)
    return drawn, alone(drawn[0], logits)


def limit(exam: Exam, side: str) -> str | None:
    """Why a difference is no bug: a table of positions that counts padding, in a model that is padded on the right."""
    target = exam.target
    if side == "right" or target.counted or target.relative:
        return None
    if target.kind == "decoder" and target.counted is None:
        return None
    return "its positions count padding too and cannot be told, so that it is to be padded on the right"


@check(
    "left-padding",
    catches="a text that reads otherwise behind padding: positions that count padding, or padding that is seen",
    cause="positions are counted from the first slot instead of the first real token, or the mask is not applied",
    fix="number real tokens by mask.cumsum(-1) - 1, and hide padding from every query",
    needs=("logits", "padded"),
    after=(*NEARER, "masked-row"),
)
def left_padding(exam: Exam) -> Iterator[Part]:
    """Three texts of different lengths in one batch, padded on the left: each must give the logits it has alone."""
    yield from padded_rows(exam, "left")


@check(
    "right-padding",
    catches="a text that reads otherwise in front of padding: padding that is seen",
    cause="the mask is not applied, is applied to queries instead of keys, or one row's mask is used for all",
    fix="hide padding as keys, per row, on every path: mask[:, None, None, :]",
    needs=("logits", "padded"),
    after=(*NEARER, "masked-row"),
)
def right_padding(exam: Exam) -> Iterator[Part]:
    """Three texts of different lengths in one batch, padded on the right: each must give the logits it has alone."""
    yield from padded_rows(exam, "right")


@check(
    "pad-contents",
    catches="padding that is seen: what stands there changes the text's logits",
    cause="the padding mask is not applied in some layer, or something mixes positions beside attention",
    fix="hide padding from every query, and blank it where anything else mixes positions (convolutions, states, means)",
    needs=("logits", "padded"),
    after=(*NEARER, "masked-row"),
)
@torch.no_grad()
def pad_contents(exam: Exam) -> Iterator[Part]:
    """Put other tokens where the padding is, on either side: the logits of real tokens must stay."""
    padded, unplaced = exam.target.padded, exam.target.unplaced
    assert padded is not None
    rows, width = ragged(exam)
    for side, ask in (("right", padded), ("left", unplaced or padded)):
        if side == "left" and exam.target.pads_counted:
            yield Part("skip", "skipped: on the left, its positions are counted by the padding token")
            continue
        tokens, mask = batch(rows, width, side, filler(exam))
        other = torch.where(mask, tokens, exam.text(len(rows), width))
        gap = exam.same(lambda: real(ask(tokens, mask), mask), lambda: real(ask(other, mask), mask))
        row, at = place_of(rows, gap.index[0])
        yield exam.judge(
            gap,
            held=f"what stands in padding on the {side} changes nothing",
            broken=f"the logits at position {at} change with what stands in the padding on the {side}",
            where=f"row {row}, position {at}",
        )


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
    after=(*NEARER, "masked-row", "pad-contents", "left-padding", "right-padding"),
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
            lambda: padded(few, few_mask)[few_mask],
            lambda: padded(many, many_mask)[many_mask],
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
                lambda: balance(changed, told).reshape(1),
            )
            yield exam.judge(
                gap,
                held=f"the loss that balances experts does not depend on {what}",
                broken=f"the loss that balances experts changes with {what}",
            )
