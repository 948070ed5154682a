"""Cross-attention checks: cross-attention-source, cross-attention-padding."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext
from cutaway.check.probes.op_tracer import OpTracer
from cutaway.check.probes.padded_batch import choose_lengths, masked_positions, pad_rows
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, failure, skipped, success

_LONG_SOURCE_LEN = 40
"""Length of a source that is longer than the one of the other cases."""


def _random_source_tokens(ctx: CheckContext, batch_size: int, seq_len: int) -> Tensor:
    """Draw random source token ids (B, T), without special tokens."""
    size = ctx.model.source_vocab_size or ctx.model.vocab_size
    allowed = ctx.allowed_tokens[ctx.allowed_tokens < (size or 1)]
    allowed = allowed if len(allowed) > 1 else torch.arange(size or 1)
    index = torch.randint(len(allowed), (batch_size, seq_len), generator=ctx.generator)
    return allowed[index].to(ctx.model.device)


@register_check("cross-attention-source", needs=("logits_with_source",), kinds=("encoder-decoder",))
def cross_attention_source(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a decoder that ignores its source, or a part of it.

    Replace the whole source, then its first and its last token, and the last token of a longer source: the logits must
    change. No cross-attention may mask a token of a source without padding. In a batch of two sources, each row must
    give the same logits as alone.

    Cause: cross-attention is missing, masks a part of the encoder output, or gets that of an earlier source or row.
    Fix: add cross-attention over the full encoder output of its own source to every decoder layer.
    """
    logits_with_source = require(ctx.model.logits_with_source)
    length = min(8, ctx.seq_len)
    source, tokens = _random_source_tokens(ctx, 1, length), ctx.random_tokens(1, max(1, length - 2))
    last = tokens.shape[1] - 1
    with OpTracer(ctx.model.module) as tracer:
        base = logits_with_source(source, None, tokens)
    replacements = {
        "the source": slice(None),
        "the first source token": slice(0, 1),
        "the last source token": slice(-1, None),
    }
    for name, positions in replacements.items():
        other = source.clone()
        for _ in range(20):
            other[:, positions] = _random_source_tokens(ctx, 1, length)[:, positions]
            if bool((other != source)[:, positions].any()):
                break
        out = logits_with_source(other, None, tokens)
        for position in range(tokens.shape[1]) if name == "the source" else (last,):
            diff = ctx.compare_expecting_difference(
                lambda: logits_with_source(source, None, tokens)[:, position],
                lambda: out[:, position],
                first_result=base[:, position],
            )
            if diff.within_tolerance:
                message = f"the logits at position {position} do not change with {name}"
                yield diff.failure(message, f"position {position}")
                return
        yield diff.success(f"the logits change with {name}")
    yield _check_source_of_each_row(ctx, length)
    yield from _check_long_source(ctx, tokens)
    query_lengths = {call.pattern.shape[-2] for call in tracer.attentions}
    for index, call in enumerate(tracer.attentions):
        num_queries, num_keys = call.pattern.shape[-2:]
        is_truncated = num_queries == last + 1 and num_keys < num_queries
        is_truncated = is_truncated and length in query_lengths and num_keys not in query_lengths
        if is_truncated and not _is_self_attention(ctx, source, tokens, index, num_keys):
            message = f"cross-attention attends to {num_keys} of the {length} source tokens"
            yield failure(message, num_keys, length, call.module or None)
            return
        if (num_queries, num_keys) != (last + 1, length) or call.softmax_dim != -1:
            continue
        masked = masked_positions(call)[0].any(0)
        if bool(masked.any()) and not _is_self_attention(ctx, source, tokens, index, num_keys):
            position, key = divmod(int(masked.flatten().long().argmax()), length)
            message = f"cross-attention at position {position} masks source token {key}, though there is no padding"
            yield failure(message, float(masked.float().mean()), 0.0, call.module or None)
            return
        yield success("cross-attention attends to the full source")


def _check_source_of_each_row(ctx: CheckContext, length: int) -> CaseResult:
    """Check that the rows of a batch with different sources give the same logits as alone."""
    logits_with_source = require(ctx.model.logits_with_source)
    source, tokens = _random_source_tokens(ctx, 2, length), ctx.random_tokens(2, max(1, length - 2))

    def alone() -> Tensor:
        return torch.cat([logits_with_source(source[n : n + 1], None, tokens[n : n + 1]) for n in range(2)])

    diff = ctx.compare(alone, lambda: logits_with_source(source, None, tokens))
    return diff.expect_equal(
        passed="two sources in a batch give the same logits as alone",
        failed="two sources in a batch give other logits than alone",
        location=f"row {diff.index[0]}, position {diff.index[1]}",
    )


def _check_long_source(ctx: CheckContext, tokens: Tensor) -> Iterator[CaseResult]:
    """Replace the last token of a long source: the logits of the last position of `tokens` must change."""
    logits_with_source = require(ctx.model.logits_with_source)
    length = min(_LONG_SOURCE_LEN, ctx.model.max_seq_len or _LONG_SOURCE_LEN)
    source = _random_source_tokens(ctx, 1, length)
    other = source.clone()
    for _ in range(20):
        other[:, -1:] = _random_source_tokens(ctx, 1, 1)
        if bool((other != source).any()):
            break
    try:
        with OpTracer(ctx.model.module) as tracer:
            base = logits_with_source(source, None, tokens)[:, -1]
    except (RuntimeError, IndexError, ValueError) as error:
        yield skipped(f"a source of {length} tokens is not supported: {str(error)[:100]}")
        return
    diff = ctx.compare_expecting_difference(
        lambda: logits_with_source(source, None, tokens)[:, -1],
        lambda: logits_with_source(other, None, tokens)[:, -1],
        first_result=base,
    )
    if diff.within_tolerance:
        yield diff.failure(f"the logits do not change with the last of {length} source tokens", f"token {length - 1}")
        return
    query_lengths = {call.pattern.shape[-2] for call in tracer.attentions}
    for index, call in enumerate(tracer.attentions):
        num_queries, num_keys = call.pattern.shape[-2:]
        is_truncated = num_queries == tokens.shape[1] and num_keys < length and num_keys - 1 not in query_lengths
        is_truncated = is_truncated and length in query_lengths and num_keys not in query_lengths
        if is_truncated and not _is_self_attention(ctx, source, tokens, index, num_keys):
            message = f"cross-attention attends to {num_keys} of the {length} source tokens"
            yield failure(message, num_keys, length, call.module or None)
            return
    yield diff.success(f"the logits change with the last of {length} source tokens")


def _is_self_attention(ctx: CheckContext, source: Tensor, tokens: Tensor, index: int, num_keys: int) -> bool:
    """Whether an attention call has fewer keys for fewer decoder tokens, as self-attention with memory keys has."""
    if tokens.shape[1] < 2:
        return False
    with OpTracer(ctx.model.module) as tracer:
        require(ctx.model.logits_with_source)(source, None, tokens[:, :-1])
    return index < len(tracer.attentions) and tracer.attentions[index].pattern.shape[-1] < num_keys


@register_check(
    "cross-attention-padding",
    needs=("logits_with_source",),
    kinds=("encoder-decoder",),
    depends_on=("causality", "cross-attention-source"),
)
def cross_attention_padding(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches cross-attention or an encoder that attends to the padding of the source.

    Run sources of two lengths in one batch: the shorter must give the same logits as alone, whatever its padding.

    Cause: the source mask is not passed to the encoder or to cross-attention.
    Fix: mask source padding in the encoder and in every cross-attention, in training and in generation.
    """
    logits_with_source = require(ctx.model.logits_with_source)
    short_len, seq_len = choose_lengths(ctx)
    rows = [_random_source_tokens(ctx, 1, length) for length in (seq_len, short_len)]
    tokens = ctx.random_tokens(2, min(6, ctx.seq_len))
    source, mask = pad_rows(ctx, rows, seq_len, "right")

    def alone() -> Tensor:
        return torch.cat([logits_with_source(row, None, tokens[n : n + 1]) for n, row in enumerate(rows)])

    diff = ctx.compare(alone, lambda: logits_with_source(source, mask, tokens))
    yield diff.expect_equal(
        passed="a padded source gives the same logits as alone",
        failed=f"with {seq_len - short_len} padding tokens in the source, the logits differ from those of the source "
        "alone",
        location=f"row {diff.index[0]}, position {diff.index[1]}",
    )
    other = torch.where(mask, source, _random_source_tokens(ctx, 2, seq_len))
    diff = ctx.compare(
        lambda: logits_with_source(source, mask, tokens), lambda: logits_with_source(other, mask, tokens)
    )
    yield diff.expect_equal(
        passed="the tokens in source padding do not change the logits",
        failed="the logits change with the tokens in source padding",
    )
