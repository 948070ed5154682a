"""Attention checks: sliding-window, softmax-dim, grouped-query-attention, attention-scale, attention-kernels."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cutaway.check.adapters.declared_config import attention_configs, get_config
from cutaway.check.adapters.module import KERNEL_HEAD_DIM, KERNEL_HEADS
from cutaway.check.adapters.transformers import is_transformers_model
from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext
from cutaway.check.probes.masked_scores import masked_scores
from cutaway.check.probes.op_tracer import AttentionCall
from cutaway.check.probes.scale_tracer import LEARNED_BIAS, AttentionScale, ScaleTracer, TensorScale
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, MeasuredArray, SkipCheckError, failure, skipped, success, warning

_MAX_SEQ_LEN = 256
"""Maximum length of the sequence that is used to test a window."""


_ROW_SUM_TOLERANCE = 1e-3
"""Tolerance for the deviation of a row sum from 1; it is above any rounding error."""


_SCALE_TOLERANCE = 0.02
"""Relative tolerance of a scale. It is far below the effect of usual mistakes and far above rounding errors."""


def trace_self_attention(ctx: CheckContext, tokens: Tensor) -> list[AttentionCall]:
    """Record the self-attention calls of one forward pass: (T, T) scores, or (T, T + 1) with an attention sink."""
    length = tokens.shape[1]
    calls = [call for call in ctx.trace_attention(tokens) if call.scores.shape[-2] == length]
    calls = [call for call in calls if call.scores.shape[-1] in (length, length + 1)]
    if not calls:
        raise SkipCheckError("needs attention whose softmax can be traced")
    return calls


def visible_keys(attention: AttentionCall) -> Tensor:
    """Boolean (B, H, T, T): True where a key is visible to a query, in self-attention. Attention sinks are left out."""
    return ~masked_scores(attention)[..., : attention.scores.shape[-2]]


@register_check("sliding-window")
def sliding_window(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a sliding window that is one token too long or too short, or missing.

    Inspect the visible keys of every attention call: each query must attend to exactly the tokens in its window, or to
    all tokens in layers without a window. Then replace the tokens that the last position cannot reach through the
    windows of all layers: its logits must not change.

    Cause: the window includes the token itself on one code path and not on another (i - j <= w, not i - j < w).
    Fix: make key j visible to query i where 0 <= i - j < window, in every kernel, and test both sides of the edge.
    """
    model = ctx.model
    sizes = model.windows or (() if model.window is None else (model.window,))
    if not sizes:
        raise SkipCheckError("needs window or windows")
    length = min(max(sizes) + 6, model.max_seq_len or _MAX_SEQ_LEN)
    if length <= min(sizes) or length > _MAX_SEQ_LEN:
        raise SkipCheckError(f"a sequence of {length} tokens does not exceed a window of {min(sizes)}")
    tokens = ctx.random_tokens(1, length)
    try:
        yield _check_visible_rows(ctx, tokens, sizes)
    except SkipCheckError as error:
        yield skipped(error)
    if model.window is None or model.num_layers is None or model.kind == "encoder":
        return
    reach = model.num_layers * (model.window - 1)
    length = min(reach + 4, model.max_seq_len or _MAX_SEQ_LEN)
    if not reach + 1 < length <= _MAX_SEQ_LEN:
        return
    tokens, logits = ctx.random_tokens(1, length), ctx.logits
    other = ctx.replace_tokens(tokens, slice(0, length - 1 - reach))
    diff = ctx.compare(lambda: logits(tokens)[:, -1], lambda: logits(other)[:, -1])
    yield diff.expect_equal(
        passed=f"the last of {length} tokens depends on at most {reach} earlier tokens",
        failed=f"{model.num_layers} layers with windows of {model.window} reach {reach} tokens back, but the last "
        "logits change with earlier tokens",
        location=f"position {length - 1}",
    )


def _check_visible_rows(ctx: CheckContext, tokens: Tensor, windows: tuple[int, ...]) -> CaseResult:
    """Check that the visible keys of each layer are exactly those of one of the windows, or of full attention."""
    model, length = ctx.model, tokens.shape[1]
    positions = torch.arange(length)
    distance = (positions[:, None] - positions[None, :]).abs()
    causal = positions[None, :] <= positions[:, None] if model.kind != "encoder" else torch.ones(length, length).bool()
    allowed = {size: causal & (distance < size) for size in windows} | ({} if model.window else {0: causal})
    matched: set[int] = set()
    for call in trace_self_attention(ctx, tokens):
        visible = visible_keys(call)[0].any(0).cpu()
        sizes = [size for size, mask in allowed.items() if torch.equal(visible, mask)]
        matched |= set(sizes)
        if not sizes:
            if not torch.equal(visible & causal, visible):
                raise SkipCheckError("later tokens are visible; see causality")
            num_visible = int(visible[-1].sum())
            message = f"the last of {length} tokens attends to {num_visible} tokens, but the window is {min(windows)}"
            return failure(message, num_visible, min(windows), call.module or None)
    if missing := set(windows) - matched:
        return failure(f"no layer has the window of {min(missing)}")
    sizes_text = ", ".join(map(str, sorted(matched - {0})))
    return success(f"every token attends to exactly its window: {sizes_text} tokens")


_KERNEL_SEQ_LEN = 150
"""Sequence length for a kernel: several tiles of 16 to 128 keys, the last one partial."""


def _random_qkv(ctx: CheckContext, kv_heads: int, seq_len: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (B, H, T, D), k and v (B, kv_heads, T, D) as inputs of an attention kernel."""
    shapes = [(2, heads, seq_len, KERNEL_HEAD_DIM) for heads in (KERNEL_HEADS, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=ctx.generator) for shape in shapes)
    device, dtype = ctx.model.device, ctx.model.dtype or torch.float32
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def _kernel_windows(ctx: CheckContext) -> list[int | None]:
    """Windows that a kernel passed as `attention` may apply: the model's window, or none."""
    return [None] if ctx.model.window is None else [ctx.model.window, None]


def _describe_window(ctx: CheckContext, window: int | None) -> str:
    """Text for a message: whether a kernel applies the model's window; empty for a model without a window."""
    if ctx.model.window is None:
        return ""
    return " without the window" if window is None else f" with the window of {window}"


def _reference_attention(
    ctx: CheckContext, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None = None
) -> Tensor:
    """softmax(q·kᵀ·scale)·v with this window and, unless the model is an encoder, a causal mask."""
    model, length = ctx.model, q.shape[-2]
    scale = scale or model.attention_scale or 1 / math.sqrt(q.shape[-1])
    scores = (q @ k.transpose(-1, -2)) * scale
    positions = torch.arange(length, device=q.device)
    distance = positions[:, None] - positions[None, :]
    masked = distance < 0 if model.kind != "encoder" else distance < -length
    if window is not None:
        masked = masked | (distance.abs() >= window)
    return scores.masked_fill(masked, -torch.inf).softmax(-1) @ v


@register_check("softmax-dim", depends_on=("eval-dropout",))
def softmax_dim(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches a softmax over queries or heads, or attention weights that do not sum to one.

    Trace every attention softmax: it must normalize the axis that the product with v sums over, and the weights that
    are multiplied with v must still sum to one. A kernel passed as `attention` must return ones if v is all ones.

    Cause: softmax has the wrong dim (or PyTorch's implicit default), or the mask is applied after it.
    Fix: apply softmax over the keys, dim=-1, after masking with -inf.
    """
    if ctx.model.attention is not None:
        attention, (q, k, v) = ctx.model.attention, _random_qkv(ctx, KERNEL_HEADS)
        ones = torch.ones_like(v)
        diff = ctx.compare(lambda: attention(q, k, ones), lambda: ones)
        yield diff.expect_equal(
            passed="if v is all ones, the output is all ones",
            failed="if v is all ones, the output is not all ones: the attention weights do not sum to one",
        )
    calls = ctx.trace_attention(ctx.random_tokens(2, min(ctx.seq_len, 11)))
    if not calls:
        raise SkipCheckError("needs attention whose softmax can be traced")
    names = {-1: "keys", -2: "queries", -3: "heads", -4: "rows of the batch"}
    array = MeasuredArray(
        "lines",
        "Sum of the attention weights of each query (mean over heads)",
        "query position",
        "sum of the weights",
        [],
        expected="1 at every position",
    )
    for call in calls:
        applied = call.applied_pattern
        if call.softmax_dim == -1:
            weights = call.pattern if applied is None else applied
            row_sums = weights.float().sum(-1)
            array.values.append(row_sums.reshape(len(row_sums), -1, row_sums.shape[-1])[0].mean(0).tolist())
            array.names.append(call.module or f"call {len(array.values)}")
        if applied is None:
            continue
        if call.summed_dim != call.softmax_dim:
            if not _is_scaled_pattern(applied, call.pattern):
                continue  # linear attention: a softmax of k over the tokens, and the product of another softmax
            axis = names.get(call.softmax_dim, "wrong axis")
            message = f"softmax is over the {axis}, not over the keys that the product with v sums over"
            yield failure(message, call.softmax_dim, call.summed_dim, call.module or None)
            return
        if call.summed_dim != -1 or applied.shape != call.pattern.shape:
            continue
        sums = applied.float().sum(-1)
        errors = torch.where(sums.abs() < _ROW_SUM_TOLERANCE, 0.0, (sums - 1).abs())  # fully masked rows sum to 0
        tolerance = max(_ROW_SUM_TOLERANCE, 16 * torch.finfo(applied.dtype).eps)
        if float(errors.max()) > tolerance and not _is_sum_of_patterns(call, sums, tolerance):
            position = int(errors.amax((0, 1)).argmax())
            worst = float(sums.flatten()[errors.argmax()])
            message = f"the attention weights of position {position} sum to {worst:.3g} in the product with v, not to 1"
            yield failure(message, float(errors.max()), tolerance, call.module or None, array=array)
            return
    message = f"the weights of {len(calls)} attention calls sum to one over the keys"
    yield success(message, array=array if array.values else None)


def _is_scaled_pattern(applied: Tensor, pattern: Tensor) -> bool:
    """Whether the matrix that is multiplied with v is the pattern, up to a factor and masked weights."""
    if applied.shape != pattern.shape:
        return True
    weights = torch.where(applied == 0, 0.0, pattern.float())
    factor = applied.float().sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.allclose(applied.float(), weights * factor, rtol=1e-2, atol=1e-3 * float(weights.max() * factor.abs()))


def _is_sum_of_patterns(attention: AttentionCall, sums: Tensor, tolerance: float) -> bool:
    """Whether the weights are a combination of several patterns with constant factors, which need not sum to one.

    Differential attention subtracts two patterns, and talking heads mix those of all heads. The sum of the weights is
    then the same at all positions of a head, but the weights are not a multiple of the pattern of one softmax.
    """
    if attention.applied_pattern is None:
        return False
    applied, pattern = attention.applied_pattern.float(), attention.pattern.float()
    is_constant = float((sums - sums[:1, :, :1]).abs().max()) <= tolerance
    return is_constant and float((applied - sums[..., None] * pattern).abs().max()) > tolerance


@register_check("grouped-query-attention")
def grouped_query_attention(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches query heads with the wrong key and value heads: groups in the order 0, 1, 0, 1 instead of 0, 0, 1, 1.

    Trace the keys and values of each head. Heads with equal keys must be adjacent, in groups of equal size, and have
    equal values. A kernel passed as `attention` must give the same result with shared and with repeated kv heads.

    Another grouping is a warning if neither a known configuration nor `kv_heads=` declares it.

    Cause: keys or values are expanded with repeat instead of repeat_interleave.
    Fix: use the keys and values of group h // (heads / kv_heads) for head h: repeat_interleave over the head axis.
    """
    if ctx.model.attention is not None:
        yield from _check_kernel_groups(ctx)
        return
    num_shared, kv_heads = 0, ctx.model.kv_heads
    is_declared = kv_heads is not None or get_config(ctx.model) is not None
    for call in ctx.trace_attention(ctx.random_tokens(1, min(ctx.seq_len, 11))):
        layouts = [_head_groups(x) for x in (call.k, call.v) if x is not None and bool(x.any())]
        for name, groups in zip(("keys", "values"), layouts, strict=False):
            size = len(groups) // (max(groups) + 1)
            if groups != [head // size for head in range(len(groups))] and max(groups) + 1 < len(groups):
                message = f"the heads use the {name} of groups {', '.join(map(str, groups))}"
                message += ", but adjacent heads must share a group"
                yield _undeclared_result(message, is_declared, "kv_heads=", location=call.module or None)
                return
        if len(layouts) == 2 and layouts[0] != layouts[1]:
            message = "keys and values are shared by different heads"
            yield _undeclared_result(message, is_declared, "kv_heads=", location=call.module or None)
            return
        if kv_heads is not None and layouts and (num_groups := max(layouts[0]) + 1) != kv_heads:
            message = f"the heads share {num_groups} different keys, but kv_heads is {kv_heads}"
            yield failure(message, num_groups, kv_heads, call.module or None)
            return
        num_shared += bool(layouts and max(layouts[0]) + 1 < len(layouts[0]))
    if not num_shared:
        raise SkipCheckError("needs heads that share keys, and attention that can be traced")
    yield success(f"in {num_shared} attention calls adjacent heads share keys and values")


def _undeclared_result(message: str, is_declared: bool, override: str, **fields: Any) -> CaseResult:
    """A failure if what the model is meant to compute is declared, otherwise a warning that says how to declare it."""
    if is_declared:
        return failure(message, **fields)
    return warning(f"{message}, unless that is intended; pass {override} to declare the intended value", **fields)


def _head_groups(x: Tensor) -> list[int]:
    """Group index of each head of x (B, H, T, D), in order of first appearance; equal heads are one group."""
    heads = x.unbind(1)
    first_heads = [next(n for n, other in enumerate(heads) if torch.equal(other, head)) for head in heads]
    groups = list(dict.fromkeys(first_heads))
    return [groups.index(first) for first in first_heads]


def _check_kernel_groups(ctx: CheckContext) -> Iterator[CaseResult]:
    """Compare the output of a kernel for shared kv heads with its output for the same heads repeated."""
    attention = require(ctx.model.attention)
    for kv_heads in (1, 2):
        q, k, v = _random_qkv(ctx, kv_heads)
        repeated = [x.repeat_interleave(KERNEL_HEADS // kv_heads, 1) for x in (k, v)]
        try:
            attention(q, k, v)
        except Exception as error:  # any exception means that the kernel does not support GQA
            raise SkipCheckError(f"with {kv_heads} kv heads the kernel raises {type(error).__name__}") from error
        diff = ctx.compare(lambda: attention(q, *repeated), lambda: attention(q, k, v))
        yield diff.expect_equal(
            passed=f"{kv_heads} kv heads give the same result as repeated ones",
            failed=f"{kv_heads} kv heads for {KERNEL_HEADS} query heads give another result than repeated kv heads",
            location=f"head {diff.index[1]}",
        )


@register_check("attention-scale")
def attention_scale(ctx: CheckContext) -> CaseResult:
    """Catches attention scores without the factor 1/sqrt(d_head), or with another: attention too sharp or too flat.

    Trace q and k from their projections to the softmax, and record each factor on them and on the scores. The product
    of the factors must be the model's scale: 1/sqrt(d_head), unless the configuration sets another scale. Another scale
    is a warning if neither a known configuration nor `attention_scale=` declares it.

    Cause: the scale is missing, applied twice, or of the wrong dimension (d_model, or d_head without the root).
    Fix: multiply q·k by 1/sqrt(d_head) once, on every code path; pass an intended scale as attention_scale=.
    """
    model = ctx.model
    if model.attention is not None:
        return _check_kernel_scale(ctx)
    with ScaleTracer(model.module) as tracer:
        ctx.logits(ctx.random_tokens(1, min(ctx.seq_len, 7)))
    if not tracer.attention_scales:
        raise SkipCheckError("needs attention whose queries can be traced from their projection to the softmax")
    expected, is_known = _expected_scales(ctx, tracer.attention_scales)
    num_checked = 0
    uncertainty = None
    for traced, scale in zip(tracer.attention_scales, expected, strict=True):
        scores = traced.scores
        acceptable: set[str | None] = {None, "normalized", "learned"} if is_known else {None}
        if is_known or not math.isclose(scores.factor, 1.0):  # T5 has a learned bias and no scale
            acceptable.add(LEARNED_BIAS)
        if scores.uncertainty not in acceptable:
            uncertainty = scores.uncertainty
            continue
        num_checked += 1
        if not math.isclose(scores.factor, scale, rel_tol=_SCALE_TOLERANCE):
            is_default = math.isclose(scale, scores.head_dim**-0.5, rel_tol=1e-6)
            correct = f"1/sqrt({scores.head_dim}) = {scale:.4g}" if is_default else f"{scale:.4g}"
            message = f"q·k is multiplied by {scores.factor:.4g}{_describe_wrong_scale(scores)}, not by {correct}"
            return _undeclared_result(
                message,
                is_known,
                "attention_scale=",
                measured=scores.factor,
                threshold=scale,
                location=traced.module or None,
            )
    if not num_checked:
        reason = f"the queries, keys or scores are {uncertainty}, so the scale is not determined"
        raise SkipCheckError(f"{reason}; pass attention_scale=")
    factor = tracer.attention_scales[0].scores.factor
    return success(f"in {num_checked} attention calls q·k is multiplied by {factor:.4g}, as expected")


def _expected_scales(ctx: CheckContext, scales: list[AttentionScale]) -> tuple[list[float], bool]:
    """Expected scale of each attention call, and whether it is known; if not, the default 1/sqrt(d_head) is assumed."""
    if ctx.model.attention_scale is not None:
        return [ctx.model.attention_scale] * len(scales), True
    defaults = [scale.scores.head_dim**-0.5 for scale in scales]
    config = get_config(ctx.model)
    if config is None:
        if ctx.model.module is not None and is_transformers_model(ctx.model.module):
            raise SkipCheckError("needs attention_scale: the scale of this model family is unknown")
        return defaults, False
    configured = [layer.score_scale(config.d_model) for layer in attention_configs(config)]
    if len(configured) != len(scales):
        if len(set(configured)) > 1:
            traced = f"{len(scales)} of {len(configured)} attention calls"
            raise SkipCheckError(f"{traced} were traced, and their scales differ")
        configured = configured[:1] * len(scales)
    return configured, True


def _describe_wrong_scale(scores: TensorScale) -> str:
    """The mistake that explains a wrong factor on q·k, in parentheses; empty if no known mistake does."""
    d = scores.head_dim
    mistakes = {
        "no scale": 1.0,
        "1/d_head, without the root": 1 / d,
        "sqrt(d_head), not its inverse": d**0.5,
        "1/sqrt(sqrt(d_head))": d**-0.25,
        **{f"1/sqrt({d * n}), {n} · d_head": (d * n) ** -0.5 for n in range(2, 129)},
    }
    names = (name for name, value in mistakes.items() if math.isclose(value, scores.factor, rel_tol=1e-3))
    return next((f" ({name})" for name in names), "")


def _check_kernel_scale(ctx: CheckContext) -> CaseResult:
    """Check that the output of a kernel equals softmax(q·kᵀ·scale)·v for the expected scale, not for another one."""
    attention, expected = require(ctx.model.attention), ctx.model.attention_scale or KERNEL_HEAD_DIM**-0.5
    q, k, v = _random_qkv(ctx, KERNEL_HEADS)
    d = KERNEL_HEAD_DIM
    candidates = (expected, 1.0, 1 / d, d**0.5, d**-0.25, (KERNEL_HEADS * d) ** -0.5, d**-0.5)
    for scale, window in itertools.product(candidates, _kernel_windows(ctx)):
        diff = ctx.compare(lambda: attention(q, k, v), lambda: _reference_attention(ctx, q, k, v, window, scale))
        if diff.within_tolerance:
            message = f"the kernel{_describe_window(ctx, window)} multiplies q·k by {scale:.4g}"
            if math.isclose(scale, expected, rel_tol=_SCALE_TOLERANCE):
                return success(message, scale, expected)
            return failure(f"{message}, not by {expected:.4g}", scale, expected)
    raise SkipCheckError("the kernel does not equal softmax(q·kᵀ·scale)·v for any usual scale")


@register_check(
    "attention-kernels",
    needs=("logits", "logits_by_kernel|attention"),
    depends_on=("causality", "attention-scale", "softmax-dim", "eval-determinism"),
)
def attention_kernels(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches attention kernels with different results: one ignores the softcap, the sinks, the bias or the window.

    Run two sequences, longer than windows of up to 64 tokens, with each kernel: the logits must be equal. A kernel
    passed as `attention` is compared with softmax(q·kᵀ·scale)·v at 150 tokens, with and without the model's window.

    Cause: one kernel supports a feature, and the other ignores the argument instead of raising an error.
    Fix: raise an error for features that a kernel does not support, and compare all kernels with the equation.
    """
    model, logits = ctx.model, ctx.logits
    min_len = max((size + 4 for size in model.windows if size <= 64), default=0)
    tokens = ctx.random_tokens(2, min(max(ctx.seq_len, min_len), model.max_seq_len or _MAX_SEQ_LEN))
    for name, kernel_logits in model.logits_by_kernel.items():
        base = ctx.base_logits(tokens)
        diff = ctx.compare(lambda: logits(tokens), lambda: kernel_logits(tokens), first_result=base)
        yield diff.expect_equal(
            passed=f"the kernel {name} gives the same logits",
            failed=f"the kernel {name} gives other logits",
            location=f"position {diff.index[1]}",
        )
    if model.attention is not None:
        q, k, v = _random_qkv(ctx, KERNEL_HEADS, _KERNEL_SEQ_LEN)
        attention = model.attention
        for window in _kernel_windows(ctx):
            diff = ctx.compare(lambda: attention(q, k, v), lambda: _reference_attention(ctx, q, k, v, window))
            if diff.within_tolerance:
                break
        tried = f", with the window of {model.window} or without it" if model.window is not None else ""
        yield diff.expect_equal(
            passed=f"the kernel gives softmax(q·kᵀ·scale)·v{_describe_window(ctx, window)}",
            failed=f"the kernel does not give softmax(q·kᵀ·scale)·v{tried}",
            location=f"head {diff.index[1]}, position {diff.index[2]}",
        )
        if diff.within_tolerance:
            yield _check_large_scores(ctx, q, k, v)


def _check_large_scores(ctx: CheckContext, q: Tensor, k: Tensor, v: Tensor) -> CaseResult:
    """Check that the output of the attention kernel is finite at scores above 100, which occur in practice."""
    factor = 8.0 * math.sqrt(q.shape[-1])
    if bool(require(ctx.model.attention)(factor * q, factor * k / 8, v).isfinite().all()):
        return success("large scores do not overflow")
    return failure(
        f"with scores of about {8 * KERNEL_HEAD_DIM:d} the output of the kernel is not finite",
        cause="exp is applied to the scores without subtracting their maximum",
        fix="subtract each row's maximum first, as torch.softmax does",
    )
