"""Texts behind and before padding: each is as if alone, and padding costs nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cutaway.check.context import CheckContext
from cutaway.check.probes.embedding_gradients import add_embedding_offset
from cutaway.check.probes.padded_batch import (
    choose_lengths,
    choose_pad_token,
    forward_rows_alone,
    locate_token,
    pad_rows,
    random_ragged_rows,
    select_real_tokens,
)
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

MaskedForward = Callable[[Tensor, Tensor], Tensor]
MAX_GRADIENT_NUMEL = 1 << 16
"""Numbers of a weight whose gradient is looked at."""
MAX_EXTRA_PADDING = 48
"""Padding tokens that are more than a text, all of one kind."""
ROUTING_FUNCTIONS = {
    torch.topk,
    Tensor.topk,
    torch.argmax,
    Tensor.argmax,
    torch.sort,
    Tensor.sort,
    torch.argsort,
    Tensor.argsort,
}
PREREQUISITES = ("causality", "batch-isolation", "batch-invariance", "mask-polarity", "mask-diagonal")
"""What would show in every padded batch."""


@register_check(
    "fully-masked-row",
    catches="NaN from a row in which all is masked, which the backward pass carries into every weight",
    cause="softmax over nothing but -inf is 0/0; what it gives is thrown away, but its gradient is not",
    fix="give queries that see nothing a key to look at and blank the result, or use a kernel that gives them zeros",
    needs=("logits", "logits_with_mask"),
    depends_on=PREREQUISITES,
)
def fully_masked_row(context: CheckContext) -> Iterator[CaseResult]:
    """A batch of a text padded on the left (on the right where it cannot be otherwise) and a row of padding alone: the
    text's logits must be numbers, those of the text beside a usual row, and so must gradients by them."""
    target = context.model
    padded, logits = target.logits_with_mask, target.logits
    assert padded is not None
    assert logits is not None
    short, width = choose_lengths(context)
    text = context.random_tokens(1, short)
    side = "right" if _unsupported_side_reason(context, "left") else "left"
    tokens, mask = pad_rows([text, text], width, side, choose_pad_token(context))
    empty = mask.clone()
    empty[1] = False
    own = slice(0, short) if side == "right" else slice(-short, None)
    with torch.no_grad():
        usual = padded(tokens, mask)[:1, own]
        if not usual.isfinite().all():
            broken = bool(logits(text).isfinite().all())
            said = f"with padding on the {side}, the logits of a text are not numbers"
            yield (
                CaseResult("fail", said, location="row 0")
                if broken
                else CaseResult("skip", "skipped: it gives no numbers at all")
            )
            return
    gap = context.compare(
        lambda: padded(tokens, mask)[:1, own], lambda: padded(tokens, empty)[:1, own], first_result=usual
    )
    yield context.expect_equal(
        gap,
        passed="a row of padding alone changes nothing for the row beside it",
        failed="a row of padding alone changes the logits of the row beside it",
        location=f"position {gap.index[1]}",
    )
    if not gap.within_tolerance:
        return
    slopes = _row_gradients(context, padded, tokens, empty, own)
    bad = [name for name, slope in slopes.items() if not slope.isfinite().all()]
    if bad:
        message = "beside a row of padding alone, the gradients of a real row's loss are not finite"
        yield CaseResult("fail", f"{message} ({len(bad)} of {len(slopes)})", len(bad), 0, bad[-1])
    elif slopes:
        yield CaseResult("pass", "gradients beside a row of padding alone are finite")
    elif not padded(tokens, empty)[1].isfinite().all():
        yield CaseResult(
            "warn", "a row of padding alone gives NaN, which a backward pass would carry on", location="row 1"
        )


def _row_gradients(
    context: CheckContext, forward: MaskedForward, tokens: Tensor, mask: Tensor, real_positions: slice
) -> dict[str, Tensor]:
    """The gradients of the first row's logits by the vectors of all rows and by small weights; none where there are
    none."""
    module = context.model.module
    try:
        with torch.enable_grad(), add_embedding_offset(module, lambda each: forward(each, mask), tokens) as added:
            out = forward(tokens, mask)
    except SkipCheckError:
        return {}
    if module is None or not out.requires_grad or not added:
        return {}
    small = {
        name: each
        for name, each in module.named_parameters()
        if each.requires_grad and each.numel() <= MAX_GRADIENT_NUMEL
    }
    asked: dict[str, Tensor] = {"the text's vectors": added[0], **small}
    slopes = torch.autograd.grad(
        out[:1, real_positions].float().logsumexp(-1).sum(), list(asked.values()), allow_unused=True
    )
    return {name: slope for name, slope in zip(asked, slopes, strict=True) if slope is not None}


def _check_padded_rows(context: CheckContext, side: str) -> Iterator[CaseResult]:
    """A batch of three lengths, each row beside itself alone; without and with gradients."""
    target = context.model
    padded, logits = target.logits_with_mask, target.logits
    assert padded is not None
    assert logits is not None
    with torch.no_grad():
        (rows, width), base = context.compute_once("ragged rows", lambda: _ragged_rows_with_logits(context, logits))
    tokens, mask = pad_rows(rows, width, side, choose_pad_token(context))
    for path in ("", " with gradients"):

        def make(path: str = path) -> Tensor:
            with torch.set_grad_enabled(bool(path)):
                return select_real_tokens(padded(tokens, mask), mask).detach()

        gap = context.compare(lambda: forward_rows_alone(rows, logits), make, first_result=base)
        if not gap.within_tolerance:
            row, at = locate_token(rows, gap.index[0])
            pads = width - rows[row].shape[1]
            reason = _unsupported_side_reason(context, side)
            if reason:
                yield CaseResult("skip", f"skipped: {reason}")
                return
            told = f"with {pads} padding tokens on the {side}{path}, the logits at position {at}"
            yield CaseResult(
                "fail",
                f"{told} are not those of the text alone",
                gap.max_abs,
                gap.tolerance,
                f"row {row}, position {at}",
            )
            return
        yield CaseResult("pass", f"padded on the {side}{path}, each row is as if alone", gap.max_abs, gap.tolerance)


def _ragged_rows_with_logits(
    context: CheckContext, forward: Callable[[Tensor], Tensor]
) -> tuple[tuple[list[Tensor], int], Tensor]:
    """Rows of different lengths, and what each gives alone."""
    drawn = random_ragged_rows(context)
    return drawn, forward_rows_alone(drawn[0], forward)


def _unsupported_side_reason(context: CheckContext, side: str) -> str | None:
    """Why a difference is no bug: a table of positions that counts padding, in a model that is padded on the right."""
    target = context.model
    if side == "right" or target.positions_skip_padding or target.relative_positions:
        return None
    if target.kind == "decoder" and target.positions_skip_padding is None:
        return None
    return "its positions count padding too and cannot be told, so that it is to be padded on the right"


@register_check(
    "left-padding",
    catches="a text that reads otherwise behind padding: positions that count padding, or padding that is seen",
    cause="positions are counted from the first slot instead of the first real token, or the mask is not applied",
    fix="number real tokens by mask.cumsum(-1) - 1, and hide padding from every query",
    needs=("logits", "logits_with_mask"),
    depends_on=(*PREREQUISITES, "fully-masked-row"),
)
def left_padding(context: CheckContext) -> Iterator[CaseResult]:
    """Three texts of different lengths in one batch, padded on the left: each must give the logits it has alone."""
    yield from _check_padded_rows(context, "left")


@register_check(
    "right-padding",
    catches="a text that reads otherwise in front of padding: padding that is seen",
    cause="the mask is not applied, is applied to queries instead of keys, or one row's mask is used for all",
    fix="hide padding as keys, per row, on every path: mask[:, None, None, :]",
    needs=("logits", "logits_with_mask"),
    depends_on=(*PREREQUISITES, "fully-masked-row"),
)
def right_padding(context: CheckContext) -> Iterator[CaseResult]:
    """Three texts of different lengths in one batch, padded on the right: each must give the logits it has alone."""
    yield from _check_padded_rows(context, "right")


@register_check(
    "padding-leak",
    catches="padding that is seen: what stands there changes the text's logits",
    cause="the padding mask is not applied in some layer, or something mixes positions beside attention",
    fix="hide padding from every query, and blank it where anything else mixes positions (convolutions, states, means)",
    needs=("logits", "logits_with_mask"),
    depends_on=(*PREREQUISITES, "fully-masked-row"),
)
@torch.no_grad()
def padding_leak(context: CheckContext) -> Iterator[CaseResult]:
    """Put other tokens where the padding is, on either side: the logits of real tokens must stay."""
    padded, unplaced = context.model.logits_with_mask, context.model.logits_with_mask_only
    assert padded is not None
    rows, width = random_ragged_rows(context)
    for side, ask in (("right", padded), ("left", unplaced or padded)):
        if side == "left" and context.model.positions_from_pad_token:
            yield CaseResult("skip", "skipped: on the left, its positions are counted by the padding token")
            continue
        tokens, mask = pad_rows(rows, width, side, choose_pad_token(context))
        other = torch.where(mask, tokens, context.random_tokens(len(rows), width))
        gap = context.compare(
            lambda: select_real_tokens(ask(tokens, mask), mask), lambda: select_real_tokens(ask(other, mask), mask)
        )
        row, at = locate_token(rows, gap.index[0])
        yield context.expect_equal(
            gap,
            passed=f"what stands in padding on the {side} changes nothing",
            failed=f"the logits at position {at} change with what stands in the padding on the {side}",
            location=f"row {row}, position {at}",
        )


class RoutingTracer(TorchFunctionMode):
    """While it is on, it is counted how often something is chosen by its size, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += func in ROUTING_FUNCTIONS
        return func(*args, **(kwargs or {}))


@register_check(
    "moe-padding",
    catches="padding that is routed: it takes the room of experts, or counts in the loss that balances them",
    cause="the router and its loss are given all tokens of a batch, padding too",
    fix="hand the padding mask to the router: padding takes no slot of an expert and no part in the balance",
    needs=("logits", "logits_with_mask"),
    depends_on=(*PREREQUISITES, "fully-masked-row", "padding-leak", "left-padding", "right-padding"),
)
@torch.no_grad()
def moe_padding(context: CheckContext) -> Iterator[CaseResult]:
    """Where tokens are routed: a text beside many padding tokens that are all like one of its own must give what it
    gives beside few, and the loss that balances experts must not depend on padding."""
    target = context.model
    padded, logits = target.logits_with_mask, target.logits
    assert padded is not None
    assert logits is not None
    short, width = choose_lengths(context)
    text = context.random_tokens(1, short)
    with RoutingTracer() as choosing:
        logits(text)
    if target.load_balancing_loss is None and not choosing.num_calls:
        raise SkipCheckError("needs a mixture of experts, and no choice of one was seen")
    room = min(MAX_EXTRA_PADDING, (target.max_seq_len or MAX_EXTRA_PADDING + width) - short)
    sides = (
        ["right"]
        if target.kind != "decoder" and not target.positions_skip_padding and not target.relative_positions
        else ["left", "right"]
    )
    for side in sides:
        few, few_mask = pad_rows([text, text], short + 1, side, int(text[0, -1]))
        many, many_mask = pad_rows([text, text], short + room, side, int(text[0, -1]))
        if target.positions_from_pad_token and side == "left":
            continue
        gap = context.compare(
            lambda: padded(few, few_mask)[few_mask],
            lambda: padded(many, many_mask)[many_mask],
        )
        yield context.expect_equal(
            gap,
            passed=f"{room} padding tokens on the {side} change no route",
            failed=f"with {room} padding tokens on the {side} in place of one, a text is routed otherwise",
            location=f"position {gap.index[0] % short}",
        )
    if target.load_balancing_loss is not None:
        balance = target.load_balancing_loss
        tokens, mask = pad_rows([text, context.random_tokens(1, short - 1)], width, "right", choose_pad_token(context))
        other = torch.where(mask, tokens, context.random_tokens(2, width))
        for what, changed, told in (
            ("what stands in padding", other, mask),
            (
                "more padding",
                *pad_rows([tokens[:1, :short], tokens[1:, : short - 1]], width + 1, "right", choose_pad_token(context)),
            ),
        ):
            if changed.shape[1] > (target.max_seq_len or 1 << 30):
                continue
            gap = context.compare(
                lambda: balance(tokens, mask).reshape(1),
                lambda: balance(changed, told).reshape(1),
            )
            yield context.expect_equal(
                gap,
                passed=f"the loss that balances experts does not depend on {what}",
                failed=f"the loss that balances experts changes with {what}",
            )
