"""An encoder-decoder reads its source: all of it, and nothing of its padding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.exam import Exam
from cutaway.check.finding import Part
from cutaway.check.padding import batch, filler, masked_out, moves, sizes
from cutaway.check.registry import check
from cutaway.check.witness import Witness


def source_text(exam: Exam, rows: int, length: int) -> Tensor:
    """Random source tokens."""
    size = exam.target.source_vocab or exam.target.vocab
    kept = exam.allowed[exam.allowed < (size or 1)]
    kept = kept if len(kept) > 1 else torch.arange(size or 1)
    return kept[torch.randint(len(kept), (rows, length), generator=exam.generator)].to(exam.target.device)


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
    """Change the whole source, then its first and its last token: the logits at every position must change. And no
    cross-attention may hide a token of a source without padding."""
    crossed = exam.target.crossed
    assert crossed is not None
    length = min(8, exam.length)
    source, text = source_text(exam, 1, length), exam.text(1, max(1, length - 2))
    last = text.shape[1] - 1
    with Witness(exam.target.module) as witness:
        base = crossed(source, None, text)
    places = {"the source": slice(None), "its first token": slice(0, 1), "its last token": slice(-1, None)}
    for what, place in places.items():
        other = source.clone()
        for _ in range(20):
            other[:, place] = source_text(exam, 1, length)[:, place]
            if bool((other != source)[:, place].any()):
                break
        out = crossed(other, None, text)
        for at in range(text.shape[1]) if what == "the source" else (last,):
            gap = moves(exam, lambda: crossed(source, None, text)[:, at], lambda: out[:, at], base[:, at])
            broken = f"the logits at position {at} do not change with {what}"
            part = exam.judge_alive(gap, held=f"the logits change with {what}", broken=broken, where=f"position {at}")
            if part.verdict == "fail":
                yield part
                return
        yield part
    readers = {each.pattern.shape[-2] for each in witness.attentions}
    for each in witness.attentions:
        asks, keys = each.pattern.shape[-2:]
        if asks == last + 1 and keys < asks and length in readers and keys not in readers:
            message = f"cross-attention reads {keys} of the {length} tokens of the source"
            yield Part("fail", message, keys, length, each.module or None)
            return
        if (asks, keys) != (last + 1, length) or each.axis != -1:
            continue
        hidden = masked_out(each)[0].any(0)
        if bool(hidden.any()):
            reader, unseen = divmod(int(hidden.flatten().long().argmax()), length)
            message = (
                f"cross-attention at position {reader} cannot see token {unseen} of the source, which has no padding"
            )
            yield Part("fail", message, float(hidden.float().mean()), 0.0, each.module or None)
            return
        yield Part("pass", "cross-attention sees all of the source")


@check(
    "source-padding",
    catches="cross-attention or an encoder that reads the padding of the source",
    cause="the source's mask is not handed to the encoder or to cross-attention",
    fix="hide padding of the source in the encoder and in every cross-attention, in training and while writing",
    needs=("crossed",),
    kinds=("encoder-decoder",),
    after=("causality", "source-used"),
)
@torch.no_grad()
def source_padding(exam: Exam) -> Iterator[Part]:
    """Sources of two lengths in one batch: the shorter must give what it gives alone, whatever its padding holds."""
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
