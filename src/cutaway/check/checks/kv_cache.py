"""KV cache checks: cache-decode, cache-chunked-prefill, cache-padding, cache-unused-slots, cache-sliding-window,
cache-reuse."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cutaway.check.checked_model import LogitsFunction, require
from cutaway.check.context import CheckContext
from cutaway.check.numerics import Difference
from cutaway.check.probes.cached_forward import (
    UNSUPPORTED_ERRORS,
    chunk_sizes,
    compare_in_chunks,
    first_position_beyond,
    forward_in_chunks,
    infer_wrong_position,
    locate_divergence,
)
from cutaway.check.probes.padded_batch import pad_rows, random_ragged_rows
from cutaway.check.registry import CAUSAL_KINDS, register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, skipped, success
from cutaway.errors import format_raised

_LONG_SEQ_LEN, _SHORT_SEQ_LEN = 34, 12
"""Length of a sequence that is longer than a tile of 32 tokens, and of one that is split at many positions."""
_LONG_PROMPT_LEN, _SLOW_PROMPT_LEN, _UNKNOWN_MAX_SEQ_LEN = 160, 68, 70
"""Longest sequence whose last tokens are decoded after a prompt: by default, for slow models, and for models whose
maximum length is unknown."""
_FIRST_TOKEN_CAUSE = (
    "the path with a cache differs for a single token: other kv heads for a query, visible empty slots, or another mask"
)
_LONG_PROMPT_CAUSE = (
    "the cache keeps a wrong number of tokens, ends before the maximum length, or the code depends on the length"
)
_LONG_PROMPT_FIX = "use the same masks and positions at every length; pass window= or max_seq_len= if there is a limit"
_FIRST_TOKEN_FIX = "compare q, k, v and the attention weights of the first token with and without the cache"
MAX_SECONDS = 3.0
"""Maximum estimated seconds of the check cache-sliding-window for one sequence."""
_LARGE_VALUE = 1e4
"""Value in unused slots. It is large enough to change the logits if a slot is visible, and unlike NaN it is 0 when
multiplied by a weight of 0."""


@register_check(
    "cache-decode",
    needs=("logits", "logits_with_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality-tile-edges", "causality", "moe-padding"),
    preflight=True,
)
def cache_decode(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches decoding with a cache that gives other logits: off by one, positions restarted, a layer not cached.

    Decode a sequence token by token, and token by token after a prefilled prompt, which is also a long one: the logits
    must equal those of one forward pass without a cache.

    Cause: positions do not continue from the cache length, or keys are stored twice or before RoPE.
    Fix: number new tokens from the cache length, store each key once, in the form that attention uses, and mask
    by positions.
    """
    max_len, no_prompt_len, num_decoded = (10, 5, 3) if ctx.is_slow else (_LONG_SEQ_LEN, 12, 6)
    sequence = ctx.random_tokens(2, min(max_len, ctx.model.max_seq_len or max_len))
    prompt_len = max(0, sequence.shape[1] - num_decoded)
    for path, first_chunk in (("token by token", 0), ("token by token after a prompt", prompt_len)):
        tokens = sequence if first_chunk else sequence[:, :no_prompt_len]
        sizes = chunk_sizes(tokens.shape[1], 1, first_chunk)
        diff, position, array = compare_in_chunks(ctx, tokens, sizes, ctx.base_logits(tokens))
        if not diff.within_tolerance:
            message = f"decoded {path}, the logits at position {position} differ from those of one forward pass"
            wrong_position = infer_wrong_position(ctx, tokens, sizes, position)
            if wrong_position is not None:
                message += f" and equal those at position {wrong_position}: positions do not continue from the cache"
            location = locate_divergence(ctx, tokens, sizes, position)
            causes = {"cause": _FIRST_TOKEN_CAUSE, "fix": _FIRST_TOKEN_FIX} if position == 0 else {}
            yield diff.failure(message, location, array=array, **causes)
            return
        yield diff.success(f"decoded {path}, the logits equal those of one forward pass", array)
    if not ctx.model.windows and ctx.model.window is None:  # cache-sliding-window runs texts longer than the window
        yield from _check_long_prompt(ctx, sequence.shape[1])


def _check_long_prompt(ctx: CheckContext, tested_len: int) -> Iterator[CaseResult]:
    """Decode the last tokens of a long sequence: caches with a limit, and code that depends on the length."""
    max_seq_len, num_decoded = ctx.model.max_seq_len, 1 if ctx.is_slow else 3
    length = min(max_seq_len or _UNKNOWN_MAX_SEQ_LEN, _SLOW_PROMPT_LEN if ctx.is_slow else _LONG_PROMPT_LEN)
    length = ctx.model.supported_length(length)
    if length <= tested_len + num_decoded:
        return
    tokens = ctx.random_tokens(1, length)
    sizes = chunk_sizes(length, 1, length - num_decoded)
    path = f"decoded after a prompt of {length - num_decoded} tokens"
    try:
        diff, position, _ = compare_in_chunks(ctx, tokens, sizes, ctx.logits(tokens))
    except Exception as error:
        if max_seq_len is not None and not isinstance(error, UNSUPPORTED_ERRORS):
            raise
        yield skipped(f"{path}, the model {format_raised(error)}")
        return
    if diff.within_tolerance:
        yield diff.success(f"{path}, the logits equal those of one forward pass")
        return
    message = f"{path}, the logits at position {position} differ from those of one forward pass"
    yield diff.failure(message, f"position {position}", cause=_LONG_PROMPT_CAUSE, fix=_LONG_PROMPT_FIX)


@register_check(
    "cache-chunked-prefill",
    needs=("logits", "logits_with_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "cache-decode"),
)
def cache_chunked_prefill(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches chunked prefill that gives other logits: the mask of a chunk does not cover the cached tokens.

    Prefill a sequence in two chunks, split at every position, and in chunks of three (for a slow model, split at two
    positions, and in chunks of seven): the logits must equal those of one forward pass.

    Cause: the causal mask of a chunk is built as if the sequence started with it, or is missing.
    Fix: build the mask from the positions of the queries and of all cached keys, not from the shape of the chunk.
    """
    tokens = ctx.random_tokens(2, min(_SHORT_SEQ_LEN, ctx.seq_len))
    length = tokens.shape[1]
    cuts = range(1, length) if not ctx.is_slow else sorted({1, length // 2})
    splits = [(f"split at {cut}", [cut, length - cut]) for cut in cuts]
    chunk_size = 3 if not ctx.is_slow else 7
    splits.append((f"in chunks of {chunk_size}", chunk_sizes(length, chunk_size)))
    base = ctx.base_logits(tokens)
    worst, num_passed, unsupported = Difference(0.0, 0.0, ()), 0, ""
    num_chunked = 0  # passed splits whose later chunks have several tokens
    for description, sizes in splits:
        try:
            diff, position, _ = compare_in_chunks(ctx, tokens, sizes, base)
        except UNSUPPORTED_ERRORS as error:
            unsupported = unsupported or f"{description}, which {format_raised(error)}"
            continue
        if not diff.within_tolerance:
            message = f"a prefill {description} gives other logits than one forward pass, from position {position} on"
            location = locate_divergence(ctx, tokens, sizes, position)
            yield diff.failure(message, location)
            return
        num_passed += 1
        num_chunked += sizes[-1] > 1
        worst = max(worst, diff, key=lambda item: item.max_abs)
    if num_passed:
        yield worst.success(f"a chunked prefill gives the logits of one forward pass ({num_passed} splits)")
    if unsupported and num_chunked:
        cause = "the mask or the positions of a chunk are built for some sizes only"
        yield failure(f"other splits work, but not a prefill {unsupported}", cause=cause)
    elif unsupported:
        yield skipped(f"the model does not support a prefill {unsupported}")


@register_check(
    "cache-padding",
    needs=("logits", "logits_with_padded_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "batch-isolation", "batch-invariance", "mask-polarity", "left-padding", "cache-decode"),
)
def cache_padding(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches decoding of a left-padded batch that gives other logits: cached padding is visible or counted.

    Prefill a left-padded batch of three rows with a mask, and decode further tokens: the logits of each row must equal
    those of the row alone, in one forward pass.

    Cause: decode steps use a mask of the new tokens only, or number them by the cache length instead of real tokens.
    Fix: keep the mask of the cached tokens, and number new tokens from the number of real tokens of each row.
    """
    forward, num_decoded = require(ctx.model.logits_with_padded_cache), 2 if ctx.is_slow else 3
    rows, seq_len = random_ragged_rows(ctx)
    tokens, mask = pad_rows(ctx, rows, seq_len, "left")
    prompt_len = seq_len - num_decoded
    if prompt_len <= seq_len - rows[-1].shape[1]:
        raise SkipCheckError(f"the maximum length of {ctx.model.max_seq_len} is too short")

    def decode() -> Tensor:
        out, cache = forward(tokens[:, :prompt_len], mask[:, :prompt_len], None)
        steps = [out[:, -1:]]
        for position in range(prompt_len, seq_len):
            out, cache = forward(tokens[:, position : position + 1], mask[:, : position + 1], cache)
            steps.append(out[:, -1:])
        return torch.cat(steps, 1)

    def forward_alone() -> Tensor:
        return torch.cat([ctx.logits(row)[:, -num_decoded - 1 :] for row in rows])

    base = torch.cat([ctx.base_logits(row)[:, -num_decoded - 1 :] for row in rows])
    diff = ctx.compare(forward_alone, decode, first_result=base)
    row, step = diff.index[:2] if diff.index else (0, 0)
    yield diff.expect_equal(
        passed="decoded from a left-padded batch, each row gives the same logits as alone",
        failed=f"decoded from a left-padded batch, the logits of row {row} differ from those of the row alone",
        location=f"row {row}, " + ("the last token of the prompt" if step == 0 else f"new token {step - 1}"),
    )


@register_check(
    "cache-unused-slots",
    needs=("logits", "logits_with_filled_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality-gradient", "causality", "cache-decode"),
)
def cache_unused_slots(ctx: CheckContext) -> CaseResult:
    """Catches visible unused cache slots: an empty slot has weight exp(0), or holds keys of an earlier sequence.

    Fill the unused slots of a cache with NaN, and with values large enough to dominate if visible: the logits must not
    change. If only NaN changes the logits, the check passes: the slots have a weight of 0, which is correct, but 0 ·
    NaN is NaN.

    Cause: unused slots are not masked, and zeros in them seem harmless.
    Fix: mask every slot without a token of this sequence, by its position, before the softmax.
    """
    tokens, model = ctx.random_tokens(2), ctx.model
    logits, logits_with_filled_cache = ctx.logits, require(model.logits_with_filled_cache)
    base = ctx.base_logits(tokens)

    def compare(value: float) -> Difference:
        return ctx.compare(lambda: logits(tokens), lambda: logits_with_filled_cache(tokens, value), first_result=base)

    nan_diff = compare(math.nan)
    if nan_diff.within_tolerance:
        return nan_diff.success("unused slots are masked, even with NaN in them")
    for value in (_LARGE_VALUE, -_LARGE_VALUE):
        diff = compare(value)
        if not diff.within_tolerance:
            content = "even zeros" if not compare(0.0).within_tolerance else f"values of {value:g}"
            position = diff.index[1]
            message = f"unused cache slots are visible: {content} in them change the logits at position {position}"
            return diff.failure(message, f"position {position}")
    return diff.success(
        "unused slots have weight 0; NaN in them would change the logits (0 · NaN), so clear them before reuse"
    )


@register_check(
    "cache-sliding-window",
    needs=("logits", "logits_with_cache|logits_with_rolling_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "cache-decode"),
)
def cache_sliding_window(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a rolling cache that drops tokens one step too early or too late, or has the wrong order after it wraps.

    Run a sequence that is longer than the window (twice as long, if that is fast enough) token by token and in chunks
    of three: the logits must equal those of one forward pass, also beyond the window.

    Cause: the ring buffer has one slot too few, or keys are masked by slot instead of position.
    Fix: keep window + new tokens − 1 keys, and mask by the position of the token in each slot.
    """
    model = ctx.model
    windows = sorted({*model.windows, *([] if model.window is None else [model.window])})
    if not windows:
        raise SkipCheckError("needs a layer with a sliding window (the property window= or windows=)")
    max_seq_len = model.max_seq_len or 1 << 30
    testable = [window for window in windows if window + 2 <= max_seq_len]
    if not testable:
        raise SkipCheckError(
            f"no sequence can exceed the window of {windows[0]}, because the maximum length is {max_seq_len}"
        )
    window = testable[0]
    lengths = [min(length, max_seq_len) for length in (2 * testable[-1] + 5, 2 * window + 5, window + 4)]
    length = next((n for n in lengths if _estimate_seconds(ctx, n) < MAX_SECONDS / 2), lengths[-1])
    if _estimate_seconds(ctx, length) > MAX_SECONDS:
        raise SkipCheckError(f"a sequence longer than the window of {window} would take more than {MAX_SECONDS:g} s")
    tokens = ctx.random_tokens(1, length)
    logits = ctx.logits
    base = ctx.base_logits(tokens)
    first_chunk = max(0, window - 2) if length > 100 else 0  # prefill most of a long window to save decode steps
    paths: dict[str, Callable[[], Tensor]] = {}
    if model.logits_with_rolling_cache is not None:
        paths["token by token in a rolling cache"] = lambda: model.logits_with_rolling_cache(tokens, 1)  # type: ignore[misc]
        paths["in chunks of three in a rolling cache"] = lambda: model.logits_with_rolling_cache(tokens, 3)  # type: ignore[misc]
    if model.logits_with_cache is not None:
        paths["token by token"] = lambda: forward_in_chunks(ctx, tokens, chunk_sizes(length, 1, first_chunk))[0]
        paths["in chunks of three"] = lambda: forward_in_chunks(ctx, tokens, chunk_sizes(length, 3, first_chunk))[0]
    for path, run in paths.items():
        try:
            diff = ctx.compare(lambda: logits(tokens), run, first_result=base)
        except (*UNSUPPORTED_ERRORS, SkipCheckError) as error:
            yield skipped(f"{path}: {str(error)[:120]}")
            continue
        if not diff.within_tolerance:
            position = first_position_beyond(run(), base, diff.tolerance)
            message = f"{path}, the logits at position {position} differ from those of one forward pass"
            message += f" (window {window})"
            yield diff.failure(message, f"position {position}")
            return
        yield diff.success(f"{path}, the logits equal those of one forward pass over {length} tokens (window {window})")


def _estimate_seconds(ctx: CheckContext, seq_len: int) -> float:
    """Estimated seconds of one forward pass over `seq_len` tokens and of decoding half of them token by token."""
    return ctx.seconds_per_forward * (seq_len / ctx.seq_len + seq_len / 4)


@register_check("cache-reuse", kinds=CAUSAL_KINDS, depends_on=("eval-dropout", "eval-determinism"))
def cache_reuse(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches results that depend on the previous sequence: state that remains in the model after a forward pass.

    Run a forward pass and generation on a sequence, then on longer sequences in a larger batch, then on the first
    sequence again: its results must be the same as before.

    Cause: a cache, a position counter or a mask is stored in the module, and is not reset for the next sequence.
    Fix: pass the state as an argument, or reset all of it at the start of a sequence.
    """
    model, length = ctx.model, ctx.seq_len
    tokens, longer = ctx.random_tokens(1, max(2, length // 2)), ctx.random_tokens(3, length)
    for path, forward in _forward_paths(ctx).items():
        first = forward(tokens)
        forward(longer)
        diff = ctx.compare_runs(first, forward(tokens), lambda: forward(tokens))
        yield diff.expect_equal(
            passed=f"{path} gives the same logits after another sequence",
            failed=f"{path} gives other logits after another sequence",
        )
        if not diff.within_tolerance:
            return
    if model.generate is not None:
        num_tokens = max(1, min(2 if ctx.is_slow else 6, length // 3))
        prompt = tokens[:, : length - num_tokens]
        first = model.generate(prompt, num_tokens)
        model.generate(longer[:, : length - num_tokens], num_tokens)
        second = model.generate(prompt, num_tokens)
        if first.shape != second.shape or not torch.equal(first, second):
            from cutaway.check.checks.generation import find_non_greedy_token

            non_greedy = find_non_greedy_token(ctx, prompt, second) or find_non_greedy_token(ctx, prompt, first)
            if first.shape != second.shape or non_greedy is not None:
                yield failure("the same prompt gives other tokens after generation from another prompt")
                return
        yield success("the same prompt gives the same tokens after generation from another prompt")


def _forward_paths(ctx: CheckContext) -> dict[str, LogitsFunction]:
    """Logits functions that may leave state in the model, by name: a forward pass, and decoding with a cache."""
    paths = {"a forward pass": ctx.logits}
    if ctx.is_slow and ctx.model.logits_with_cache is not None:  # eval-determinism runs it after another sequence too
        paths = {}
    if ctx.model.logits_with_cache is not None:
        paths["decoding with a cache"] = lambda tokens: forward_in_chunks(ctx, tokens, [tokens.shape[1] - 1, 1])[0]
    return paths
