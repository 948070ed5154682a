"""What is padding is not seen, and what is no padding is."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cutaway.check.exam import CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.padding import alone, batch, filler, place_of, ragged, real, sizes
from cutaway.check.registry import CAUSAL, check
from cutaway.check.vectors import moved, tables

Padded = Callable[[Tensor, Tensor], Tensor]
HIDDEN = 1 - 1e-4
"""A share of attention from which on nothing else is seen."""
MOST = 1 << 16
"""Numbers of a weight whose gradient is looked at."""


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
    logits, tokens = exam.target.logits, exam.text(1, min(8, exam.length))
    assert logits is not None
    base, length = logits(tokens), tokens.shape[1]
    blind: dict[str, list[int]] = {"later": [], "earlier": []}
    asked = 0
    for at in range(length):
        other = exam.changed(tokens, slice(at, at + 1))
        out = logits(other)
        for side, reader in (("later", at - 1), ("earlier", at + 1)):
            if 0 <= reader < length:
                asked += 1
                mine = exam.same(lambda r=reader: logits(tokens)[:, r], lambda r=reader, o=out: o[:, r], first=base[:, reader])  # type: ignore[misc]  # fmt: skip
                if mine.ok:
                    blind[side].append(reader)
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
    if exam.same(lambda: logits(text)[:, -1], lambda: logits(other)[:, -1]).ok:
        raise CannotError("its last token does not depend on those before it, with or without a mask")
    out = padded(tokens, mask)[:, -1]
    if not out.isfinite().all() and logits(text)[:, -1].isfinite().all():
        yield Part("fail", "with padding on the left, the last token of the text gives no number", where="position -1")
        return
    gap = exam.same(lambda: padded(tokens, mask)[:, -1], lambda: padded(others, mask)[:, -1], first=out)
    yield exam.judge_alive(
        gap,
        held="behind padding, the last token sees those of the text before it",
        broken="behind padding, the last token does not see those of the text before it: the mask hides what is real",
    )
    for each in watched(exam, tokens, mask):
        if each.pattern.shape[-2:] == (width, width) and each.axis == -1:
            pads = each.pattern[..., -1, : width - short].float().sum(-1)
            if bool((pads > HIDDEN).all()):
                message = "the attention of the last real token lies on padding alone"
                yield Part("fail", message, float(pads.min()), HIDDEN, each.module or None)
                return


def watched(exam: Exam, tokens: Tensor, mask: Tensor) -> list:  # type: ignore[type-arg]
    """Every attention of a padded pass."""
    from cutaway.check.witness import Witness

    with Witness(exam.target.module) as witness:
        exam.target.padded(tokens, mask)  # type: ignore[misc]
    return witness.attentions


@check(
    "self-visible",
    catches="a token that cannot attend to itself: the mask cuts out the diagonal too",
    cause="the triangle begins one place too early (j < i in place of j <= i)",
    fix="hide key j from query i where j > i, and leave j = i: torch.triu(…, diagonal=1)",
    kinds=CAUSAL,
    after=("causality",),
)
@torch.no_grad()
def self_visible(exam: Exam) -> Iterator[Part]:
    """Look at each attention's pattern: a token's weight on itself may not be zero in all heads at all positions. And
    a text of one token, which can see only itself, must give numbers."""
    logits, tokens = exam.target.logits, exam.text(1, min(8, exam.length))
    assert logits is not None
    if not logits(tokens[:, :1]).isfinite().all() and logits(tokens)[:, -1].isfinite().all():
        yield Part("fail", "a text of one token gives no number, as if it saw nothing at all", where="position 0")
        return
    seen, length = 0, tokens.shape[1]
    for each in exam.attentions(tokens):
        if each.pattern.shape[-2:] != (length, length) or each.axis != -1:
            continue
        seen += 1
        own = each.pattern.float().diagonal(dim1=-2, dim2=-1)[..., 1:]  # the first, blind, may look anywhere
        if own.numel() and not bool((own > 0).any()):
            message = "no token attends to itself: the weight is 0 in every head, at every position"
            yield Part("fail", message, 0.0, 0.0, each.module or None)
            return
    if not seen:
        raise CannotError("needs attention by PyTorch's softmax or scaled_dot_product_attention, which was not seen")
    yield Part("pass", f"tokens attend to themselves, in {seen} attentions")


def padded_rows(exam: Exam, side: str) -> Iterator[Part]:
    """A batch of three lengths, each row beside itself alone; without and with gradients."""
    target = exam.target
    padded, logits = target.padded, target.logits
    assert padded is not None
    assert logits is not None
    rows, width = ragged(exam)
    tokens, mask = batch(rows, width, side, filler(exam))
    with torch.no_grad():
        base = alone(rows, logits)
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
            message = (
                f"with {pads} padding tokens on the {side}, the logits at position {at} are not those of the text alone"  # noqa: E501
            )
            yield Part("fail", message + path, gap.worst, gap.bound, f"row {row}, position {at}")
            return
        yield Part("pass", f"padded on the {side}{path}, each row is as if alone", gap.worst, gap.bound)


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
    after=("causality", "mask-polarity"),
)
def left_padding(exam: Exam) -> Iterator[Part]:
    """Three texts of different lengths in one batch, padded on the left: each must give the logits that it has alone."""
    yield from padded_rows(exam, "left")


@check(
    "right-padding",
    catches="a text that reads otherwise in front of padding: padding that is seen",
    cause="the mask is not applied, is applied to queries instead of keys, or one row's mask is used for all",
    fix="hide padding as keys, per row, on every path: mask[:, None, None, :]",
    needs=("logits", "padded"),
    after=("causality", "mask-polarity"),
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
    after=("causality", "mask-polarity"),
)
@torch.no_grad()
def pad_contents(exam: Exam) -> Iterator[Part]:
    """Put other tokens where the padding is, on either side: the logits of real tokens must stay."""
    padded = exam.target.padded
    assert padded is not None
    rows, width = ragged(exam)
    for side in ("right", "left"):
        if side == "left" and exam.target.pads_counted:
            yield Part("skip", "skipped: on the left, its positions are counted by the padding token")
            continue
        tokens, mask = batch(rows, width, side, filler(exam))
        other = torch.where(mask, tokens, exam.text(len(rows), width))
        gap = exam.same(lambda: real(padded(tokens, mask), mask), lambda: real(padded(other, mask), mask))  # noqa: B023
        row, at = place_of(rows, gap.index[0])
        yield exam.judge(
            gap,
            held=f"what stands in padding on the {side} changes nothing",
            broken=f"the logits at position {at} change with what stands in the padding on the {side}",
            where=f"row {row}, position {at}",
        )


def source_text(exam: Exam, rows: int, length: int) -> Tensor:
    """Random source tokens."""
    size = exam.target.source_vocab or exam.target.vocab
    kept = exam.allowed[exam.allowed < (size or 1)]
    kept = kept if len(kept) > 1 else torch.arange(size or 1)
    return kept[torch.randint(len(kept), (rows, length), generator=exam.generator)].to(exam.target.device)


@check(
    "source-padding",
    catches="cross-attention or an encoder that reads the padding of the source",
    cause="the source's mask is not handed to the encoder or to cross-attention",
    fix="hide padding of the source in the encoder and in every cross-attention, in training and while writing",
    needs=("crossed",),
    kinds=("encoder-decoder",),
    after=("causality",),
)
@torch.no_grad()
def source_padding(exam: Exam) -> Iterator[Part]:
    """Sources of two lengths in one batch: the shorter must give what it gives alone, whatever stands in its padding."""
    crossed = exam.target.crossed
    assert crossed is not None
    short, width = sizes(exam)
    rows = [source_text(exam, 1, n) for n in (width, short)]
    text = exam.text(2, min(6, exam.length))
    source, mask = batch(rows, width, "right", filler(exam))
    single = lambda: torch.cat([crossed(row, None, text[n : n + 1]) for n, row in enumerate(rows)])  # noqa: E731
    gap = exam.same(single, lambda: crossed(source, mask, text))
    yield exam.judge(
        gap,
        held="a padded source gives what it gives alone",
        broken=f"with {width - short} padding tokens in the source, the logits are not those of the source alone",
        where=f"row {gap.index[0]}, position {gap.index[1]}",
    )
    other = torch.where(mask, source, source_text(exam, 2, width))
    gap = exam.same(lambda: crossed(source, mask, text), lambda: crossed(other, mask, text))
    yield exam.judge(
        gap,
        held="what stands in the source's padding changes nothing",
        broken="the logits change with what stands in the source's padding",
    )


@check(
    "source-used",
    catches="a decoder that does not read its source, or not all of it",
    cause="cross-attention is missing, is given something else than the encoder's output, or hides a part of it",
    fix="give every decoder layer a cross-attention over all of the encoder's output",
    needs=("crossed",),
    kinds=("encoder-decoder",),
)
@torch.no_grad()
def source_used(exam: Exam) -> Iterator[Part]:
    """Change the whole source, then its first and its last token: the logits at every position must change."""
    crossed = exam.target.crossed
    assert crossed is not None
    length = min(8, exam.length)
    source, text = source_text(exam, 1, length), exam.text(1, min(6, exam.length))
    base = crossed(source, None, text)
    for what, place in (
        ("the source", slice(None)),
        ("its first token", slice(0, 1)),
        ("its last token", slice(-1, None)),
    ):
        other = source.clone()
        for _ in range(20):
            other[:, place] = source_text(exam, 1, length)[:, place]
            if bool((other != source)[:, place].any()):
                break
        out = crossed(other, None, text)
        for at in range(text.shape[1]) if what == "the source" else (text.shape[1] - 1,):
            gap = exam.same(lambda a=at: crossed(source, None, text)[:, a], lambda a=at, o=out: o[:, a], first=base[:, at])  # type: ignore[misc]  # fmt: skip
            broken = f"the logits at position {at} do not change with {what}"
            part = exam.judge_alive(gap, held=f"the logits change with {what}", broken=broken, where=f"position {at}")
            if part.verdict == "fail":
                yield part
                return
        yield part


def reachable(exam: Exam, padded: Padded, tokens: Tensor, mask: Tensor) -> bool:
    """Whether there is an embedding that is given the tokens."""
    assert exam.target.module is not None
    return bool(tables(exam.target.module, lambda each: padded(each, mask), tokens))


@check(
    "masked-row",
    catches="NaN from a row in which all is masked, which the backward pass carries into every weight",
    cause="softmax over nothing but -inf is 0/0; what it gives is thrown away, but its gradient is not",
    fix="give queries that see nothing a key to look at and blank the result, or use a kernel that gives them zeros",
    needs=("logits", "padded"),
    after=("causality", "mask-polarity"),
)
def masked_row(exam: Exam) -> Iterator[Part]:
    """A batch of a text padded on the left and a row of padding alone: the text's logits must be numbers, those of the
    text beside a usual row, and so must gradients by them."""
    target = exam.target
    padded = target.padded
    assert padded is not None
    short, width = sizes(exam)
    text = exam.text(1, short)
    tokens, mask = batch([text, text], width, "left", filler(exam))
    empty = mask.clone()
    empty[1] = False
    with torch.no_grad():
        usual, out = padded(tokens, mask), padded(tokens, empty)
    gap = exam.same(lambda: padded(tokens, mask)[:1, -short:], lambda: padded(tokens, empty)[:1, -short:])
    yield exam.judge(
        gap,
        held="a row of padding alone changes nothing for the row beside it",
        broken="a row of padding alone changes the logits of the row beside it",
        where=f"position {gap.index[1]}",
    )
    if not usual[:, -short:].isfinite().all() or not gap.ok:
        return
    if target.module is not None and reachable(exam, padded, tokens, empty):
        with torch.enable_grad(), moved(target.module, lambda each: padded(each, empty), tokens) as added:
            logits = padded(tokens, empty)
            if logits.requires_grad and added:
                named = [(name, each) for name, each in target.module.named_parameters()
                         if each.requires_grad and each.numel() <= MOST]  # fmt: skip
                loss = logits[:1, -short:].float().logsumexp(-1).sum()
                slopes = torch.autograd.grad(loss, [added[0], *(each for _, each in named)], allow_unused=True)
                names = ["the text's vectors", *(name for name, _ in named)]
                bad = [name for name, slope in zip(names, slopes, strict=True)
                       if slope is not None and not slope.isfinite().all()]  # fmt: skip
                if bad:
                    message = "beside a row of padding alone, the gradients of a real row's loss are not finite"
                    yield Part("fail", f"{message} ({len(bad)} of {len(names)})", len(bad), 0, bad[-1])
                    return
                yield Part("pass", "gradients beside a row of padding alone are finite")
                return
    if not out[1].isfinite().all():
        yield Part("warn", "a row of padding alone gives NaN, which a backward pass would carry on", where="row 1")
