"""An encoder-decoder reads its source: all of it, and nothing of its padding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.probes.op_tracer import OpTracer
from cutaway.check.probes.padded_batch import (
    choose_lengths,
    choose_pad_token,
    compare_expecting_difference,
    masked_positions,
    pad_rows,
)
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult


def _random_source_tokens(context: CheckContext, batch_size: int, seq_len: int) -> Tensor:
    """Random source tokens."""
    size = context.model.source_vocab_size or context.model.vocab_size
    kept = context.allowed_tokens[context.allowed_tokens < (size or 1)]
    kept = kept if len(kept) > 1 else torch.arange(size or 1)
    return kept[torch.randint(len(kept), (batch_size, seq_len), generator=context.generator)].to(context.model.device)


@register_check(
    "cross-attention-source",
    catches="a decoder that does not read its source, or not all of it",
    cause="cross-attention is missing, is given something else than the encoder's output, or hides a part of it",
    fix="give every decoder layer a cross-attention over all of the encoder's output",
    needs=("logits_with_source",),
    kinds=("encoder-decoder",),
)
@torch.no_grad()
def cross_attention_source(context: CheckContext) -> Iterator[CaseResult]:
    """Change the whole source, then its first and its last token: the logits at every position must change. And no
    cross-attention may hide a token of a source without padding."""
    crossed = context.model.logits_with_source
    assert crossed is not None
    length = min(8, context.seq_len)
    source, text = _random_source_tokens(context, 1, length), context.random_tokens(1, max(1, length - 2))
    last = text.shape[1] - 1
    with OpTracer(context.model.module) as witness:
        base = crossed(source, None, text)
    places = {"the source": slice(None), "its first token": slice(0, 1), "its last token": slice(-1, None)}
    for what, place in places.items():
        other = source.clone()
        for _ in range(20):
            other[:, place] = _random_source_tokens(context, 1, length)[:, place]
            if bool((other != source)[:, place].any()):
                break
        out = crossed(other, None, text)
        for at in range(text.shape[1]) if what == "the source" else (last,):
            gap = compare_expecting_difference(
                context, lambda: crossed(source, None, text)[:, at], lambda: out[:, at], base[:, at]
            )
            broken = f"the logits at position {at} do not change with {what}"
            part = context.expect_different(
                gap, passed=f"the logits change with {what}", failed=broken, location=f"position {at}"
            )
            if part.verdict == "fail":
                yield part
                return
        yield part
    readers = {each.pattern.shape[-2] for each in witness.attentions}
    for each in witness.attentions:
        asks, keys = each.pattern.shape[-2:]
        if asks == last + 1 and keys < asks and length in readers and keys not in readers:
            message = f"cross-attention reads {keys} of the {length} tokens of the source"
            yield CaseResult("fail", message, keys, length, each.module or None)
            return
        if (asks, keys) != (last + 1, length) or each.softmax_dim != -1:
            continue
        hidden = masked_positions(each)[0].any(0)
        if bool(hidden.any()):
            reader, unseen = divmod(int(hidden.flatten().long().argmax()), length)
            message = (
                f"cross-attention at position {reader} cannot see token {unseen} of the source, which has no padding"
            )
            yield CaseResult("fail", message, float(hidden.float().mean()), 0.0, each.module or None)
            return
        yield CaseResult("pass", "cross-attention sees all of the source")


@register_check(
    "cross-attention-padding",
    catches="cross-attention or an encoder that reads the padding of the source",
    cause="the source's mask is not handed to the encoder or to cross-attention",
    fix="hide padding of the source in the encoder and in every cross-attention, in training and while writing",
    needs=("logits_with_source",),
    kinds=("encoder-decoder",),
    depends_on=("causality", "cross-attention-source"),
)
@torch.no_grad()
def cross_attention_padding(context: CheckContext) -> Iterator[CaseResult]:
    """Sources of two lengths in one batch: the shorter must give what it gives alone, whatever its padding holds."""
    crossed = context.model.logits_with_source
    assert crossed is not None
    short, width = choose_lengths(context)
    rows = [_random_source_tokens(context, 1, n) for n in (width, short)]
    text = context.random_tokens(2, min(6, context.seq_len))
    source, mask = pad_rows(rows, width, "right", choose_pad_token(context))
    single = lambda: torch.cat([crossed(row, None, text[n : n + 1]) for n, row in enumerate(rows)])  # noqa: E731
    gap = context.compare(single, lambda: crossed(source, mask, text))
    yield context.expect_equal(
        gap,
        passed="a padded source gives what it gives alone",
        failed=f"with {width - short} padding tokens in the source, the logits are not those of the source alone",
        location=f"row {gap.index[0]}, position {gap.index[1]}",
    )
    other = torch.where(mask, source, _random_source_tokens(context, 2, width))
    gap = context.compare(lambda: crossed(source, mask, text), lambda: crossed(other, mask, text))
    yield context.expect_equal(
        gap,
        passed="what stands in the source's padding changes nothing",
        failed="the logits change with what stands in the source's padding",
    )
