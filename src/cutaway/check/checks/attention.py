"""Attention: who is seen, how scores are scaled, what is summed to one, which heads share keys."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.exam import CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.plain import HEADS, WIDTH
from cutaway.check.registry import check
from cutaway.check.witness import Attention

HIDDEN = 5000.0
"""So far below a row's largest score, a key is hidden: masks add at least twice as much."""
LONGEST = 256
"""Tokens of a text that passes a window."""
SHARE = 1e-3
"""Of one: what no rounding of a row's sum comes to."""
OFF = 0.02
"""Of a scale: far less than any mistake, far more than rounding."""


def own_attentions(exam: Exam, tokens: Tensor) -> list[Attention]:
    """The attentions of a text to itself, without the columns of learned sinks."""
    length = tokens.shape[1]
    seen = [one for one in exam.attentions(tokens) if one.scores.shape[-2] == length]
    seen = [one for one in seen if one.scores.shape[-1] in (length, length + 1)]
    if not seen:
        raise CannotError("needs attention whose softmax can be seen")
    return seen


def visible(one: Attention) -> Tensor:
    """Which keys (B, H, T, S) each query sees."""
    scores = one.scores[..., : one.scores.shape[-2]].float()
    return scores > scores.amax(-1, keepdim=True) - HIDDEN


@check(
    "window",
    catches="a sliding window that is one token too wide or too narrow, or not there at all",
    cause="the window counts the token itself on one path and not on another (i - j <= w in place of i - j < w)",
    fix="let query i see key j where 0 <= i - j < window, in every kernel, and test the edge on both sides",
)
def window(exam: Exam) -> Iterator[Part]:
    """Look at what every attention sees: exactly the window's tokens in each row, or all where a layer has none. Then
    change all that no path of windows reaches: the last logits must stay."""
    target = exam.target
    sizes = target.windows or (() if target.window is None else (target.window,))
    if not sizes:
        raise CannotError("needs window or windows")
    length = min(max(sizes) + 6, target.longest or LONGEST)
    if length <= min(sizes) or length > LONGEST:
        raise CannotError(f"a text of {length} tokens does not pass a window of {min(sizes)}")
    tokens = exam.text(1, length)
    try:
        yield from seen_rows(exam, tokens, sizes)
    except CannotError as error:
        yield Part("skip", f"skipped: {error}")
    if target.window is None or target.layers is None or target.kind == "encoder":
        return
    reach = target.layers * (target.window - 1)
    length = min(reach + 4, target.longest or LONGEST)
    if not reach + 1 < length <= LONGEST:
        return
    assert target.logits is not None
    tokens, logits = exam.text(1, length), target.logits
    other = exam.changed(tokens, slice(0, length - 1 - reach))
    gap = exam.same(lambda: logits(tokens)[:, -1], lambda: logits(other)[:, -1])
    yield exam.judge(
        gap,
        held=f"the last of {length} tokens depends on {reach} before it at most",
        broken=f"{target.layers} layers of windows of {target.window} reach {reach} tokens back, and the logits change "
        "with tokens before that",
        where=f"position {length - 1}",
    )


def seen_rows(exam: Exam, tokens: Tensor, sizes: tuple[int, ...]) -> Iterator[Part]:
    """Whether each row sees as many keys as some window, or all."""
    target, length = exam.target, tokens.shape[1]
    place = torch.arange(length)
    far = (place[:, None] - place[None, :]).abs()
    causal = place[None, :] <= place[:, None] if target.kind != "encoder" else torch.ones(length, length).bool()
    allowed = {size: causal & (far < size) for size in sizes} | ({} if target.window else {0: causal})
    found: set[int] = set()
    for one in own_attentions(exam, tokens):
        rows = visible(one)[0].any(0).cpu()
        fits = [size for size, rule in allowed.items() if torch.equal(rows, rule)]
        found |= set(fits)
        if not fits:
            if not torch.equal(rows & causal, rows):
                raise CannotError("later tokens are seen, which other checks say")
            many = int(rows[-1].sum())
            message = f"the last of {length} tokens sees {many} tokens, where the window is {min(sizes)}"
            yield Part("fail", message, many, min(sizes), one.module or None)
            return
    if missing := set(sizes) - found:
        yield Part("fail", f"no layer has the window of {min(missing)}", where=None)
        return
    yield Part("pass", f"every row sees just its window: {', '.join(map(str, sorted(found - {0})))} tokens")


@check(
    "kernels",
    catches="attention kernels that disagree: one drops the soft-cap, the sinks, the bias or the window",
    cause="a feature was built into one kernel, and the other ignores the argument instead of refusing it",
    fix="let each kernel refuse what it cannot compute, and compare all of them with the equation",
    needs=("logits", "kernels|attention"),
    after=("causality", "attention-scale", "softmax-axis", "eval-repeatable"),
)
def kernels(exam: Exam) -> Iterator[Part]:
    """Read one text by each kernel, past the smallest window: the same logits. A bare kernel is compared with
    softmax(q·kᵀ·scale)·v itself."""
    target = exam.target
    assert target.logits is not None
    logits = target.logits
    past = max((size + 4 for size in target.windows if size <= 64), default=0)
    tokens = exam.text(2, min(max(exam.length, past), target.longest or LONGEST))
    for name, other in target.kernels.items():
        gap = exam.same(lambda: logits(tokens), lambda: other(tokens))
        yield exam.judge(
            gap,
            held=f"the kernel {name} gives the same logits",
            broken=f"the kernel {name} gives other logits",
            where=None if gap.ok else f"position {gap.index[1]}",
        )
    if target.attention is not None:
        q, k, v = drawn(exam, HEADS)
        attention = target.attention
        gap = exam.same(lambda: attention(q, k, v), lambda: equation(exam, q, k, v))
        yield exam.judge(
            gap,
            held="the kernel gives softmax(q·kᵀ·scale)·v",
            broken="the kernel gives something else than softmax(q·kᵀ·scale)·v",
            where=None if gap.ok else f"head {gap.index[1]}, position {gap.index[2]}",
        )
        if gap.ok:
            yield of_large_scores(exam, q, k, v)


def of_large_scores(exam: Exam, q: Tensor, k: Tensor, v: Tensor) -> Part:
    """Scores of some hundreds are rare and real: no softmax may overflow there."""
    attention = exam.target.attention
    assert attention is not None
    largest = 8.0 * math.sqrt(q.shape[-1])
    out = attention(largest * q, largest * k / 8, v)
    if bool(out.isfinite().all()):
        return Part("pass", "large scores overflow nowhere")
    return Part(
        "fail",
        f"with scores of some {8 * WIDTH:d} the kernel gives numbers that are not finite",
        cause="exp is taken of the scores as they are",
        fix="subtract each row's largest score first, as torch.softmax does",
    )


def drawn(exam: Exam, groups: int, length: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v for a bare kernel."""
    target = exam.target

    def draw(heads: int) -> Tensor:
        x = torch.randn(2, heads, length, WIDTH, generator=exam.generator)
        return x.to(target.device, target.dtype or torch.float32)

    return draw(HEADS), draw(groups), draw(groups)


def equation(exam: Exam, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q·kᵀ·scale)·v with the target's mask."""
    target, length = exam.target, q.shape[-2]
    scale = scale or target.scale or 1 / math.sqrt(q.shape[-1])
    scores = (q @ k.transpose(-1, -2)) * scale
    place = torch.arange(length, device=q.device)
    behind = place[:, None] - place[None, :]
    hidden = behind < 0 if target.kind != "encoder" else behind < -length
    if target.window is not None:
        hidden = hidden | (behind.abs() >= target.window)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@check(
    "softmax-axis",
    catches="a softmax over queries or heads, or rows that do not sum to one where v is read",
    cause="softmax has the wrong dim (or none, which PyTorch guesses), or the mask is applied behind it",
    fix="softmax over the keys, dim=-1, with -inf where nothing may be seen before it",
    after=("dropout-off",),
)
def softmax_axis(exam: Exam) -> Iterator[Part]:
    """Watch every softmax of attention: the axis that it sums to one is the one that the product with v sums over, and
    what is multiplied with v still sums to one. A bare kernel must give ones for values of ones."""
    if exam.target.attention is not None:
        q, k, v = drawn(exam, HEADS)
        gap = exam.same(lambda: exam.target.attention(q, k, torch.ones_like(v)), lambda: torch.ones_like(v))  # type: ignore[misc]
        yield exam.judge(
            gap,
            held="values of ones come out as ones",
            broken="values of ones do not come out as ones: rows do not sum to one",
        )
    seen = exam.attentions(exam.text(2, min(exam.length, 11)))
    if not seen:
        raise CannotError("needs attention whose softmax can be seen")
    names = {-1: "keys", -2: "queries", -3: "heads", -4: "rows of the batch"}
    for one in seen:
        if one.used is not None and one.over != one.axis:
            message = (
                f"softmax is taken over {names.get(one.axis, 'another axis')}, not over the keys that v is summed over"
            )
            yield Part("fail", message, one.axis, one.over, one.module or None)
            return
        if one.used is None or one.over != -1 or one.used.shape != one.pattern.shape:
            continue
        sums = one.used.float().sum(-1)
        far = torch.where(sums.abs() < SHARE, 0.0, (sums - 1).abs())
        bound = max(SHARE, 16 * torch.finfo(one.used.dtype).eps)
        if float(far.max()) > bound:
            row = int(far.amax((0, 1)).argmax())
            worst = float(sums.flatten()[far.argmax()])
            message = f"the weights of position {row} sum to {worst:.3g} where they meet v, not to 1"
            yield Part("fail", message, float(far.max()), bound, one.module or None)
            return
    yield Part("pass", f"{len(seen)} softmaxes sum to one over the keys")


@check(
    "grouped-heads",
    catches="query heads that meet the wrong keys: groups laid out as 0, 1, 0, 1 in place of 0, 0, 1, 1",
    cause="keys or values are expanded by repeat in place of repeat_interleave, or one of the two is",
    fix="give head h the keys and values of group h // (heads / groups): repeat_interleave over the head axis",
)
def grouped_heads(exam: Exam) -> Iterator[Part]:
    """Watch the keys and values that each head meets: heads with equal ones must be neighbours, in groups of one size,
    alike for keys and values. A bare kernel with few key heads must give what it gives with them repeated."""
    if exam.target.attention is not None:
        yield from bare_groups(exam)
        return
    shared = 0
    for one in exam.attentions(exam.text(1, min(exam.length, 11))):
        layouts = [layout(x) for x in (one.k, one.v) if x is not None and bool(x.any())]
        for what, groups in zip(("keys", "values"), layouts, strict=False):
            size = len(groups) // (max(groups) + 1)
            if groups != [head // size for head in range(len(groups))] and max(groups) + 1 < len(groups):
                message = f"the heads meet the {what} of groups {', '.join(map(str, groups))}"
                yield Part("fail", message, where=one.module or None)
                return
        if len(layouts) == 2 and layouts[0] != layouts[1]:
            yield Part("fail", "keys and values are shared by different heads", where=one.module or None)
            return
        shared += bool(layouts and max(layouts[0]) + 1 < len(layouts[0]))
    if not shared:
        raise CannotError("needs heads that share keys and an attention that can be seen")
    yield Part("pass", f"in {shared} attentions neighbouring heads share keys and values")


def layout(x: Tensor) -> list[int]:
    """The group of each head: the first heads with other values are groups 0, 1, …"""
    known: list[int] = []
    groups = []
    for head in range(x.shape[1]):
        twin = next((n for n, at in enumerate(known) if torch.equal(x[:, at], x[:, head])), None)
        if twin is None:
            known.append(head)
        groups.append(len(known) - 1 if twin is None else twin)
    return groups


def bare_groups(exam: Exam) -> Iterator[Part]:
    attention = exam.target.attention
    assert attention is not None
    for groups in (1, 2):
        q, k, v = drawn(exam, groups)
        wide = [x.repeat_interleave(HEADS // groups, 1) for x in (k, v)]
        try:
            attention(q, k, v)
        except Exception as error:  # whatever it raises, it does not take fewer heads of keys
            raise CannotError(f"with {groups} heads of keys it raises {type(error).__name__}") from error
        gap = exam.same(lambda: attention(q, *wide), lambda: attention(q, k, v))
        yield exam.judge(
            gap,
            held=f"{groups} heads of keys give what they give repeated",
            broken=f"{groups} heads of keys for {HEADS} of queries give something else than with the keys repeated",
            where=None if gap.ok else f"head {gap.index[1]}",
        )
