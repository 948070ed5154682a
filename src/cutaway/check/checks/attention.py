"""Attention: who is seen, how scores are scaled, what is summed to one, which heads share keys."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.adapters.declared_config import attention_configs, get_config
from cutaway.check.adapters.module import KERNEL_HEAD_DIM, KERNEL_HEADS
from cutaway.check.adapters.transformers import is_transformers_model
from cutaway.check.context import CheckContext
from cutaway.check.probes.op_tracer import AttentionCall
from cutaway.check.probes.scale_tracer import LEARNED_BIAS, AttentionScale, ScaleTracer
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

MASKED_SCORE_GAP = 5000.0
"""So far below a row's largest score, a key is hidden: masks add at least twice as much."""


MAX_SEQ_LEN = 256
"""Tokens of a text that passes a window."""


ROW_SUM_TOLERANCE = 1e-3
"""Of one: what no rounding of a row's sum comes to."""


SCALE_TOLERANCE = 0.02
"""Of a scale: far less than any mistake, far more than rounding."""


def trace_self_attention(context: CheckContext, tokens: Tensor) -> list[AttentionCall]:
    """The attentions of a text to itself, without the columns of learned sinks."""
    length = tokens.shape[1]
    seen = [one for one in context.trace_attention(tokens) if one.scores.shape[-2] == length]
    seen = [one for one in seen if one.scores.shape[-1] in (length, length + 1)]
    if not seen:
        raise SkipCheckError("needs attention whose softmax can be seen")
    return seen


def visible_keys(attention: AttentionCall) -> Tensor:
    """Which keys (B, H, T, S) each query sees."""
    scores = attention.scores[..., : attention.scores.shape[-2]].float()
    return scores > scores.amax(-1, keepdim=True) - MASKED_SCORE_GAP


@register_check(
    "sliding-window",
    catches="a sliding window that is one token too wide or too narrow, or not there at all",
    cause="the window counts the token itself on one path and not on another (i - j <= w in place of i - j < w)",
    fix="let query i see key j where 0 <= i - j < window, in every kernel, and test the edge on both sides",
)
def sliding_window(context: CheckContext) -> Iterator[CaseResult]:
    """Look at what every attention sees: exactly the window's tokens in each row, or all where a layer has none. Then
    change all that no path of windows reaches: the last logits must stay."""
    target = context.model
    sizes = target.windows or (() if target.window is None else (target.window,))
    if not sizes:
        raise SkipCheckError("needs window or windows")
    length = min(max(sizes) + 6, target.max_seq_len or MAX_SEQ_LEN)
    if length <= min(sizes) or length > MAX_SEQ_LEN:
        raise SkipCheckError(f"a text of {length} tokens does not pass a window of {min(sizes)}")
    tokens = context.random_tokens(1, length)
    try:
        yield from _check_visible_rows(context, tokens, sizes)
    except SkipCheckError as error:
        yield CaseResult("skip", f"skipped: {error}")
    if target.window is None or target.num_layers is None or target.kind == "encoder":
        return
    reach = target.num_layers * (target.window - 1)
    length = min(reach + 4, target.max_seq_len or MAX_SEQ_LEN)
    if not reach + 1 < length <= MAX_SEQ_LEN:
        return
    assert target.logits is not None
    tokens, logits = context.random_tokens(1, length), target.logits
    other = context.replace_tokens(tokens, slice(0, length - 1 - reach))
    gap = context.compare(lambda: logits(tokens)[:, -1], lambda: logits(other)[:, -1])
    yield context.expect_equal(
        gap,
        passed=f"the last of {length} tokens depends on {reach} before it at most",
        failed=f"{target.num_layers} layers of windows of {target.window} reach {reach} tokens back, and the logits "
        "change with tokens before that",
        location=f"position {length - 1}",
    )


def _check_visible_rows(context: CheckContext, tokens: Tensor, windows: tuple[int, ...]) -> Iterator[CaseResult]:
    """Whether each row sees as many keys as some window, or all."""
    target, length = context.model, tokens.shape[1]
    place = torch.arange(length)
    far = (place[:, None] - place[None, :]).abs()
    causal = place[None, :] <= place[:, None] if target.kind != "encoder" else torch.ones(length, length).bool()
    allowed = {size: causal & (far < size) for size in windows} | ({} if target.window else {0: causal})
    found: set[int] = set()
    for one in trace_self_attention(context, tokens):
        rows = visible_keys(one)[0].any(0).cpu()
        fits = [size for size, rule in allowed.items() if torch.equal(rows, rule)]
        found |= set(fits)
        if not fits:
            if not torch.equal(rows & causal, rows):
                raise SkipCheckError("later tokens are seen, which other checks say")
            many = int(rows[-1].sum())
            message = f"the last of {length} tokens sees {many} tokens, where the window is {min(windows)}"
            yield CaseResult("fail", message, many, min(windows), one.module or None)
            return
    if missing := set(windows) - found:
        yield CaseResult("fail", f"no layer has the window of {min(missing)}", location=None)
        return
    yield CaseResult("pass", f"every row sees just its window: {', '.join(map(str, sorted(found - {0})))} tokens")


@register_check(
    "attention-kernels",
    catches="attention kernels that disagree: one drops the soft-cap, the sinks, the bias or the window",
    cause="a feature was built into one kernel, and the other ignores the argument instead of refusing it",
    fix="let each kernel refuse what it cannot compute, and compare all of them with the equation",
    needs=("logits", "logits_by_kernel|attention"),
    depends_on=("causality", "attention-scale", "softmax-dim", "eval-determinism"),
)
def attention_kernels(context: CheckContext) -> Iterator[CaseResult]:
    """Read one text by each kernel, past the smallest window: the same logits. A bare kernel is compared with
    softmax(q·kᵀ·scale)·v itself."""
    target = context.model
    assert target.logits is not None
    logits = target.logits
    past = max((size + 4 for size in target.windows if size <= 64), default=0)
    tokens = context.random_tokens(2, min(max(context.seq_len, past), target.max_seq_len or MAX_SEQ_LEN))
    for name, other in target.logits_by_kernel.items():
        gap = context.compare(lambda: logits(tokens), lambda: other(tokens))
        yield context.expect_equal(
            gap,
            passed=f"the kernel {name} gives the same logits",
            failed=f"the kernel {name} gives other logits",
            location=None if gap.within_tolerance else f"position {gap.index[1]}",
        )
    if target.attention is not None:
        q, k, v = _random_qkv(context, KERNEL_HEADS)
        attention = target.attention
        gap = context.compare(lambda: attention(q, k, v), lambda: _reference_attention(context, q, k, v))
        yield context.expect_equal(
            gap,
            passed="the kernel gives softmax(q·kᵀ·scale)·v",
            failed="the kernel gives something else than softmax(q·kᵀ·scale)·v",
            location=None if gap.within_tolerance else f"head {gap.index[1]}, position {gap.index[2]}",
        )
        if gap.within_tolerance:
            yield _check_large_scores(context, q, k, v)


def _check_large_scores(context: CheckContext, q: Tensor, k: Tensor, v: Tensor) -> CaseResult:
    """Scores of some hundreds are rare and real: no softmax may overflow there."""
    attention = context.model.attention
    assert attention is not None
    largest = 8.0 * math.sqrt(q.shape[-1])
    out = attention(largest * q, largest * k / 8, v)
    if bool(out.isfinite().all()):
        return CaseResult("pass", "large scores overflow nowhere")
    return CaseResult(
        "fail",
        f"with scores of some {8 * KERNEL_HEAD_DIM:d} the kernel gives numbers that are not finite",
        cause="exp is taken of the scores as they are",
        fix="subtract each row's largest score first, as torch.softmax does",
    )


def _random_qkv(context: CheckContext, kv_heads: int, seq_len: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v for a bare kernel."""
    target = context.model

    def draw(heads: int) -> Tensor:
        x = torch.randn(2, heads, seq_len, KERNEL_HEAD_DIM, generator=context.generator)
        return x.to(target.device, target.dtype or torch.float32)

    return draw(KERNEL_HEADS), draw(kv_heads), draw(kv_heads)


def _reference_attention(context: CheckContext, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q·kᵀ·scale)·v with the target's mask."""
    target, length = context.model, q.shape[-2]
    scale = scale or target.attention_scale or 1 / math.sqrt(q.shape[-1])
    scores = (q @ k.transpose(-1, -2)) * scale
    place = torch.arange(length, device=q.device)
    behind = place[:, None] - place[None, :]
    hidden = behind < 0 if target.kind != "encoder" else behind < -length
    if target.window is not None:
        hidden = hidden | (behind.abs() >= target.window)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@register_check(
    "softmax-dim",
    catches="a softmax over queries or heads, or rows that do not sum to one where v is read",
    cause="softmax has the wrong dim (or none, which PyTorch guesses), or the mask is applied behind it",
    fix="softmax over the keys, dim=-1, with -inf where nothing may be seen before it",
    depends_on=("eval-dropout",),
)
def softmax_dim(context: CheckContext) -> Iterator[CaseResult]:
    """Watch every softmax of attention: the axis that it sums to one is the one that the product with v sums over, and
    what is multiplied with v still sums to one. A bare kernel must give ones for values of ones."""
    if context.model.attention is not None:
        q, k, v = _random_qkv(context, KERNEL_HEADS)
        gap = context.compare(lambda: context.model.attention(q, k, torch.ones_like(v)), lambda: torch.ones_like(v))  # type: ignore[misc]
        yield context.expect_equal(
            gap,
            passed="values of ones come out as ones",
            failed="values of ones do not come out as ones: rows do not sum to one",
        )
    seen = context.trace_attention(context.random_tokens(2, min(context.seq_len, 11)))
    if not seen:
        raise SkipCheckError("needs attention whose softmax can be seen")
    names = {-1: "keys", -2: "queries", -3: "heads", -4: "rows of the batch"}
    for one in seen:
        if one.applied_pattern is not None and one.summed_dim != one.softmax_dim:
            over = names.get(one.softmax_dim, "another axis")
            message = f"softmax is taken over {over}, not over the keys that v is summed over"
            yield CaseResult("fail", message, one.softmax_dim, one.summed_dim, one.module or None)
            return
        if one.applied_pattern is None or one.summed_dim != -1 or one.applied_pattern.shape != one.pattern.shape:
            continue
        sums = one.applied_pattern.float().sum(-1)
        far = torch.where(sums.abs() < ROW_SUM_TOLERANCE, 0.0, (sums - 1).abs())
        bound = max(ROW_SUM_TOLERANCE, 16 * torch.finfo(one.applied_pattern.dtype).eps)
        if float(far.max()) > bound:
            row = int(far.amax((0, 1)).argmax())
            worst = float(sums.flatten()[far.argmax()])
            message = f"the weights of position {row} sum to {worst:.3g} where they meet v, not to 1"
            yield CaseResult("fail", message, float(far.max()), bound, one.module or None)
            return
    yield CaseResult("pass", f"{len(seen)} softmaxes sum to one over the keys")


@register_check(
    "grouped-query-attention",
    catches="query heads that meet the wrong keys: groups laid out as 0, 1, 0, 1 in place of 0, 0, 1, 1",
    cause="keys or values are expanded by repeat in place of repeat_interleave, or one of the two is",
    fix="give head h the keys and values of group h // (heads / groups): repeat_interleave over the head axis",
)
def grouped_query_attention(context: CheckContext) -> Iterator[CaseResult]:
    """Watch the keys and values that each head meets: heads with equal ones must be neighbors, in groups of one size,
    alike for keys and values. A bare kernel with few key heads must give what it gives with them repeated."""
    if context.model.attention is not None:
        yield from _check_kernel_groups(context)
        return
    shared = 0
    for one in context.trace_attention(context.random_tokens(1, min(context.seq_len, 11))):
        layouts = [_head_groups(x) for x in (one.k, one.v) if x is not None and bool(x.any())]
        for what, groups in zip(("keys", "values"), layouts, strict=False):
            size = len(groups) // (max(groups) + 1)
            if groups != [head // size for head in range(len(groups))] and max(groups) + 1 < len(groups):
                message = f"the heads meet the {what} of groups {', '.join(map(str, groups))}"
                yield CaseResult("fail", message, location=one.module or None)
                return
        if len(layouts) == 2 and layouts[0] != layouts[1]:
            yield CaseResult("fail", "keys and values are shared by different heads", location=one.module or None)
            return
        shared += bool(layouts and max(layouts[0]) + 1 < len(layouts[0]))
    if not shared:
        raise SkipCheckError("needs heads that share keys and an attention that can be seen")
    yield CaseResult("pass", f"in {shared} attentions neighboring heads share keys and values")


def _head_groups(x: Tensor) -> list[int]:
    """The group of each head: the first heads with other values are groups 0, 1, …"""
    known: list[int] = []
    groups = []
    for head in range(x.shape[1]):
        twin = next((n for n, at in enumerate(known) if torch.equal(x[:, at], x[:, head])), None)
        if twin is None:
            known.append(head)
        groups.append(len(known) - 1 if twin is None else twin)
    return groups


def _check_kernel_groups(context: CheckContext) -> Iterator[CaseResult]:
    attention = context.model.attention
    assert attention is not None
    for groups in (1, 2):
        q, k, v = _random_qkv(context, groups)
        wide = [x.repeat_interleave(KERNEL_HEADS // groups, 1) for x in (k, v)]
        try:
            attention(q, k, v)
        except Exception as error:  # whatever it raises, it does not take fewer heads of keys
            raise SkipCheckError(f"with {groups} heads of keys it raises {type(error).__name__}") from error
        gap = context.compare(lambda: attention(q, *wide), lambda: attention(q, k, v))
        yield context.expect_equal(
            gap,
            passed=f"{groups} heads of keys give what they give repeated",
            failed=f"{groups} heads of keys for {KERNEL_HEADS} of queries give something else than with the keys "
            "repeated",
            location=None if gap.within_tolerance else f"head {gap.index[1]}",
        )


@register_check(
    "attention-scale",
    catches="scores that are not divided by sqrt(d_head), or by something else: attention too sharp or too flat",
    cause="the scale is missing, applied twice, or of the wrong width (d_model, or d_head without the root)",
    fix="multiply q·k by 1/sqrt(d_head) once, on every path; a scale that is meant is given as attention_scale=",
)
def attention_scale(context: CheckContext) -> Iterator[CaseResult]:
    """Follow q and k from their projections to the softmax, and write down each number that they or the scores are
    multiplied by. The product must be the model's scale: 1/sqrt(d_head), unless its configuration says another."""
    target = context.model
    assert target.logits is not None
    if target.attention is not None:
        yield _check_kernel_scale(context)
        return
    with torch.no_grad(), ScaleTracer(target.module) as trails:
        target.logits(context.random_tokens(1, min(context.seq_len, 7)))
    if not trails.attention_scales:
        raise SkipCheckError("needs attention whose queries can be followed from their projection to the softmax")
    wanted, known = _expected_scales(context, trails.attention_scales)
    tried = 0
    doubt = None
    for one, scale in zip(trails.attention_scales, wanted, strict=True):
        biased = known or not math.isclose(one.factor, 1.0)  # T5 has a learned bias, and no scale at all
        sure = (None, *((LEARNED_BIAS,) if biased else ()), *(("normalized", "learned") if known else ()))
        if one.uncertainty not in sure:
            doubt = one.uncertainty
            continue
        tried += 1
        if not math.isclose(one.factor, scale, rel_tol=SCALE_TOLERANCE):
            root = math.isclose(scale, one.head_dim**-0.5, rel_tol=1e-6)
            meant = f"1/sqrt({one.head_dim}) = {scale:.4g}" if root else f"{scale:.4g}"
            yield CaseResult(
                "fail",
                f"q·k is multiplied by {one.factor:.4g}{_describe_wrong_scale(one, context)}, where {meant} is meant",
                one.factor,
                scale,
                one.module or None,
            )
            return
    if not tried:
        raise SkipCheckError(
            f"the queries, keys or scores are {doubt}, so that other scales are usual; give attention_scale="
        )
    yield CaseResult(
        "pass", f"in {tried} attentions q·k is multiplied by {trails.attention_scales[0].factor:.4g}, as is meant"
    )


def _expected_scales(context: CheckContext, scales: list[AttentionScale]) -> tuple[list[float], bool]:
    """The scale of each attention, and whether it is known, and not just usual."""
    if context.model.attention_scale is not None:
        return [context.model.attention_scale] * len(scales), True
    usual = [one.head_dim**-0.5 for one in scales]
    config = get_config(context.model)
    if config is None:
        if context.model.module is not None and is_transformers_model(context.model.module):
            raise SkipCheckError("needs attention_scale: this family's own is not known")
        return usual, False
    layers = [layer.scale for layer in attention_configs(config)]
    if len(layers) != len(scales):
        if len(set(layers)) > 1:
            raise SkipCheckError(f"{len(scales)} attentions were seen of {len(layers)}, which have different scales")
        layers = layers[:1] * len(scales)
    return [scale or root for scale, root in zip(layers, usual, strict=True)], True


def _describe_wrong_scale(scale: AttentionScale, context: CheckContext) -> str:
    """Which mistake makes such a number."""
    width = scale.head_dim
    names = {
        "no scale at all": 1.0,
        "1/d_head, without the root": 1 / width,
        "sqrt(d_head), not its inverse": width**0.5,
    }
    names |= {"the scale once too often": scale.head_dim**-1.0, "1/sqrt(sqrt(d_head))": width**-0.25}
    names |= {f"1/sqrt({width * n}), the width of {n} heads": (width * n) ** -0.5 for n in range(2, 129)}
    for name, value in names.items():
        if math.isclose(value, scale.factor, rel_tol=1e-3):
            return f" ({name})"
    return ""


def _check_kernel_scale(context: CheckContext) -> CaseResult:
    """A kernel alone: which scale makes the equation give what it gives."""
    attention, meant = context.model.attention, context.model.attention_scale or KERNEL_HEAD_DIM**-0.5
    assert attention is not None
    q, k, v = _random_qkv(context, KERNEL_HEADS)
    tried = (
        meant,
        1.0,
        1 / KERNEL_HEAD_DIM,
        KERNEL_HEAD_DIM**0.5,
        KERNEL_HEAD_DIM**-0.25,
        (KERNEL_HEADS * KERNEL_HEAD_DIM) ** -0.5,
        KERNEL_HEAD_DIM**-0.5,
    )
    for scale in tried:
        gap = context.compare(lambda: attention(q, k, v), lambda: _reference_attention(context, q, k, v, scale))
        if gap.within_tolerance:
            right = math.isclose(scale, meant, rel_tol=SCALE_TOLERANCE)
            said = f"the kernel multiplies q·k by {scale:.4g}"
            return CaseResult(
                "pass" if right else "fail", said + ("" if right else f", not by {meant:.4g}"), scale, meant
            )
    raise SkipCheckError("the kernel gives softmax(q·kᵀ·scale)·v for no usual scale")
