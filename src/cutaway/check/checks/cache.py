"""A text that is read piece by piece, behind what is remembered of it, is the same text."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cutaway.check.exam import MARGIN, CannotError, Exam, Gap, apart, scale_of
from cutaway.check.finding import Part
from cutaway.check.pieces import REFUSALS, first_far, in_pieces, read, seeming_position, sized, where
from cutaway.check.registry import CAUSAL, check

LONG, SHORT = 34, 12
"""Tokens of a text for those, past a block of 32; and of one that is read in many ways."""
SLOW = 3.0
"""Seconds that passing a window may take."""
HUGE = 1e4
"""So large that a slot with it is felt wherever it is seen, and times a weight of 0 it is 0."""

SHARE = 1e-2
"""Of the largest logit: what no rounding of one and the same pass comes to."""


@check(
    "cache-steps",
    catches="a cache that gives other logits than one pass: off by one, positions begun anew, a layer that forgets",
    cause="behind a cache, positions do not go on from its length, or keys are stored before they are turned or twice",
    fix="number new tokens from the cache's length on, store each key once as it is used, and mask by positions",
    needs=("logits", "cached"),
    kinds=CAUSAL,
    after=(
        "causality-edges",
        "causality",
    ),
    quick=True,
)
@torch.no_grad()
def cache_steps(exam: Exam) -> Iterator[Part]:
    """Read a text token by token, and again token by token behind a prompt: each token's logits must be those
    of one pass over the whole."""
    logits = exam.target.logits
    assert logits is not None
    most, many, few = (10, 8, 3) if exam.slow else (LONG, 12, 6)
    whole = exam.text(2, min(most, exam.target.longest or most))
    behind = max(0, whole.shape[1] - few)
    for path, first in (("token by token", 0), ("token by token behind a prompt", behind)):
        tokens = whole if first else whole[:, :many]
        base = logits(tokens)
        sizes = sized(tokens.shape[1], 1, first)
        gap, step = in_pieces(exam, tokens, sizes, base)
        if not gap.ok:
            message = f"{path}, the logits at position {step} are not those of one pass"
            seen = seeming_position(exam, tokens, sizes, step)
            if seen is not None:
                message += f" but what position {seen} would give: positions do not go on from the cache's length"
            yield Part("fail", message, gap.worst, gap.bound, where(exam, tokens, sizes, step))
            return
        yield Part("pass", f"{path}, each gives the logits of one pass", gap.worst, gap.bound)


@check(
    "cache-chunks",
    catches="a prompt that is read in pieces and gives other logits: the mask of a piece knows only the piece",
    cause="the causal mask of a piece behind a cache is made for a text that begins with it, or is left out",
    fix="make the mask from the positions of queries and of all stored keys, not from the shape of the piece",
    needs=("logits", "cached"),
    kinds=CAUSAL,
    after=("causality", "cache-steps"),
)
@torch.no_grad()
def cache_chunks(exam: Exam) -> Iterator[Part]:
    """Read a text in two pieces, at every place where it can be cut (at four, if passes are slow), and in pieces of
    three: the logits must be those of one pass."""
    tokens, logits = exam.text(2, min(SHORT, exam.length)), exam.target.logits
    assert logits is not None
    length = tokens.shape[1]
    cuts = range(1, length) if not exam.slow else sorted({1, length // 2})
    ways = [(f"cut at {cut}", [cut, length - cut]) for cut in cuts]
    piece = 3 if not exam.slow else 7
    ways.append((f"in pieces of {piece}", sized(length, piece)))
    base = logits(tokens)
    worst, done, refused = Gap(0.0, 0.0, ()), 0, ""
    for path, sizes in ways:
        try:
            gap, step = in_pieces(exam, tokens, sizes, base)
        except REFUSALS as error:
            refused = refused or f"{path}: {str(error).strip().splitlines()[0][:120] if str(error) else 'refused'}"
            continue
        if not gap.ok:
            message = f"a text {path} gives other logits than in one pass, from position {step} on"
            yield Part("fail", message, gap.worst, gap.bound, where(exam, tokens, sizes, step))
            return
        done += 1
        worst = max(worst, gap, key=lambda each: each.worst)
    if done:
        yield Part("pass", f"a text in pieces gives the logits of one pass, in {done} ways", worst.worst, worst.bound)
    if refused:
        yield Part("skip", f"skipped: it does not take a text {refused}")


@check(
    "cache-poison",
    catches="an empty slot of the cache that is seen: it weighs as exp(0), or whatever an earlier text left there",
    cause="slots that hold nothing yet are not masked, and zeros there look harmless",
    fix="mask every slot that holds no token of this text, by its position, before the softmax",
    needs=("logits", "poisoned"),
    kinds=CAUSAL,
    after=("causality-gradient", "causality", "cache-steps"),
)
@torch.no_grad()
def cache_poison(exam: Exam) -> Part:
    """Fill the unused slots of a cache with NaN, and with numbers so large that one that is seen would rule: the logits
    must not change. A NaN that is felt alone is no failure: 0 · NaN is NaN, and the weight of 0 is right."""
    tokens, logits, poisoned = exam.text(2), exam.target.logits, exam.target.poisoned
    assert logits is not None
    assert poisoned is not None
    base = logits(tokens)
    clean = exam.same(lambda: logits(tokens), lambda: poisoned(tokens, 0.0), first=base)
    for value in (HUGE, -HUGE):
        gap = exam.same(lambda: logits(tokens), lambda: poisoned(tokens, value), first=base)
        if not gap.ok:
            what = "even with zeros in them" if not clean.ok else f"with {value:g} in them"
            message = f"unused slots of the cache are seen: {what} the logits at position {gap.index[1]} change"
            return Part("fail", message, gap.worst, gap.bound, f"position {gap.index[1]}")
    broken = exam.same(lambda: logits(tokens), lambda: poisoned(tokens, math.nan), first=base)
    if not broken.ok:
        message = "unused slots weigh nothing; a NaN in one would be felt (0 · NaN), so wipe them before reuse"
        return Part("pass", message, gap.worst, gap.bound)
    return Part("pass", "unused slots are not seen, not even a NaN in them", broken.worst, broken.bound)


@check(
    "cache-window",
    catches="a rolling cache that forgets one token too early or too late, or mixes up the order when it wraps",
    cause="the ring has one slot too few, or keys are masked by their slot instead of their position",
    fix="keep window + new tokens − 1 keys, and mask by the position that each slot holds",
    needs=("logits", "cached|rolled"),
    kinds=CAUSAL,
    after=("causality", "cache-steps"),
)
@torch.no_grad()
def cache_window(exam: Exam) -> Iterator[Part]:
    """Read a text of more than twice the smallest window token by token, and in pieces of three: past the window too,
    the logits must be those of one pass."""
    target = exam.target
    windows = sorted({*target.windows, *([] if target.window is None else [target.window])})
    if not windows:
        raise CannotError("needs a layer with a sliding window (the fact window= or windows=)")
    room = target.longest or 1 << 30
    small = [window for window in windows if window + 2 <= room]
    if not small:
        raise CannotError(f"it reads {room} tokens at most, so its window of {windows[0]} is never left")
    window = small[0]
    lengths = [min(most, room) for most in (2 * small[-1] + 5, 2 * window + 5, window + 4)]
    length = next((n for n in lengths if cost(exam, n) < SLOW / 2), lengths[-1])
    if cost(exam, length) > SLOW:
        raise CannotError(f"a text that leaves its window of {window} would take more than {SLOW:g} s")
    tokens = exam.text(1, length)
    assert target.logits is not None
    logits = target.logits
    base = logits(tokens)
    first = max(0, window - 2) if length > 100 else 0  # so that a long window does not take as many steps
    ways: dict[str, Callable[[], Tensor]] = {}
    if target.rolled is not None:
        ways["token by token in a ring"] = lambda: target.rolled(tokens, 1)  # type: ignore[misc]
        ways["in pieces of three in a ring"] = lambda: target.rolled(tokens, 3)  # type: ignore[misc]
    if target.cached is not None:
        ways["token by token"] = lambda: read(exam, tokens, sized(length, 1, first))[0]
        ways["in pieces of three"] = lambda: read(exam, tokens, sized(length, 3, first))[0]
    for path, make in ways.items():
        try:
            gap = exam.same(lambda: logits(tokens), make, first=base)
        except (*REFUSALS, CannotError) as error:
            yield Part("skip", f"skipped: {path}: {str(error)[:120]}")
            continue
        if not gap.ok:
            step = first_far(make(), base, gap.bound)
            past = f"{step - window + 1} past the first that leaves" if step >= window else "within"
            message = f"{path}, the logits at position {step} are not those of one pass, {past} the window of {window}"
            yield Part("fail", message, gap.worst, gap.bound, f"position {step}")
            return
        held = f"{path}, {length - window} tokens past the window of {window} are as in one pass"
        yield Part("pass", held, gap.worst, gap.bound)


def cost(exam: Exam, length: int) -> float:
    """Seconds, about, of reading so many tokens in a pass and half of them in steps."""
    return exam.seconds_a_pass * (length / exam.length + length / 4)


@check(
    "cache-reuse",
    catches="a text that depends on the one before it: state that stays in the model after a pass or a generation",
    cause="a cache, a position counter or a mask is kept in the module, and is not made anew for the next text",
    fix="pass the state as an argument, or reset all of it where a text begins",
    kinds=CAUSAL,
    after=("dropout-off", "eval-repeatable"),
)
@torch.no_grad()
def cache_reuse(exam: Exam) -> Iterator[Part]:
    """Read and write a text, then a longer one in a larger batch, then the first again: it must give the same again."""
    target, length = exam.target, exam.length
    mine, longer = exam.text(1, max(2, length // 2)), exam.text(3, length)
    for path, make in passes(exam).items():
        first = make(mine)
        make(longer)
        gap = apart(first, make(mine))
        if gap.worst > 0.0:  # what stays behind moves a pass that is made again, and must not pass for noise
            noise = exam.noise(lambda: make(mine), first)
            gap = Gap(gap.worst, min(MARGIN * noise, SHARE * scale_of(first)), gap.index)
        broken = f"{path} gives other logits after another text was read"
        part = exam.judge(gap, held=f"{path} gives the same after another text", broken=broken)
        yield part
        if part.verdict == "fail":
            return
    if target.generate is not None:
        n = max(1, min(2 if exam.slow else 6, length // 3))
        first = target.generate(mine[:, : length - n], n)
        target.generate(longer[:, : length - n], n)
        again = target.generate(mine[:, : length - n], n)
        if first.shape != again.shape or not torch.equal(first, again):
            from cutaway.check.checks.writing import unlikely

            wrong = unlikely(exam, mine[:, : length - n], again) or unlikely(exam, mine[:, : length - n], first)
            if first.shape != again.shape or wrong is not None:
                yield Part("fail", "the same prompt is continued otherwise after another one was written on")
                return
        yield Part("pass", "the same prompt is continued alike after another one")


def passes(exam: Exam) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways to logits that may leave something behind."""
    target = exam.target
    found: dict[str, Any] = {"a pass": target.logits} if target.logits is not None else {}
    if target.cached is not None:
        found["a pass with a cache"] = lambda tokens: read(exam, tokens, [tokens.shape[1] - 1, 1])[0]
    return found
