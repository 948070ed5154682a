"""No token may see what comes after it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cutaway.check.exam import MARGIN, CannotError, Exam, Gap, scale_of
from cutaway.check.finding import Part
from cutaway.check.registry import CAUSAL, check
from cutaway.check.target import Logits
from cutaway.check.vectors import moved
from cutaway.check.where import first_difference

CAUSE = "the causal mask is missing, shifted by one, transposed, or not applied on this path"
FIX = (
    "hide key j from query i wherever j > i, with -inf before the softmax, on every path; a model that is meant to see "
    "both sides is checked with kind='encoder'"
)
EDGES = (8, 16, 32, 64)
EXACT = 1e-12
"""A hidden token weighs exactly nothing: this share of the largest gradient is far below any rounding."""
FEW = (1, 6, 23)
"""Cuts that are tried on every path."""


def leaks(exam: Exam, logits: Logits, tokens: Tensor, cuts: list[int], path: str = "") -> Iterator[Part]:
    """Change all tokens from each cut on; a logit before it that changes is a leak."""
    with torch.no_grad():
        base = logits(tokens)
    worst = Gap(0.0, 0.0, ())
    for cut in cuts:
        other = exam.changed(tokens, slice(cut, None))
        gap = exam.same(
            lambda: logits(tokens)[:, :cut],
            lambda: logits(other)[:, :cut],
            first=base[:, :cut],
        )
        worst = max(worst, gap, key=lambda each: each.worst)
        if not gap.ok:
            yield told(exam, logits, tokens, cut, gap, path)
            return
    yield Part("pass", f"no logit changes with a later token{path}, at {len(cuts)} cuts", worst.worst, worst.bound)


def told(exam: Exam, logits: Logits, tokens: Tensor, cut: int, gap: Gap, path: str) -> Part:
    """A leak in words: who sees what, and in which module it begins."""
    reader = gap.index[1]
    for at in range(cut, tokens.shape[1]):
        other = exam.changed(tokens, slice(at, at + 1))
        if not exam.same(lambda: logits(tokens)[:, reader], lambda: logits(other)[:, reader]).ok:
            break
    module = first_difference(exam, lambda: logits(tokens), lambda: logits(other), slice(0, cut))
    where = f"position {reader}" + (f", first in {module}" if module else "")
    message = f"the logits at position {reader} change with token {at}, which comes later{path}"
    return Part("fail", message, gap.worst, gap.bound, where)


@check(
    "causality",
    catches="a token that sees later tokens, so that training is told the answers: a leak that looks like learning",
    cause=CAUSE,
    fix=FIX,
    kinds=CAUSAL,
    quick=True,
)
def causality(exam: Exam) -> Iterator[Part]:
    """Change all tokens from a position on, at every position: the logits before must stay. Then read prefixes alone:
    each must give the logits that it has within the whole text."""
    logits, tokens = exam.target.logits, exam.text()
    assert logits is not None
    yield from leaks(exam, logits, tokens, list(range(1, tokens.shape[1])))
    with torch.no_grad():
        base = logits(tokens)
    for cut in range(1, tokens.shape[1], 2 if not exam.slow else 5):
        gap = exam.same(
            lambda: logits(tokens)[:, :cut],
            lambda: logits(tokens[:, :cut]),
            first=base[:, :cut],
        )
        if not gap.ok:
            message = f"the first {cut} tokens alone give other logits than within {tokens.shape[1]} tokens"
            yield Part("fail", message, gap.worst, gap.bound, f"position {gap.index[1]}")
            return
    yield Part("pass", "each prefix alone gives what it gives within the text")


@check(
    "causality-edges",
    catches="a leak only at the edges of tiles: fused kernels work in blocks of 8 to 64 tokens",
    cause="a tile on the diagonal is not masked, or the last tile of a length that is no multiple of the block",
    fix="mask each tile by its absolute positions, and test lengths around every multiple of the block size",
    kinds=CAUSAL,
    after=("causality",),
)
def causality_edges(exam: Exam) -> Iterator[Part]:
    """In a text of 67 tokens, change all tokens from just before, at and just after 8, 16, 32 and 64."""
    longest = exam.target.longest or 10_000
    length = min(max(EDGES) + 3, longest)
    around = (-1, 0, 1) if not exam.slow else (0,)
    cuts = [edge + step for edge in EDGES for step in around if edge + step < length]
    if not cuts:
        raise CannotError(f"it reads {longest} tokens at most, fewer than a tile has")
    assert exam.target.logits is not None
    yield from leaks(exam, exam.target.logits, exam.text(1, length), cuts)


@check(
    "causality-gradient",
    catches="a leak too small for logits to show, and positions that nothing reaches",
    cause=CAUSE,
    fix=FIX,
    needs=("logits", "module"),
    kinds=CAUSAL,
    after=("causality",),
)
def causality_gradient(exam: Exam) -> Part:
    """The Jacobian of the logits by the tokens' vectors: exactly zero above the diagonal, alive below it."""
    logits, tokens = exam.target.logits, exam.text(1, min(12 if not exam.slow else 8, exam.length))
    assert logits is not None
    length = tokens.shape[1]
    weights = None
    table = torch.zeros(length, length)
    with torch.enable_grad(), moved(exam.target.module, logits, tokens) as added:
        out = logits(tokens)
        if not out.requires_grad or not added:
            raise CannotError("its logits carry no gradient")
        weights = torch.randn(out.shape[-1], generator=exam.generator).to(out)
        for t in range(length):
            (slope,) = torch.autograd.grad(
                (out[0, t] * weights).sum(), added[0], retain_graph=t < length - 1, allow_unused=True
            )
            if slope is not None:
                table[t] = slope[0].float().norm(dim=-1).cpu()
    if not table.isfinite().all():
        return Part("fail", "the gradient of the logits by the text is not finite")
    above = table.triu(1)
    bound = EXACT * float(table.max())
    if float(above.max()) > bound:
        reader, seen = divmod(int(above.argmax()), length)
        message = f"the logits at position {reader} have a gradient with respect to token {seen}, which comes later"
        return Part("fail", message, float(above.max()), bound, f"position {reader}")
    if not table.any():
        if bool((out == out[..., :1]).all()):
            raise CannotError("all its logits are equal: the head is zero, as some fresh models have it")
        if (0, 0) not in unreached(exam, tokens, {0}):
            raise CannotError("its logits carry no gradient")
        return Part("fail", "the logits depend on no token at all", 0.0, 0.0)
    dead = [(t, s) for t in range(length) for s in range(t + 1) if not table[t, s] > 0]
    near = windowed(dead, length)
    if near == 0:  # an attention that is all on one key has no slope, and yet it may turn to another
        dead = [pair for pair in dead if pair in unreached(exam, tokens, {s for _, s in dead})]
        near = windowed(dead, length)
    if near == 0:
        reader, seen = dead[0]
        message = f"the logits at position {reader} do not depend on token {seen}, which they should see"
        return Part("fail", message, 0.0, 0.0, f"position {reader}")
    reach = "" if near == length else f", {near} tokens far"
    return Part("pass", f"zero for later tokens, alive for earlier ones{reach}", float(above.max()), bound)


def windowed(dead: list[tuple[int, int]], length: int) -> int:
    """How far all see, where nobody sees further than some distance: a window; 0 where that does not explain it."""
    near, without = min((t - s for t, s in dead), default=length), set(dead)
    explained = all((t - s >= near) == ((t, s) in without) for t in range(length) for s in range(t + 1))
    return near if explained else 0


@torch.no_grad()
def unreached(exam: Exam, tokens: Tensor, changing: set[int]) -> set[tuple[int, int]]:
    """The pairs (reader, token) where none of eight other tokens changes what is read."""
    logits, length = exam.target.logits, tokens.shape[1]
    assert logits is not None
    found = set()
    for s in changing:
        out = logits(torch.cat([exam.changed(tokens, slice(s, s + 1)) for _ in range(8)])).float()
        moved = (out - out[:1]).abs().amax((0, 2))
        bound = MARGIN * exam.ratio * scale_of(out)
        found |= {(t, s) for t in range(length) if not float(moved[t]) > bound}
    return found


@check(
    "causality-paths",
    catches="a leak on a path that the usual test does not take: training, another kernel, padding, a cache",
    cause="each branch makes a mask of its own: with a padding mask, a cache, dropout or another kernel",
    fix="make the mask in one place from positions, and use it on every path",
    kinds=CAUSAL,
    after=("causality",),
    quick=True,
)
def causality_paths(exam: Exam) -> Iterator[Part]:
    """Look for leaks again in training mode (with the same dropout), with gradients, by each kernel, with padding, in a
    batch, and among the tokens of a piece that is read behind a cache. The labels of a pass must not change it."""
    target, tokens = exam.target, exam.text()
    length = tokens.shape[1]
    few = FEW if not exam.slow else FEW[1:2]
    cuts = [cut for cut in few if cut < length] or [length - 1]
    assert target.logits is not None
    plain = target.logits
    for path, logits in paths(exam).items():
        yield from leaks(exam, logits, tokens, cuts, f" {path}")
    if target.padded is not None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
        yield from leaks(exam, lambda each: target.padded(each, mask), tokens, cuts, " with a mask")  # type: ignore[misc]
    if target.cached is not None and length > 6:
        head = exam.text(1, 4)

        def behind(piece: Tensor) -> Tensor:
            _, state = target.cached(head, None)  # type: ignore[misc]
            return target.cached(piece, state)[0]  # type: ignore[misc]

        body = tokens[:, : length - 4]
        yield from leaks(exam, behind, body, [c for c in cuts if c < length - 4], " within a piece behind a cache")
    if target.labelled is not None:
        yield told_labels(exam, tokens)
    twice = exam.text(3)
    yield from leaks(exam, plain, twice, cuts[:2], " in a batch of three")


def told_labels(exam: Exam, tokens: Tensor) -> Part:
    """Whether the logits know the labels that they are to be judged by."""
    labelled, other = exam.target.labelled, exam.changed(tokens)
    assert labelled is not None
    gap = exam.same(lambda: labelled(tokens, tokens), lambda: labelled(tokens, other))
    if gap.ok:
        return Part("pass", "no logit changes with the labels", gap.worst, gap.bound)
    return Part(
        "fail",
        "the logits change with the labels, which they should foretell",
        gap.worst,
        gap.bound,
        cause="the labels are read as a part of the text",
        fix="use labels for nothing but the loss",
    )


def paths(exam: Exam) -> dict[str, Logits]:
    """Ways to the logits that code tends to treat apart."""
    target = exam.target
    assert target.logits is not None
    plain = target.logits
    found: dict[str, Logits] = {}

    def with_gradients(tokens: Tensor) -> Tensor:
        with torch.enable_grad():
            return plain(tokens).detach()

    if not exam.slow or target.module is None:  # training mode takes them too
        found["with gradients"] = with_gradients
    if target.module is not None:
        module = target.module

        def training(tokens: Tensor) -> Tensor:
            with training_mode(module), torch.random.fork_rng(devices=[]):
                torch.manual_seed(exam.seed)
                return with_gradients(tokens)

        found["in training mode"] = training
    for name, logits in target.kernels.items():
        found[f"by the kernel {name}"] = logits
    return found


@contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Training mode for as long as it lasts."""
    modes = {part: part.training for part in module.modules()}
    module.train()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
