"""Gradients with respect to the token embeddings, and their comparison with finite differences."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import LogitsFunction
from cutaway.check.context import CheckContext
from cutaway.check.module_state import require_unscripted
from cutaway.check.numerics import NOISE_MARGIN, Args, max_finite_abs
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, success


@torch.no_grad()
def _find_embeddings(module: nn.Module, forward: LogitsFunction, tokens: Tensor) -> list[nn.Module]:
    """Modules without submodules that `forward(tokens)` calls with `tokens`, and that return one vector per token."""
    embeddings: list[nn.Module] = []

    def record(submodule: nn.Module, inputs: Args, out: object) -> None:
        returns_vectors = isinstance(out, Tensor) and out.ndim == 3 and out.is_floating_point()
        if _receives_tokens(inputs, tokens) and returns_vectors and submodule not in embeddings:
            embeddings.append(submodule)

    with ExitStack() as hooks:
        for submodule in module.modules():
            if not list(submodule.children()):
                hooks.enter_context(submodule.register_forward_hook(record))
        forward(tokens)
    return embeddings


def _receives_tokens(inputs: Args, tokens: Tensor) -> bool:
    """Whether the first of a module's `inputs` is equal to `tokens`."""
    first = inputs[0] if inputs else None
    if not isinstance(first, Tensor) or first.is_nested:  # a nested tensor, as in nn.TransformerEncoder, has no shape
        return False
    return first.shape == tokens.shape and bool((first == tokens).all())


@contextmanager
def add_embedding_offset(module: nn.Module | None, forward: LogitsFunction, tokens: Tensor) -> Iterator[list[Tensor]]:
    """Add a tensor of zeros to the token embeddings in `forward(tokens)`.

    After the forward pass, the yielded list holds that tensor, which requires a gradient.
    """
    require_unscripted(module)
    embeddings = [] if module is None else _find_embeddings(module, forward, tokens)
    if not embeddings:
        raise SkipCheckError("needs a module with an embedding that takes the tokens")
    offsets: list[Tensor] = []

    def add_offset(_module: nn.Module, inputs: Args, out: Tensor) -> Tensor:
        if not _receives_tokens(inputs, tokens):  # an encoder-decoder may embed the source with the same module
            return out
        if not offsets:
            offsets.append(torch.zeros_like(out, requires_grad=True))
        return out + offsets[0]

    with embeddings[0].register_forward_hook(add_offset):
        yield offsets


def forward_with_offset(module: nn.Module | None, forward: LogitsFunction, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `forward(tokens)` and the zeros that `add_embedding_offset` adds, which require a gradient.

    Raises SkipCheckError if the result does not require a gradient.
    """
    with torch.enable_grad(), add_embedding_offset(module, forward, tokens) as offsets:
        out = forward(tokens)
    if not out.requires_grad or not offsets:
        raise SkipCheckError("the logits require no gradient")
    return out, offsets[0]


_STEP_SIZES = (1e-2, 2e-3, 5e-4)
"""Finite-difference steps relative to the RMS of the embeddings; each is also tried with half the step."""


_SMOOTHNESS_TOLERANCE, _GRADIENT_TOLERANCE = 0.02, 0.15
"""Relative difference up to which two finite differences agree, and relative error above which a gradient is wrong."""


def check_finite_differences(ctx: CheckContext) -> CaseResult:
    """Compare the gradient with respect to the token embeddings with central finite differences in random directions.

    The differentiated value is a random linear combination of the logits.
    """
    module, logits = ctx.module, ctx.logits
    tokens = ctx.random_tokens(1, min(8, ctx.seq_len))
    with torch.enable_grad(), add_embedding_offset(module, logits, tokens) as offsets:
        out = logits(tokens)
        if not offsets or not out.requires_grad:
            raise SkipCheckError("needs logits that require a gradient")
        weights = torch.randn(out.shape, generator=ctx.generator).to(out.device, torch.float32)
        (gradient,) = torch.autograd.grad((out.float() * weights).sum(), offsets[0], allow_unused=True)
        if gradient is None:
            return _wrong_gradient_result("the token embeddings get no gradient", 0.0)
        with torch.no_grad():
            embeddings = _find_embeddings(module, logits, tokens)[0](tokens)
            rms = max(float(embeddings.float().square().mean().sqrt()), 1e-30)
            num_directions = 3 if not ctx.is_slow else 1
            directions = [
                torch.randn(gradient.shape, generator=ctx.generator).to(gradient.device) for _ in range(num_directions)
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
            for step in _STEP_SIZES:  # a shorter step may avoid a kink (ReLU, top-k routing)
                numeric = finite_difference(step * rms / 2)
                noise = NOISE_MARGIN * ctx.noise_ratio * max_finite_abs(out) * out.numel() ** 0.5 / (step * rms)
                scale = max(float(numeric.norm()), float(analytic.norm()))
                error, tolerance = float((analytic - numeric).norm()), _GRADIENT_TOLERANCE * scale + noise
                if error <= tolerance:
                    message = "the gradient with respect to the token embeddings equals finite differences"
                    return success(message, error, tolerance)
                coarse = finite_difference(step * rms)
                is_smooth = is_smooth or float((coarse - numeric).norm()) <= _SMOOTHNESS_TOLERANCE * scale
    if not is_smooth:
        raise SkipCheckError("needs logits that are smooth in the token embeddings")
    message = "the gradient with respect to the token embeddings differs from finite differences: "
    message += f"{float(analytic[0]):.4g} instead of {float(numeric[0]):.4g}"
    return _wrong_gradient_result(message, error, tolerance)


def _wrong_gradient_result(message: str, measured: float, threshold: float = 0.0) -> CaseResult:
    return failure(
        message,
        measured,
        threshold,
        cause="the graph is cut (detach(), no_grad(), .data), or the backward of a custom autograd.Function is wrong",
        fix="compare gradients layer by layer; test custom backward functions with torch.autograd.gradcheck",
    )
