"""Gradients with respect to the vectors that tokens become, and whether they are what moving these vectors does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.context import CheckContext
from cutaway.check.numerics import NOISE_MARGIN, max_finite_abs
from cutaway.check.report.finding import CaseResult, SkipCheckError


def _find_embeddings(module: nn.Module, forward: Any, tokens: Tensor) -> list[nn.Module]:
    """The modules that are given just these tokens and give a vector for each."""
    found: list[nn.Module] = []
    hooks = []

    def look(part: nn.Module, given: Any, out: Any) -> None:
        same = _receives_tokens(given, tokens)
        if same and isinstance(out, Tensor) and out.ndim == 3 and out.is_floating_point() and part not in found:
            found.append(part)

    try:
        hooks = [part.register_forward_hook(look) for part in module.modules() if not list(part.children())]
        with torch.no_grad():
            forward(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _receives_tokens(inputs: Any, tokens: Tensor) -> bool:
    """Whether these arguments are just these tokens."""
    first = inputs[0] if inputs else None
    return isinstance(first, Tensor) and first.shape == tokens.shape and bool((first == tokens).all())


@contextmanager
def add_embedding_offset(module: nn.Module | None, forward: Any, tokens: Tensor) -> Iterator[list[Tensor]]:
    """While it lasts, `forward(tokens)` adds zeros to the tokens' vectors; the list then holds them, for gradients."""
    found = [] if module is None else _find_embeddings(module, forward, tokens)
    if not found:
        raise SkipCheckError("needs the module, with an embedding that is given the tokens")
    added: list[Tensor] = []

    def add(_part: nn.Module, given: Any, out: Tensor) -> Tensor:
        if not _receives_tokens(given, tokens):  # of an encoder-decoder, the source may be read by the same table
            return out
        if not added:
            added.append(torch.zeros_like(out, requires_grad=True))
        return out + added[0]

    hook = found[0].register_forward_hook(add)
    try:
        yield added
    finally:
        hook.remove()


STEP_SIZES = (1e-2, 2e-3, 5e-4)
"""Of the vectors' usual size: how far they are moved, and half as far."""


SMOOTHNESS_TOLERANCE, GRADIENT_TOLERANCE = 0.02, 0.15
"""How far two slopes may be apart to be called one, and the gradient from them to be called another."""


def check_finite_differences(context: CheckContext) -> CaseResult:
    """Move the text's vectors a little to both sides, in random directions: what a random sum of the logits changes by
    must be what its gradient says."""
    module, logits = context.model.module, context.model.logits
    assert module is not None
    assert logits is not None
    tokens = context.random_tokens(1, min(8, context.seq_len))
    with torch.enable_grad(), add_embedding_offset(module, logits, tokens) as added:
        out = logits(tokens)
        if not added or not out.requires_grad:
            raise SkipCheckError("needs logits that carry a gradient")
        weights = torch.randn(out.shape, generator=context.generator).to(out.device, torch.float32)
        (gradient,) = torch.autograd.grad((out.float() * weights).sum(), added[0], allow_unused=True)
        if gradient is None:
            return _wrong_gradient_result("the text's vectors get no gradient", 0.0)
        with torch.no_grad():
            size = max(float(_find_embeddings(module, logits, tokens)[0](tokens).float().square().mean().sqrt()), 1e-30)
            count = 3 if not context.is_slow else 1
            directions = [
                torch.randn(gradient.shape, generator=context.generator).to(gradient.device) for _ in range(count)
            ]
            due = torch.tensor([float((gradient.float() * each).sum()) for each in directions])

            def risen(step: float) -> Tensor:
                """How fast the sum rises in each direction, over two steps."""
                found = []
                for each in directions:
                    ends = []
                    for sign in (1.0, -1.0):
                        added[0].data = (sign * step * each).to(added[0].dtype)
                        ends.append(float((logits(tokens).float() * weights).sum(dtype=torch.float64)))
                    found.append((ends[0] - ends[1]) / (2 * step))
                return torch.tensor(found)

            smooth = False
            for step in STEP_SIZES:  # where a long step meets an edge, a short one may not
                one, seen = risen(step * size), risen(step * size / 2)
                noise = NOISE_MARGIN * context.noise_ratio * max_finite_abs(out) * out.numel() ** 0.5 / (step * size)
                whole = max(float(seen.norm()), float(due.norm()))
                gap, bound = float((due - seen).norm()), GRADIENT_TOLERANCE * whole + noise
                if gap <= bound:
                    return CaseResult("pass", "the gradient by the text's vectors is what moving them does", gap, bound)
                smooth = smooth or float((one - seen).norm()) <= SMOOTHNESS_TOLERANCE * whole
    if not smooth:
        raise SkipCheckError("needs logits that change smoothly with the text's vectors")
    said = f"the gradient by the text's vectors is {float(due[0]):.4g} where moving them gives {float(seen[0]):.4g}"
    return _wrong_gradient_result(said, gap, bound)


def _wrong_gradient_result(message: str, measured: float, threshold: float = 0.0) -> CaseResult:
    return CaseResult(
        "fail",
        message,
        measured,
        threshold,
        cause="a part of the way back is cut (detach(), no_grad(), .data), or a backward pass of one's own is wrong",
        fix="follow the gradient back layer by layer; compare one's own backward with torch.autograd.gradcheck",
    )
