"""Causality checks: causality, causality-tile-edges, causality-gradient, causality-paths."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.checked_model import LogitsFunction, require
from cutaway.check.context import CheckContext
from cutaway.check.module_state import preserve_state, run_in_fp64
from cutaway.check.numerics import NOISE_MARGIN, Difference, difference_by_position
from cutaway.check.probes.embedding_gradients import forward_with_offset
from cutaway.check.probes.first_divergence import find_first_divergence
from cutaway.check.registry import CAUSAL_KINDS, register_check
from cutaway.check.report.finding import CaseResult, MeasuredArray, SkipCheckError, failure, success
from cutaway.errors import format_raised

_LONG_PREFIX_LEN = 40
"""Length of a prefix that is compared with the sequence that it is a part of."""
_NUM_OTHER_SEQUENCES = 8
"""Number of sequences in which a position must not depend on an earlier token to report a bug."""
_TILE_SIZES = (8, 16, 32, 64)
_ZERO_GRADIENT_RATIO = 1e-12
"""Gradient with respect to a later token, relative to the largest gradient, that counts as zero. With a mask, a correct
gradient is exactly zero; an FFT convolution leaves rounding errors, which exceed this limit in fp32."""
_MAX_ROUNDING_SHARE = 1e-3
"""A gradient is a rounding error if it is smaller by this factor in fp64, whose eps is smaller by a factor of 2e-9."""
_PATH_CUTS = (1, 6, 23)
"""On every code path, all tokens from one of these positions on are replaced."""


def _check_leaks(
    ctx: CheckContext, logits: LogitsFunction, tokens: Tensor, cuts: list[int], path: str = ""
) -> CaseResult:
    """For each position in `cuts`, replace all tokens from there on: if an earlier logit changes, there is a leak.

    `path` names the code path in the message.
    """
    base = ctx.base_logits(tokens) if logits is ctx.logits else logits(tokens)
    worst = Difference(0.0, 0.0, ())
    array = MeasuredArray(
        "matrix",
        "Largest change of a logit if all tokens from one position on are replaced",
        "position of the logits",
        "first replaced token",
        [],
        [str(cut) for cut in cuts],
        "zero to the left of the first replaced token",
    )
    for cut in cuts:
        other = ctx.replace_tokens(tokens, slice(cut, None))
        changed = logits(other)
        diff = ctx.compare(
            lambda: logits(tokens)[:, :cut],
            lambda: logits(other)[:, :cut],
            first_result=base[:, :cut],
            second_result=changed[:, :cut],
        )
        array.values.append(difference_by_position(base, changed))
        worst = max(worst, diff, key=lambda item: item.max_abs)
        if not diff.within_tolerance:
            result = _leak_result(ctx, logits, tokens, cut, diff, path, array)
            for later in cuts[len(array.values) :]:  # the other rows of the figure
                other = ctx.replace_tokens(tokens, slice(later, None))
                array.values.append(difference_by_position(base, logits(other)))
            return result
    positions = "1 position" if len(cuts) == 1 else f"{len(cuts)} positions"
    return worst.success(f"no logit changes with a later token{path} ({positions})", array)


def _leak_result(
    ctx: CheckContext,
    logits: LogitsFunction,
    tokens: Tensor,
    cut: int,
    diff: Difference,
    path: str,
    array: MeasuredArray,
) -> CaseResult:
    """Describe a leak: the position, the later token that changes its logits, and the first module that differs."""
    position = diff.index[1]
    for later in range(cut, tokens.shape[1]):
        other = ctx.replace_tokens(tokens, slice(later, later + 1))
        if not ctx.compare(lambda: logits(tokens)[:, position], lambda: logits(other)[:, position]).within_tolerance:
            break
    module = find_first_divergence(ctx, lambda: logits(tokens), lambda: logits(other), slice(0, cut))
    location = f"position {position}" + (f", first in {module}" if module else "")
    message = f"the logits at position {position}{path} change with token {later}, which comes later"
    return diff.failure(message, location, array=array)


@register_check("causality", kinds=CAUSAL_KINDS, preflight=True)
def causality(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a token that attends to later tokens: the training loss falls because the labels leak into the input.

    For every position (every second one of a large model), replace all tokens from there on: the earlier logits must
    not change. Then run prefixes alone:
    each must give the same logits as within the full sequence.

    Cause: the causal mask is missing, shifted by one, transposed, or not applied on this code path.
    Fix: mask key j for query i wherever j > i, with -inf before the softmax, on every code path; check a bidirectional
    model with kind='encoder'.
    """
    logits, tokens = ctx.logits, ctx.random_tokens()
    yield _check_leaks(ctx, logits, tokens, list(range(1, tokens.shape[1], 2 if ctx.is_slow else 1)))
    base = ctx.base_logits(tokens)
    for cut in range(1, tokens.shape[1], 2 if not ctx.is_slow else 5):
        diff = ctx.compare(lambda: logits(tokens)[:, :cut], lambda: logits(tokens[:, :cut]), first_result=base[:, :cut])
        if not diff.within_tolerance:
            message = f"the logits of the first {cut} tokens alone differ from those within {tokens.shape[1]} tokens"
            yield diff.failure(message, f"position {diff.index[1]}")
            return
    yield success("each prefix alone gives the same logits as within the sequence")


@register_check("causality-tile-edges", kinds=CAUSAL_KINDS, depends_on=("causality",))
def causality_tile_edges(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a leak only at tile boundaries: fused kernels process tiles of 8 to 64 tokens.

    In a sequence of 67 tokens, replace all tokens from a position on, for positions just before, at and just after 8,
    16, 32 and 64: the earlier logits must not change. Its first 40 tokens alone must give the same logits.

    Cause: a tile on the diagonal, or the last, partial tile of a sequence, is not masked.
    Fix: mask each tile by its absolute positions, and test lengths around every multiple of the tile size.
    """
    longest = ctx.model.max_seq_len or 10_000
    length = min(max(_TILE_SIZES) + 3, longest)
    offsets = (-1, 0, 1) if not ctx.is_slow else (0,)
    cuts = [edge + offset for edge in _TILE_SIZES for offset in offsets if edge + offset < length]
    if not cuts:
        raise SkipCheckError(f"the model's maximum length is {longest}, shorter than a tile")
    tokens = ctx.random_tokens(1, length)
    yield _check_leaks(ctx, ctx.logits, tokens, cuts)
    if length > _LONG_PREFIX_LEN and not ctx.is_slow:
        prefix = tokens[:, : ctx.model.supported_length(_LONG_PREFIX_LEN)]
        diff = ctx.compare(lambda: ctx.logits(tokens)[:, : prefix.shape[1]], lambda: ctx.logits(prefix))
        yield diff.expect_equal(
            passed=f"the first {prefix.shape[1]} of {length} tokens alone give the same logits",
            failed=f"the logits of the first {prefix.shape[1]} tokens alone differ from those within {length} tokens",
            location=f"position {diff.index[1]}",
        )


@register_check("causality-gradient", needs=("logits", "module"), kinds=CAUSAL_KINDS, depends_on=("causality",))
def causality_gradient(ctx: CheckContext) -> CaseResult:
    """Catches a leak too small to change the logits visibly, and tokens that no later position depends on.

    The Jacobian of the logits with respect to the token embeddings must be zero above the diagonal, and nonzero on and
    below it. If it is not exactly zero, it is computed again in fp64: rounding errors, such as those of an FFT
    convolution, become smaller by many orders of magnitude, and a leak does not.

    Cause: the causal mask is missing, shifted by one, transposed, or not applied on this code path.
    Fix: mask key j for query i wherever j > i, with -inf before the softmax, on every code path; check a bidirectional
    model with kind='encoder'.
    """
    tokens = ctx.random_tokens(1, min(8 if ctx.is_slow else 12, ctx.seq_len))
    length = tokens.shape[1]
    out, norms = _gradient_norms(ctx, tokens)
    if not norms.isfinite().all():
        return failure("the gradient of the logits with respect to the token embeddings is not finite")
    array = MeasuredArray(
        "matrix",
        "Gradient norm of the logits with respect to the token embeddings",
        "token",
        "position of the logits",
        norms.tolist(),
        expected="zero above the diagonal, nonzero on and below it",
    )
    above = norms.triu(1)
    tolerance = _ZERO_GRADIENT_RATIO * float(norms.max())
    is_rounding = float(above.max()) > tolerance and _is_rounding_error(ctx, tokens, norms)
    if float(above.max()) > tolerance and not is_rounding:
        position, token = divmod(int(above.argmax()), length)
        message = f"the logits at position {position} have a gradient with respect to token {token}, which comes later"
        return failure(message, float(above.max()), tolerance, f"position {position}", array=array)
    if not norms.any():
        if bool((out == out[..., :1]).all()):
            raise SkipCheckError("all logits are equal: some models initialize the head to zero")
        if (0, 0) not in _find_independent_pairs(ctx, tokens, {0}):
            raise SkipCheckError("the logits require no gradient")
        return failure("the logits do not depend on any token", 0.0, 0.0)
    dead = [(t, s) for t in range(length) for s in range(t + 1) if not norms[t, s] > 0]
    window = _infer_window(dead, length)
    if window == 0:  # saturated attention has zero gradient, but may still depend on the token
        dead = [pair for pair in dead if pair in _find_independent_pairs(ctx, tokens, {s for _, s in dead})]
        window = _infer_window(dead, length)
    if window == 0:  # routing may skip attention for some tokens, but not for those of other sequences
        first = dead[0]
        for _ in range(_NUM_OTHER_SEQUENCES):
            other = ctx.random_tokens(1, length)
            dead = dead and [pair for pair in dead if pair in _find_independent_pairs(ctx, other, {s for _, s in dead})]
        if not dead:
            message = f"position {first[0]} depends on token {first[1]} in other sequences only"
            return success(f"the gradient is zero for later tokens; {message}", float(above.max()), array=array)
        position, token = dead[0]
        message = f"the logits at position {position} do not depend on token {token}, which should be visible"
        return failure(message, 0.0, 0.0, f"position {position}", array=array)
    reach = "" if window == length else f" within {window} tokens"
    rounding = " (up to rounding errors)" if is_rounding else ""
    message = f"the gradient is zero for later tokens{rounding} and nonzero for earlier ones{reach}"
    return success(message, float(above.max()), None if is_rounding else tolerance, array=array)


def _gradient_norms(ctx: CheckContext, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient norms (position, token) of a random combination of the logits of each position."""
    length = tokens.shape[1]
    norms = torch.zeros(length, length)
    out, offset = forward_with_offset(ctx.model.module, ctx.logits, tokens)
    generator = torch.Generator().manual_seed(ctx.seed)
    weights = torch.randn(out.shape[-1], generator=generator, dtype=torch.float32).to(out)
    for t in range(length):
        with torch.enable_grad():
            value = (out[0, t] * weights).sum()
        (gradient,) = torch.autograd.grad(value, offset, retain_graph=t < length - 1, allow_unused=True)
        if gradient is not None:
            norms[t] = gradient[0].norm(dim=-1).cpu()
    return out, norms


def _is_rounding_error(ctx: CheckContext, tokens: Tensor, norms: Tensor) -> bool:
    """Whether the gradients (position, token) of later tokens in `norms` are rounding errors, which vanish in fp64.

    Raises SkipCheckError if they are as small as rounding errors, and the model does not run in fp64.
    """
    above = float(norms.triu(1).max())
    try:
        with run_in_fp64(ctx.module):
            out, fp64_norms = _gradient_norms(ctx, tokens)
    except Exception as error:  # any exception means that the model does not run in fp64
        reason = f": it {format_raised(error)}"
    else:
        if out.dtype == torch.float64:
            return float(fp64_norms.triu(1).max()) <= _MAX_ROUNDING_SHARE * above
        reason = ""
    if above > NOISE_MARGIN * ctx.noise_ratio * float(norms.max()):
        return False
    raise SkipCheckError(
        f"the gradients of later tokens are as small as rounding errors, and the model does not run in fp64{reason}"
    )


def _infer_window(zero_pairs: list[tuple[int, int]], seq_len: int) -> int:
    """The sliding window that explains all pairs (position, token) in `zero_pairs`; 0 if no window does."""
    window, independent = min((t - s for t, s in zero_pairs), default=seq_len), set(zero_pairs)
    explained = all((t - s >= window) == ((t, s) in independent) for t in range(seq_len) for s in range(t + 1))
    return window if explained else 0


def _find_independent_pairs(ctx: CheckContext, tokens: Tensor, positions: set[int]) -> set[tuple[int, int]]:
    """Pairs (t, s), s in `positions`, where none of eight replacements of token s changes the logits at position t."""
    logits, length = ctx.logits, tokens.shape[1]
    pairs = set()
    for s in positions:
        out = logits(torch.cat([ctx.replace_tokens(tokens, slice(s, s + 1)) for _ in range(8)])).float()
        change = (out - out[:1]).abs().amax((0, 2))
        tolerance = ctx.rounding_tolerance(out)
        pairs |= {(t, s) for t in range(length) if not float(change[t]) > tolerance}
    return pairs


@register_check("causality-paths", kinds=CAUSAL_KINDS, depends_on=("causality",), preflight=True)
def causality_paths(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a leak on a code path that a plain forward pass does not take: training, another kernel, padding, a
    cache.

    Repeat the causality check in training mode (with the same dropout masks in all runs), with gradients, with each
    kernel, with a mask, in a batch, and within a chunk after cached tokens. The labels must not change the logits.

    Cause: each branch of the code (a padding mask, a cache, dropout, another kernel) builds its own mask.
    Fix: build the mask in one place from positions, and use it on every code path.
    """
    model, tokens = ctx.model, ctx.random_tokens()
    length = tokens.shape[1]
    path_cuts = _PATH_CUTS if not ctx.is_slow else _PATH_CUTS[1:2]
    cuts = [cut for cut in path_cuts if cut < length] or [length - 1]
    for path, logits in _forward_paths(ctx).items():
        yield _check_leaks(ctx, logits, tokens, cuts, f" {path}")
    if (logits_with_mask := model.logits_with_mask) is not None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
        yield _check_leaks(ctx, lambda x: logits_with_mask(x, mask), tokens, cuts, " with a mask")
    if (logits_with_cache := model.logits_with_cache) is not None and length > 6:
        prefix = ctx.random_tokens(1, 4)

        def logits_after_prefix(chunk: Tensor) -> Tensor:
            _, cache = logits_with_cache(prefix, None)
            return logits_with_cache(chunk, cache)[0]

        chunk_cuts = [cut for cut in cuts if cut < length - 4]
        path = " within a chunk after cached tokens"
        yield _check_leaks(ctx, logits_after_prefix, tokens[:, : length - 4], chunk_cuts, path)
    if model.logits_with_labels is not None:
        yield _check_label_leak(ctx, tokens)
    yield _check_leaks(ctx, ctx.logits, ctx.random_tokens(3), cuts[:2], " in a batch of three")


def _check_label_leak(ctx: CheckContext, tokens: Tensor) -> CaseResult:
    """Check that the logits do not change with the labels."""
    logits_with_labels, other = require(ctx.model.logits_with_labels), ctx.replace_tokens(tokens)
    diff = ctx.compare(lambda: logits_with_labels(tokens, tokens), lambda: logits_with_labels(tokens, other))
    if diff.within_tolerance:
        return diff.success("no logit changes with the labels")
    message, cause = "the logits change with the labels that they should predict", "the labels are used as input"
    return diff.failure(message, cause=cause, fix="use labels only in the loss")


def _forward_paths(ctx: CheckContext) -> dict[str, LogitsFunction]:
    """Logits functions of code paths (with gradients, in training mode, with each kernel), by name of the path."""
    paths: dict[str, LogitsFunction] = {}

    def with_gradients(tokens: Tensor) -> Tensor:
        with torch.enable_grad():
            return ctx.logits(tokens).detach()

    def in_training_mode(tokens: Tensor) -> Tensor:
        with preserve_state(ctx.module, training=True), torch.random.fork_rng(devices=[]):
            torch.manual_seed(ctx.seed)
            return with_gradients(tokens)

    if not ctx.is_slow or ctx.model.module is None:  # training mode also runs with gradients
        paths["with gradients"] = with_gradients
    if ctx.model.module is not None:
        paths["in training mode"] = in_training_mode
    return paths | {f"with the kernel {name}": logits for name, logits in ctx.model.logits_by_kernel.items()}
