"""Gradients with respect to the token embeddings, and their comparison with finite differences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.context import CheckContext
from cutaway.check.numerics import NOISE_MARGIN, max_finite_abs
from cutaway.check.report.finding import CaseResult, SkipCheckError


def _find_embeddings(module: nn.Module, forward: Any, tokens: Tensor) -> list[nn.Module]:
    """Find the modules that take these tokens and return one vector per token."""
    embeddings: list[nn.Module] = []
    hooks = []

    def hook(submodule: nn.Module, inputs: Any, out: Any) -> None:
        returns_vectors = isinstance(out, Tensor) and out.ndim == 3 and out.is_floating_point()
        if _receives_tokens(inputs, tokens) and returns_vectors and submodule not in embeddings:
            embeddings.append(submodule)

    try:
        leaves = [submodule for submodule in module.modules() if not list(submodule.children())]
        hooks = [leaf.register_forward_hook(hook) for leaf in leaves]
        with torch.no_grad():
            forward(tokens)
    finally:
        for handle in hooks:
            handle.remove()
    return embeddings


def _receives_tokens(inputs: Any, tokens: Tensor) -> bool:
    """Whether the first input is equal to `tokens`."""
    first = inputs[0] if inputs else None
    return isinstance(first, Tensor) and first.shape == tokens.shape and bool((first == tokens).all())


@contextmanager
def add_embedding_offset(module: nn.Module | None, forward: Any, tokens: Tensor) -> Iterator[list[Tensor]]:
    """Add a tensor of zeros to the token embeddings in `forward(tokens)`.

    After the forward pass, the yielded list holds that tensor, which requires a gradient.
    """
    embeddings = [] if module is None else _find_embeddings(module, forward, tokens)
    if not embeddings:
        raise SkipCheckError("needs a module with an embedding that takes the tokens")
    offsets: list[Tensor] = []

    def add_offset(_module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        if not _receives_tokens(inputs, tokens):  # an encoder-decoder may embed the source with the same module
            return out
        if not offsets:
            offsets.append(torch.zeros_like(out, requires_grad=True))
        return out + offsets[0]

    hook = embeddings[0].register_forward_hook(add_offset)
    try:
        yield offsets
    finally:
        hook.remove()


STEP_SIZES = (1e-2, 2e-3, 5e-4)
"""Finite-difference steps relative to the RMS of the embeddings; each is also tried with half the step."""


SMOOTHNESS_TOLERANCE, GRADIENT_TOLERANCE = 0.02, 0.15
"""Relative difference below which two finite differences agree, and above which the gradient is wrong."""


def check_finite_differences(context: CheckContext) -> CaseResult:
    """Compare the gradient of a random linear combination of the logits with respect to the token embeddings with
    central finite differences in random directions."""
    module, logits = context.model.module, context.model.logits
    assert module is not None
    assert logits is not None
    tokens = context.random_tokens(1, min(8, context.seq_len))
    with torch.enable_grad(), add_embedding_offset(module, logits, tokens) as offsets:
        out = logits(tokens)
        if not offsets or not out.requires_grad:
            raise SkipCheckError("needs logits that require a gradient")
        weights = torch.randn(out.shape, generator=context.generator).to(out.device, torch.float32)
        (gradient,) = torch.autograd.grad((out.float() * weights).sum(), offsets[0], allow_unused=True)
        if gradient is None:
            return _wrong_gradient_result("the token embeddings get no gradient", 0.0)
        with torch.no_grad():
            embeddings = _find_embeddings(module, logits, tokens)[0](tokens)
            rms = max(float(embeddings.float().square().mean().sqrt()), 1e-30)
            num_directions = 3 if not context.is_slow else 1
            directions = [
                torch.randn(gradient.shape, generator=context.generator).to(gradient.device)
                for _ in range(num_directions)
            ]
            analytic = torch.tensor([float((gradient.float() * direction).sum()) for direction in directions])

            def finite_difference(step: float) -> Tensor:
                """Central difference in each direction."""
                slopes = []
                for direction in directions:
                    ends = []
                    for sign in (1.0, -1.0):
                        offsets[0].data = (sign * step * direction).to(offsets[0].dtype)
                        ends.append(float((logits(tokens).float() * weights).sum(dtype=torch.float64)))
                    slopes.append((ends[0] - ends[1]) / (2 * step))
                return torch.tensor(slopes)

            is_smooth = False
            for step in STEP_SIZES:  # a shorter step may avoid a kink (ReLU, top-k routing)
                coarse, numeric = finite_difference(step * rms), finite_difference(step * rms / 2)
                noise = NOISE_MARGIN * context.noise_ratio * max_finite_abs(out) * out.numel() ** 0.5 / (step * rms)
                scale = max(float(numeric.norm()), float(analytic.norm()))
                error, tolerance = float((analytic - numeric).norm()), GRADIENT_TOLERANCE * scale + noise
                if error <= tolerance:
                    message = "the gradient with respect to the token embeddings equals finite differences"
                    return CaseResult("pass", message, error, tolerance)
                is_smooth = is_smooth or float((coarse - numeric).norm()) <= SMOOTHNESS_TOLERANCE * scale
    if not is_smooth:
        raise SkipCheckError("needs logits that are smooth in the token embeddings")
    message = "the gradient with respect to the token embeddings differs from finite differences: "
    message += f"{float(analytic[0]):.4g} instead of {float(numeric[0]):.4g}"
    return _wrong_gradient_result(message, error, tolerance)


def _wrong_gradient_result(message: str, measured: float, threshold: float = 0.0) -> CaseResult:
    return CaseResult(
        "fail",
        message,
        measured,
        threshold,
        cause="the graph is cut (detach(), no_grad(), .data), or the backward of a custom autograd.Function is wrong",
        fix="compare gradients layer by layer; test custom backward functions with torch.autograd.gradcheck",
    )
