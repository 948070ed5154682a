"""A text that is read piece by piece, behind what is remembered of it, is the same text."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.numerics import NOISE_MARGIN, Difference, max_difference, max_finite_abs
from cutaway.check.probes.cached_forward import (
    UNSUPPORTED_ERRORS,
    chunk_sizes,
    compare_in_chunks,
    first_position_beyond,
    forward_in_chunks,
    infer_wrong_position,
    locate_divergence,
)
from cutaway.check.registry import CAUSAL_KINDS, register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

LONG_SEQ_LEN, SHORT_SEQ_LEN = 34, 12
"""Tokens of a text for those, past a block of 32; and of one that is read in many ways."""
MAX_SECONDS = 3.0
"""Seconds that passing a window may take."""
LARGE_VALUE = 1e4
"""So large that a slot with it is felt wherever it is seen, and times a weight of 0 it is 0."""

MAX_ROUNDING_RATIO = 1e-2
"""Of the largest logit: what no rounding of one and the same pass comes to."""


@register_check(
    "cache-decode",
    catches="a cache that gives other logits than one pass: off by one, positions begun anew, a layer that forgets",
    cause="behind a cache, positions do not go on from its length, or keys are stored before they are turned or twice",
    fix="number new tokens from the cache's length on, store each key once as it is used, and mask by positions",
    needs=("logits", "logits_with_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=(
        "causality-tile-edges",
        "causality",
    ),
    preflight=True,
)
@torch.no_grad()
def cache_decode(context: CheckContext) -> Iterator[CaseResult]:
    """Read a text token by token, and again token by token behind a prompt: each token's logits must be those
    of one pass over the whole."""
    logits = context.model.logits
    assert logits is not None
    most, many, few = (10, 8, 3) if context.is_slow else (LONG_SEQ_LEN, 12, 6)
    whole = context.random_tokens(2, min(most, context.model.max_seq_len or most))
    behind = max(0, whole.shape[1] - few)
    for path, first in (("token by token", 0), ("token by token behind a prompt", behind)):
        tokens = whole if first else whole[:, :many]
        base = logits(tokens)
        sizes = chunk_sizes(tokens.shape[1], 1, first)
        gap, step = compare_in_chunks(context, tokens, sizes, base)
        if not gap.within_tolerance:
            message = f"{path}, the logits at position {step} are not those of one pass"
            seen = infer_wrong_position(context, tokens, sizes, step)
            if seen is not None:
                message += f" but what position {seen} would give: positions do not go on from the cache's length"
            yield CaseResult(
                "fail", message, gap.max_abs, gap.tolerance, locate_divergence(context, tokens, sizes, step)
            )
            return
        yield CaseResult("pass", f"{path}, each gives the logits of one pass", gap.max_abs, gap.tolerance)


@register_check(
    "cache-chunked-prefill",
    catches="a prompt that is read in pieces and gives other logits: the mask of a piece knows only the piece",
    cause="the causal mask of a piece behind a cache is made for a text that begins with it, or is left out",
    fix="make the mask from the positions of queries and of all stored keys, not from the shape of the piece",
    needs=("logits", "logits_with_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "cache-decode"),
)
@torch.no_grad()
def cache_chunked_prefill(context: CheckContext) -> Iterator[CaseResult]:
    """Read a text in two pieces, at every place where it can be cut (at four, if passes are slow), and in pieces of
    three: the logits must be those of one pass."""
    tokens, logits = context.random_tokens(2, min(SHORT_SEQ_LEN, context.seq_len)), context.model.logits
    assert logits is not None
    length = tokens.shape[1]
    cuts = range(1, length) if not context.is_slow else sorted({1, length // 2})
    ways = [(f"cut at {cut}", [cut, length - cut]) for cut in cuts]
    piece = 3 if not context.is_slow else 7
    ways.append((f"in pieces of {piece}", chunk_sizes(length, piece)))
    base = logits(tokens)
    worst, done, refused = Difference(0.0, 0.0, ()), 0, ""
    for path, sizes in ways:
        try:
            gap, step = compare_in_chunks(context, tokens, sizes, base)
        except UNSUPPORTED_ERRORS as error:
            refused = refused or f"{path}: {str(error).strip().splitlines()[0][:120] if str(error) else 'refused'}"
            continue
        if not gap.within_tolerance:
            message = f"a text {path} gives other logits than in one pass, from position {step} on"
            yield CaseResult(
                "fail", message, gap.max_abs, gap.tolerance, locate_divergence(context, tokens, sizes, step)
            )
            return
        done += 1
        worst = max(worst, gap, key=lambda each: each.max_abs)
    if done:
        yield CaseResult(
            "pass", f"a text in pieces gives the logits of one pass, in {done} ways", worst.max_abs, worst.tolerance
        )
    if refused:
        yield CaseResult("skip", f"skipped: it does not take a text {refused}")


@register_check(
    "cache-unused-slots",
    catches="an empty slot of the cache that is seen: it weighs as exp(0), or whatever an earlier text left there",
    cause="slots that hold nothing yet are not masked, and zeros there look harmless",
    fix="mask every slot that holds no token of this text, by its position, before the softmax",
    needs=("logits", "logits_with_filled_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality-gradient", "causality", "cache-decode"),
)
@torch.no_grad()
def cache_unused_slots(context: CheckContext) -> CaseResult:
    """Fill the unused slots of a cache with NaN, and with numbers so large that one that is seen would rule: the logits
    must not change. A NaN that is felt alone is no failure: 0 · NaN is NaN, and the weight of 0 is right."""
    tokens, logits, poisoned = context.random_tokens(2), context.model.logits, context.model.logits_with_filled_cache
    assert logits is not None
    assert poisoned is not None
    base = logits(tokens)
    clean = context.compare(lambda: logits(tokens), lambda: poisoned(tokens, 0.0), first_result=base)
    for value in (LARGE_VALUE, -LARGE_VALUE):
        gap = context.compare(lambda: logits(tokens), lambda: poisoned(tokens, value), first_result=base)
        if not gap.within_tolerance:
            what = "even with zeros in them" if not clean.within_tolerance else f"with {value:g} in them"
            message = f"unused slots of the cache are seen: {what} the logits at position {gap.index[1]} change"
            return CaseResult("fail", message, gap.max_abs, gap.tolerance, f"position {gap.index[1]}")
    broken = context.compare(lambda: logits(tokens), lambda: poisoned(tokens, math.nan), first_result=base)
    if not broken.within_tolerance:
        message = "unused slots weigh nothing; a NaN in one would be felt (0 · NaN), so wipe them before reuse"
        return CaseResult("pass", message, gap.max_abs, gap.tolerance)
    return CaseResult("pass", "unused slots are not seen, not even a NaN in them", broken.max_abs, broken.tolerance)


@register_check(
    "cache-sliding-window",
    catches="a rolling cache that forgets one token too early or too late, or mixes up the order when it wraps",
    cause="the ring has one slot too few, or keys are masked by their slot instead of their position",
    fix="keep window + new tokens − 1 keys, and mask by the position that each slot holds",
    needs=("logits", "logits_with_cache|logits_with_rolling_cache"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality", "cache-decode"),
)
@torch.no_grad()
def cache_sliding_window(context: CheckContext) -> Iterator[CaseResult]:
    """Read a text of more than twice the smallest window token by token, and in pieces of three: past the window too,
    the logits must be those of one pass."""
    target = context.model
    windows = sorted({*target.windows, *([] if target.window is None else [target.window])})
    if not windows:
        raise SkipCheckError("needs a layer with a sliding window (the property window= or windows=)")
    room = target.max_seq_len or 1 << 30
    small = [window for window in windows if window + 2 <= room]
    if not small:
        raise SkipCheckError(f"it reads {room} tokens at most, so its window of {windows[0]} is never left")
    window = small[0]
    lengths = [min(most, room) for most in (2 * small[-1] + 5, 2 * window + 5, window + 4)]
    length = next((n for n in lengths if _estimate_seconds(context, n) < MAX_SECONDS / 2), lengths[-1])
    if _estimate_seconds(context, length) > MAX_SECONDS:
        raise SkipCheckError(f"a text that leaves its window of {window} would take more than {MAX_SECONDS:g} s")
    tokens = context.random_tokens(1, length)
    assert target.logits is not None
    logits = target.logits
    base = logits(tokens)
    first = max(0, window - 2) if length > 100 else 0  # so that a long window does not take as many steps
    ways: dict[str, Callable[[], Tensor]] = {}
    if target.logits_with_rolling_cache is not None:
        ways["token by token in a ring"] = lambda: target.logits_with_rolling_cache(tokens, 1)  # type: ignore[misc]
        ways["in pieces of three in a ring"] = lambda: target.logits_with_rolling_cache(tokens, 3)  # type: ignore[misc]
    if target.logits_with_cache is not None:
        ways["token by token"] = lambda: forward_in_chunks(context, tokens, chunk_sizes(length, 1, first))[0]
        ways["in pieces of three"] = lambda: forward_in_chunks(context, tokens, chunk_sizes(length, 3, first))[0]
    for path, make in ways.items():
        try:
            gap = context.compare(lambda: logits(tokens), make, first_result=base)
        except (*UNSUPPORTED_ERRORS, SkipCheckError) as error:
            yield CaseResult("skip", f"skipped: {path}: {str(error)[:120]}")
            continue
        if not gap.within_tolerance:
            step = first_position_beyond(make(), base, gap.tolerance)
            past = f"{step - window + 1} past the first that leaves" if step >= window else "within"
            message = f"{path}, the logits at position {step} are not those of one pass, {past} the window of {window}"
            yield CaseResult("fail", message, gap.max_abs, gap.tolerance, f"position {step}")
            return
        held = f"{path}, {length - window} tokens past the window of {window} are as in one pass"
        yield CaseResult("pass", held, gap.max_abs, gap.tolerance)


def _estimate_seconds(context: CheckContext, seq_len: int) -> float:
    """Seconds, about, of reading so many tokens in a pass and half of them in steps."""
    return context.seconds_per_forward * (seq_len / context.seq_len + seq_len / 4)


@register_check(
    "cache-reuse",
    catches="a text that depends on the one before it: state that stays in the model after a pass or a generation",
    cause="a cache, a position counter or a mask is kept in the module, and is not made anew for the next text",
    fix="pass the state as an argument, or reset all of it where a text begins",
    kinds=CAUSAL_KINDS,
    depends_on=("eval-dropout", "eval-determinism"),
)
@torch.no_grad()
def cache_reuse(context: CheckContext) -> Iterator[CaseResult]:
    """Read and write a text, then a longer one in a larger batch, then the first again: it must give the same again."""
    target, length = context.model, context.seq_len
    mine, longer = context.random_tokens(1, max(2, length // 2)), context.random_tokens(3, length)
    for path, make in _forward_paths(context).items():
        first = make(mine)
        make(longer)
        gap = max_difference(first, make(mine))
        if gap.max_abs > 0.0:  # what stays behind moves a pass that is made again, and must not pass for noise
            noise = context.measure_noise(lambda: make(mine), first)
            gap = Difference(
                gap.max_abs, min(NOISE_MARGIN * noise, MAX_ROUNDING_RATIO * max_finite_abs(first)), gap.index
            )
        broken = f"{path} gives other logits after another text was read"
        part = context.expect_equal(gap, passed=f"{path} gives the same after another text", failed=broken)
        yield part
        if part.verdict == "fail":
            return
    if target.generate is not None:
        n = max(1, min(2 if context.is_slow else 6, length // 3))
        first = target.generate(mine[:, : length - n], n)
        target.generate(longer[:, : length - n], n)
        again = target.generate(mine[:, : length - n], n)
        if first.shape != again.shape or not torch.equal(first, again):
            from cutaway.check.checks.generation import find_non_greedy_token

            wrong = find_non_greedy_token(context, mine[:, : length - n], again) or find_non_greedy_token(
                context, mine[:, : length - n], first
            )
            if first.shape != again.shape or wrong is not None:
                yield CaseResult("fail", "the same prompt is continued otherwise after another one was written on")
                return
        yield CaseResult("pass", "the same prompt is continued alike after another one")


def _forward_paths(context: CheckContext) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways to logits that may leave something behind."""
    target = context.model
    found: dict[str, Any] = {"a pass": target.logits} if target.logits is not None else {}
    if target.logits_with_cache is not None:
        found["a pass with a cache"] = lambda tokens: forward_in_chunks(context, tokens, [tokens.shape[1] - 1, 1])[0]
    return found
