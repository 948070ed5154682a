"""No token may see what comes after it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.checked_model import LogitsFunction
from cutaway.check.context import CheckContext
from cutaway.check.module_state import training_mode
from cutaway.check.numerics import NOISE_MARGIN, Difference, max_finite_abs
from cutaway.check.probes.embedding_gradients import add_embedding_offset
from cutaway.check.probes.first_divergence import find_first_divergence
from cutaway.check.registry import CAUSAL_KINDS, register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

CAUSE = "the causal mask is missing, shifted by one, transposed, or not applied on this path"
FIX = (
    "hide key j from query i wherever j > i, with -inf before the softmax, on every path; a model that is meant to see "
    "both sides is checked with kind='encoder'"
)
TILE_SIZES = (8, 16, 32, 64)
ZERO_GRADIENT_RATIO = 1e-12
"""A hidden token weighs exactly nothing: this share of the largest gradient is far below any rounding."""
PATH_CUTS = (1, 6, 23)
"""Cuts that are tried on every path."""


def _check_leaks(
    context: CheckContext, logits: LogitsFunction, tokens: Tensor, cuts: list[int], path: str = ""
) -> Iterator[CaseResult]:
    """Change all tokens from each cut on; a logit before it that changes is a leak."""
    with torch.no_grad():
        base = logits(tokens)
    worst = Difference(0.0, 0.0, ())
    for cut in cuts:
        other = context.replace_tokens(tokens, slice(cut, None))
        gap = context.compare(
            lambda: logits(tokens)[:, :cut],
            lambda: logits(other)[:, :cut],
            first_result=base[:, :cut],
        )
        worst = max(worst, gap, key=lambda each: each.max_abs)
        if not gap.within_tolerance:
            yield _leak_result(context, logits, tokens, cut, gap, path)
            return
    yield CaseResult(
        "pass", f"no logit changes with a later token{path}, at {len(cuts)} cuts", worst.max_abs, worst.tolerance
    )


def _leak_result(
    context: CheckContext, logits: LogitsFunction, tokens: Tensor, cut: int, diff: Difference, path: str
) -> CaseResult:
    """A leak in words: who sees what, and in which module it begins."""
    reader = diff.index[1]
    for at in range(cut, tokens.shape[1]):
        other = context.replace_tokens(tokens, slice(at, at + 1))
        if not context.compare(lambda: logits(tokens)[:, reader], lambda: logits(other)[:, reader]).within_tolerance:
            break
    module = find_first_divergence(context, lambda: logits(tokens), lambda: logits(other), slice(0, cut))
    where = f"position {reader}" + (f", first in {module}" if module else "")
    message = f"the logits at position {reader} change with token {at}, which comes later{path}"
    return CaseResult("fail", message, diff.max_abs, diff.tolerance, where)


@register_check(
    "causality",
    catches="a token that sees later tokens, so that training is told the answers: a leak that looks like learning",
    cause=CAUSE,
    fix=FIX,
    kinds=CAUSAL_KINDS,
    preflight=True,
)
def causality(context: CheckContext) -> Iterator[CaseResult]:
    """Change all tokens from a position on, at every position: the logits before must stay. Then read prefixes alone:
    each must give the logits that it has within the whole text."""
    logits, tokens = context.model.logits, context.random_tokens()
    assert logits is not None
    yield from _check_leaks(context, logits, tokens, list(range(1, tokens.shape[1])))
    with torch.no_grad():
        base = logits(tokens)
    for cut in range(1, tokens.shape[1], 2 if not context.is_slow else 5):
        gap = context.compare(
            lambda: logits(tokens)[:, :cut],
            lambda: logits(tokens[:, :cut]),
            first_result=base[:, :cut],
        )
        if not gap.within_tolerance:
            message = f"the first {cut} tokens alone give other logits than within {tokens.shape[1]} tokens"
            yield CaseResult("fail", message, gap.max_abs, gap.tolerance, f"position {gap.index[1]}")
            return
    yield CaseResult("pass", "each prefix alone gives what it gives within the text")


@register_check(
    "causality-tile-edges",
    catches="a leak only at the edges of tiles: fused kernels work in blocks of 8 to 64 tokens",
    cause="a tile on the diagonal is not masked, or the last tile of a length that is no multiple of the block",
    fix="mask each tile by its absolute positions, and test lengths around every multiple of the block size",
    kinds=CAUSAL_KINDS,
    depends_on=("causality",),
)
def causality_tile_edges(context: CheckContext) -> Iterator[CaseResult]:
    """In a text of 67 tokens, change all tokens from just before, at and just after 8, 16, 32 and 64."""
    longest = context.model.max_seq_len or 10_000
    length = min(max(TILE_SIZES) + 3, longest)
    around = (-1, 0, 1) if not context.is_slow else (0,)
    cuts = [edge + step for edge in TILE_SIZES for step in around if edge + step < length]
    if not cuts:
        raise SkipCheckError(f"it reads {longest} tokens at most, fewer than a tile has")
    assert context.model.logits is not None
    yield from _check_leaks(context, context.model.logits, context.random_tokens(1, length), cuts)


@register_check(
    "causality-gradient",
    catches="a leak too small for logits to show, and positions that nothing reaches",
    cause=CAUSE,
    fix=FIX,
    needs=("logits", "module"),
    kinds=CAUSAL_KINDS,
    depends_on=("causality",),
)
def causality_gradient(context: CheckContext) -> CaseResult:
    """The Jacobian of the logits by the tokens' vectors: exactly zero above the diagonal, alive below it."""
    logits, tokens = (
        context.model.logits,
        context.random_tokens(1, min(12 if not context.is_slow else 8, context.seq_len)),
    )
    assert logits is not None
    length = tokens.shape[1]
    weights = None
    table = torch.zeros(length, length)
    with torch.enable_grad(), add_embedding_offset(context.model.module, logits, tokens) as added:
        out = logits(tokens)
        if not out.requires_grad or not added:
            raise SkipCheckError("its logits carry no gradient")
        weights = torch.randn(out.shape[-1], generator=context.generator).to(out)
        for t in range(length):
            (slope,) = torch.autograd.grad(
                (out[0, t] * weights).sum(), added[0], retain_graph=t < length - 1, allow_unused=True
            )
            if slope is not None:
                table[t] = slope[0].float().norm(dim=-1).cpu()
    if not table.isfinite().all():
        return CaseResult("fail", "the gradient of the logits by the text is not finite")
    above = table.triu(1)
    bound = ZERO_GRADIENT_RATIO * float(table.max())
    if float(above.max()) > bound:
        reader, seen = divmod(int(above.argmax()), length)
        message = f"the logits at position {reader} have a gradient with respect to token {seen}, which comes later"
        return CaseResult("fail", message, float(above.max()), bound, f"position {reader}")
    if not table.any():
        if bool((out == out[..., :1]).all()):
            raise SkipCheckError("all its logits are equal: the head is zero, as some fresh models have it")
        if (0, 0) not in _find_independent_pairs(context, tokens, {0}):
            raise SkipCheckError("its logits carry no gradient")
        return CaseResult("fail", "the logits depend on no token at all", 0.0, 0.0)
    dead = [(t, s) for t in range(length) for s in range(t + 1) if not table[t, s] > 0]
    near = _infer_window(dead, length)
    if near == 0:  # an attention that is all on one key has no slope, and yet it may turn to another
        dead = [pair for pair in dead if pair in _find_independent_pairs(context, tokens, {s for _, s in dead})]
        near = _infer_window(dead, length)
    if near == 0:
        reader, seen = dead[0]
        message = f"the logits at position {reader} do not depend on token {seen}, which they should see"
        return CaseResult("fail", message, 0.0, 0.0, f"position {reader}")
    reach = "" if near == length else f", {near} tokens far"
    return CaseResult("pass", f"zero for later tokens, alive for earlier ones{reach}", float(above.max()), bound)


def _infer_window(zero_pairs: list[tuple[int, int]], seq_len: int) -> int:
    """How far all see, where nobody sees further than some distance: a window; 0 where that does not explain it."""
    near, without = min((t - s for t, s in zero_pairs), default=seq_len), set(zero_pairs)
    explained = all((t - s >= near) == ((t, s) in without) for t in range(seq_len) for s in range(t + 1))
    return near if explained else 0


@torch.no_grad()
def _find_independent_pairs(context: CheckContext, tokens: Tensor, positions: set[int]) -> set[tuple[int, int]]:
    """The pairs (reader, token) where none of eight other tokens changes what is read."""
    logits, length = context.model.logits, tokens.shape[1]
    assert logits is not None
    found = set()
    for s in positions:
        out = logits(torch.cat([context.replace_tokens(tokens, slice(s, s + 1)) for _ in range(8)])).float()
        moved = (out - out[:1]).abs().amax((0, 2))
        bound = NOISE_MARGIN * context.noise_ratio * max_finite_abs(out)
        found |= {(t, s) for t in range(length) if not float(moved[t]) > bound}
    return found


@register_check(
    "causality-paths",
    catches="a leak on a path that the usual test does not take: training, another kernel, padding, a cache",
    cause="each branch makes a mask of its own: with a padding mask, a cache, dropout or another kernel",
    fix="make the mask in one place from positions, and use it on every path",
    kinds=CAUSAL_KINDS,
    depends_on=("causality",),
    preflight=True,
)
def causality_paths(context: CheckContext) -> Iterator[CaseResult]:
    """Look for leaks again in training mode (with the same dropout), with gradients, by each kernel, with padding, in a
    batch, and among the tokens of a piece that is read behind a cache. The labels of a pass must not change it."""
    target, tokens = context.model, context.random_tokens()
    length = tokens.shape[1]
    few = PATH_CUTS if not context.is_slow else PATH_CUTS[1:2]
    cuts = [cut for cut in few if cut < length] or [length - 1]
    assert target.logits is not None
    plain = target.logits
    for path, logits in _forward_paths(context).items():
        yield from _check_leaks(context, logits, tokens, cuts, f" {path}")
    if target.logits_with_mask is not None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
        yield from _check_leaks(context, lambda each: target.logits_with_mask(each, mask), tokens, cuts, " with a mask")  # type: ignore[misc]
    if target.logits_with_cache is not None and length > 6:
        head = context.random_tokens(1, 4)

        def behind(piece: Tensor) -> Tensor:
            _, state = target.logits_with_cache(head, None)  # type: ignore[misc]
            return target.logits_with_cache(piece, state)[0]  # type: ignore[misc]

        body = tokens[:, : length - 4]
        yield from _check_leaks(
            context, behind, body, [c for c in cuts if c < length - 4], " within a piece behind a cache"
        )
    if target.logits_with_labels is not None:
        yield _check_label_leak(context, tokens)
    twice = context.random_tokens(3)
    yield from _check_leaks(context, plain, twice, cuts[:2], " in a batch of three")


def _check_label_leak(context: CheckContext, tokens: Tensor) -> CaseResult:
    """Whether the logits know the labels that they are to be judged by."""
    labelled, other = context.model.logits_with_labels, context.replace_tokens(tokens)
    assert labelled is not None
    gap = context.compare(lambda: labelled(tokens, tokens), lambda: labelled(tokens, other))
    if gap.within_tolerance:
        return CaseResult("pass", "no logit changes with the labels", gap.max_abs, gap.tolerance)
    return CaseResult(
        "fail",
        "the logits change with the labels, which they should foretell",
        gap.max_abs,
        gap.tolerance,
        cause="the labels are read as a part of the text",
        fix="use labels for nothing but the loss",
    )


def _forward_paths(context: CheckContext) -> dict[str, LogitsFunction]:
    """Ways to the logits that code tends to treat apart."""
    target = context.model
    assert target.logits is not None
    plain = target.logits
    found: dict[str, LogitsFunction] = {}

    def with_gradients(tokens: Tensor) -> Tensor:
        with torch.enable_grad():
            return plain(tokens).detach()

    if not context.is_slow or target.module is None:  # training mode takes them too
        found["with gradients"] = with_gradients
    if target.module is not None:
        module = target.module

        def training(tokens: Tensor) -> Tensor:
            with training_mode(module), torch.random.fork_rng(devices=[]):
                torch.manual_seed(context.seed)
                return with_gradients(tokens)

        found["in training mode"] = training
    for name, logits in target.logits_by_kernel.items():
        found[f"by the kernel {name}"] = logits
    return found
