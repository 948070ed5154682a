"""Position checks: position-encoding, position-range, rope-shift-invariance."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.adapters.auto import MAX_PROBED_SEQ_LEN
from cutaway.check.adapters.declared_config import get_config, self_attention_configs
from cutaway.check.checked_model import require
from cutaway.check.checks.attention import trace_self_attention, visible_keys
from cutaway.check.context import CheckContext
from cutaway.check.module_state import randomize_zeros
from cutaway.check.numerics import LOW_PRECISION_DTYPES, NOISE_MARGIN, Difference, max_difference, max_finite_abs
from cutaway.check.probes.op_tracer import AttentionCall, OpTracer
from cutaway.check.probes.rope_probe import find_rotation_layouts, max_relative_change, rotation_tolerance
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, MeasuredArray, SkipCheckError, failure, success

_ROPE_NAME_PATTERN = re.compile(r"rope|rotary|inv_freq|freqs|frequenc|cos|sin_?cached")
_MIN_SCORE_ROUNDING = 1e-5
"""Smallest assumed rounding error of scores, relative to the largest score."""
_ROW_SUM_TOLERANCE = 1e-3
"""Tolerance for the deviation of a row sum from 1; it is above any rounding error."""
_ROW_MAX_TOLERANCE = 1e-6
_ALIBI_SIGN_CAUSE = "the ALiBi bias has the wrong sign"
_ALIBI_SIGN_FIX = "add -slope · (i - j) to the score of query i and key j"
_RANGE_SEQ_LEN, _SLOW_RANGE_SEQ_LEN, _MIN_RANGE_SEQ_LEN = 160, 96, 16
_MAX_LARGEST_SHARE = 0.02
"""Share of the elements of the keys with the largest absolute value, above which the keys are clipped."""
_KNOWN_RANGE_SEQ_LEN, _FAR_POSITION_STEP = 520, 7
"""Length if the maximum length is known, and the step in which positions from `_RANGE_SEQ_LEN` on are compared with all
earlier ones. bf16 rounds positions from 256 on."""
"""Lengths of the sequence whose positions are compared: default, for slow models, and the smallest."""
_MIN_QUERY_CHANGE = 1e-3
"""Relative change of a query with its position above which it has a position encoding."""
_MIN_EQUAL_QUERIES = 6
"""Smallest number of queries by which two key positions are compared."""


def repeated_token(ctx: CheckContext) -> Tensor:
    """A sequence (1, T) of one repeated token. Its logits are the same at all positions if the model has no position
    information."""
    return ctx.random_tokens(1, 1).expand(-1, min(ctx.seq_len, 13)).contiguous()


def _score_spread(ctx: CheckContext, attention: AttentionCall) -> tuple[float, float]:
    """Largest spread (maximum minus minimum) of the visible scores of a head, and the rounding error of the scores."""
    scores = attention.scores[..., : attention.scores.shape[-2]].float()
    visible = visible_keys(attention)
    high = scores.masked_fill(~visible, -torch.inf).amax((-1, -2))
    low = scores.masked_fill(~visible, torch.inf).amin((-1, -2))
    return float((high - low).max()), _score_rounding(attention, ctx)


def _score_rounding(attention: AttentionCall, ctx: CheckContext) -> float:
    """Upper estimate of the absolute rounding error of the scores of one attention call."""
    visible = visible_keys(attention)
    visible = visible & (visible.sum(-1, keepdim=True) > 1)  # a query's only key may have any score, such as -5e4
    scores = attention.scores.float()[..., : attention.scores.shape[-2]][visible]
    size = max(max_finite_abs(scores), _qk_size(attention, attention.scale or 0.0))  # a sum of large products
    eps = torch.finfo(attention.scores.dtype).eps
    return max(NOISE_MARGIN * ctx.noise_ratio, _MIN_SCORE_ROUNDING, 8 * eps) * size


def _qk_size(attention: AttentionCall, scale: float) -> float:
    """Upper bound of the scaled products q·k; 0 if q and k are unknown."""
    if attention.q is None or attention.k is None:
        return 0.0
    return scale * max_finite_abs(attention.q.float().norm(dim=-1)) * max_finite_abs(attention.k.float().norm(dim=-1))


def compare_positions(ctx: CheckContext, tokens: Tensor) -> Difference:
    """Compare the logits of a repeated token at positions 1, 2, … with those at position 0."""
    logits = ctx.logits(tokens)
    first, repeated = logits[:, 1:], logits[:, :1].expand_as(logits[:, 1:])
    return ctx.compare_expecting_difference(
        lambda: ctx.logits(tokens)[:, 1:],
        lambda: ctx.logits(tokens)[:, :1].expand_as(first),
        first_result=first,
        second_result=repeated,
    )


@register_check("position-encoding", depends_on=("eval-determinism",))
def position_encoding(ctx: CheckContext) -> CaseResult:
    """Catches a model without position information: position embeddings never added, RoPE never applied.

    Run a sequence of one repeated token. Without position information, its logits are the same at all positions, and so
    are all scores of every attention call. If the model takes positions, other distances between them must change the
    logits or the scores. Parameters that are all zero, such as a position table before training, have small random
    values in this check.

    Cause: positions are not used, are all zero, or are taken along another axis (heads, batch) than the sequence.
    Fix: number the tokens along the sequence axis, and use the positions in the embedding or on q and k; pass
    has_positions=False for a model without positions.
    """
    if min(ctx.seq_len, 13) < 3:
        raise SkipCheckError("needs sequences of three tokens")
    with randomize_zeros(ctx.model.module, ctx.generator) as num_randomized:
        return _check_position_information(ctx, is_randomized=num_randomized > 0)


def _check_position_information(ctx: CheckContext, *, is_randomized: bool) -> CaseResult:
    """Check that the logits or the scores of a repeated token change with its position."""
    model, tokens = ctx.model, repeated_token(ctx)
    if not _uses_positions(ctx):
        message = "the positions that are passed have no effect: doubling them changes neither logits nor scores"
        return failure(message, 0.0, 0.0)
    diff = compare_positions(ctx, tokens)
    if is_randomized and not diff.within_tolerance:  # the noise was measured with parameters of zeros
        noise = ctx.measure_noise(lambda: ctx.logits(tokens))
        diff.tolerance = max(diff.tolerance, NOISE_MARGIN * noise)
    if not diff.within_tolerance:
        if model.has_positions:
            return diff.success("the logits of a repeated token change with its position")
        if _has_attention_sinks(ctx, tokens):
            raise SkipCheckError("needs attention without sinks, whose weight depends on the number of earlier tokens")
        return diff.failure("has_positions is False, but the logits of a repeated token change with its position")
    if not model.has_positions:
        return diff.success("the logits of a repeated token do not change with its position, as expected")
    calls = trace_self_attention(ctx, tokens)
    if not any(bool((visible_keys(call).sum(-1) > 1).any()) for call in calls):
        raise SkipCheckError("each token attends only to itself")
    spread, rounding = max((_score_spread(ctx, call) for call in calls), key=lambda pair: pair[0] / max(pair[1], 1e-30))
    if spread > rounding:
        return success("the scores change with the distance", spread, rounding)
    message = "there is no position information: neither logits nor scores of a repeated token change"
    return failure(message, spread, rounding)


def _uses_positions(ctx: CheckContext) -> bool:
    """Whether positions that are passed to the model change its logits or scores; True if that cannot be tested."""
    model = ctx.model
    logits_with_positions, tokens = model.logits_with_positions, ctx.random_tokens()
    if logits_with_positions is None or not model.has_positions or model.window == 1:
        return True
    if model.max_seq_len is not None:
        tokens = tokens[:, : model.max_seq_len // 2]
    arange = torch.arange(tokens.shape[1], device=tokens.device)[None]
    results: list[list[Tensor]] = []
    for positions in (arange, 2 * arange):
        with OpTracer(model.module) as tracer:
            out = logits_with_positions(tokens, positions)
        results.append([out, *(call.scores for call in tracer.attentions)])
    return not (len(results[0]) == len(results[1]) > 1 and all(map(torch.equal, *results)))


@register_check("position-range", depends_on=("eval-determinism", "position-encoding"))
def position_range(ctx: CheckContext) -> CaseResult:
    """Catches far positions that are clamped or wrapped: the model cannot distinguish them from other positions.

    Run a long sequence of one repeated token, and compare its attention scores in layers whose scores depend on the
    position: no two key positions may have the same scores for all later queries.

    Cause: positions are clamped to the size of a table, rounded to bf16 or taken modulo a number, or it is too short.
    Fix: use a table or formula for all positions up to the maximum length, and raise an error beyond it.
    """
    model = ctx.model
    longest = _SLOW_RANGE_SEQ_LEN if ctx.is_slow else _KNOWN_RANGE_SEQ_LEN
    length = min(longest, model.max_seq_len or _RANGE_SEQ_LEN)
    if not model.has_positions or length < _MIN_RANGE_SEQ_LEN:
        raise SkipCheckError(f"needs positions and sequences of {_MIN_RANGE_SEQ_LEN} tokens")
    token, num_checked = ctx.random_tokens(1, 1), 0
    try:
        calls = trace_self_attention(ctx, token.expand(-1, length).contiguous())
    except (RuntimeError, IndexError, ValueError, AssertionError):
        if model.max_seq_len is not None:
            raise
        length = MAX_PROBED_SEQ_LEN  # the maximum length is unknown, and lies between the two
        calls = trace_self_attention(ctx, token.expand(-1, length).contiguous())
    for call in calls:
        spread, rounding = _score_spread(ctx, call)
        if spread <= 10 * rounding or _is_clipped(call.k):  # a layer without positions, or with saturated keys
            continue
        num_checked += 1
        pair = _find_equal_positions(call, rounding)
        if pair == (0, 1):  # the keys have no positions at all: rope-shift-invariance names this bug
            num_checked -= 1
        elif pair is not None and _depends_on_first_token(ctx, call, token, length, rounding):
            num_checked -= 1  # a convolution before the attention may make the first positions differ
        elif pair is not None:
            message = f"positions {pair[0]} and {pair[1]} have the same scores for all later queries"
            location = f"position {pair[1]}" + (f", {call.module}" if call.module else "")
            return failure(f"{message}, so the model cannot distinguish them", location=location)
    if not num_checked:
        raise SkipCheckError("needs attention scores that depend on the position")
    return success(f"all {length} positions have different scores in {num_checked} attention calls")


def _is_clipped(k: Tensor | None) -> bool:
    """Whether many elements of the keys have the largest absolute value, as after a clamp."""
    return k is not None and float((k.abs() == k.abs().max()).float().mean()) > _MAX_LARGEST_SHARE


def _depends_on_first_token(
    ctx: CheckContext, attention: AttentionCall, token: Tensor, length: int, rounding: float
) -> bool:
    """Whether the scores of later tokens change with the first one: the inputs of this attention mix tokens."""
    tokens = ctx.replace_tokens(token.expand(-1, length).contiguous(), slice(0, 1))
    calls = [call for call in trace_self_attention(ctx, tokens) if call.module == attention.module]
    if len(calls) != 1 or calls[0].scores.shape != attention.scores.shape:
        return False
    visible = visible_keys(attention)[..., 1:, 1:]
    change = (calls[0].scores.float() - attention.scores.float())[..., 1:, 1 : attention.scores.shape[-2]]
    return bool((change.abs().masked_fill(~visible, 0.0) > 10 * rounding).any())


def _find_equal_positions(attention: AttentionCall, rounding: float) -> tuple[int, int] | None:
    """The first two key positions whose scores are equal for all later queries that attend to both; None if none are.

    Only positions with enough such queries are compared, so that a sliding window leaves few pairs.
    """
    scores, visible = attention.scores[0, ..., : attention.scores.shape[-2]].float(), visible_keys(attention)[0]
    length = scores.shape[-1]
    last = length - _MIN_EQUAL_QUERIES
    for second in (*range(1, min(last, _RANGE_SEQ_LEN)), *range(_RANGE_SEQ_LEN, last, _FAR_POSITION_STEP)):
        rows = slice(second, None)
        both = visible[:, rows, :second] & visible[:, rows, second : second + 1]  # (H, T - second, second)
        difference = (scores[:, rows, :second] - scores[:, rows, second : second + 1]).abs().masked_fill(~both, 0.0)
        equal = (difference.amax((0, 1)) <= rounding) & (both.sum(1).amin(0) >= _MIN_EQUAL_QUERIES)
        if bool(equal.any()):
            return int(equal.long().argmax()), second
    return None


@register_check(
    "rope-shift-invariance",
    depends_on=("causality-tile-edges", "causality", "causality-paths", "batch-isolation", "position-range"),
)
def rope_shift_invariance(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches RoPE scores that depend on absolute positions: q and k are rotated differently.

    Run a sequence of one repeated token: the scores must be constant along each diagonal. Then shift all positions of a
    sequence: the logits must not change.

    Cause: only one of q and k is rotated, or they use different pairs, angles or positions (such as the cache length).
    Fix: rotate q and k with the same function and their true positions; q·k then depends only on i - j.
    """
    model = ctx.model
    if model.relative_positions is False or not model.has_positions:
        raise SkipCheckError("for models with relative positions")
    tokens = repeated_token(ctx)
    if not compare_positions(ctx, tokens).within_tolerance and not (
        model.relative_positions and _has_attention_sinks(ctx, tokens)
    ):
        if model.relative_positions:
            yield failure("relative_positions is True, but the logits of a repeated token change with its position")
            return
        raise SkipCheckError("for models with relative positions; this one has absolute positions")
    config = get_config(model)
    positions = None if config is None else [layer.position for layer in self_attention_configs(config)]
    uses_rope = _uses_rotation(ctx, tokens) if positions is None else any(p.kind == "rope" for p in positions)
    is_rounded = any(getattr(position, "round_to_bf16", False) for position in positions or ())  # Falcon's ALiBi
    if (model.relative_positions or uses_rope) and not is_rounded:
        yield check_score_diagonals(ctx, tokens, center_rows=not uses_rope)
    elif positions is None:
        if (case := _check_key_positions(ctx, tokens)) is not None:
            yield case
        case = check_score_diagonals(ctx, tokens, center_rows=True)
        if case.cause == _ALIBI_SIGN_CAUSE:
            yield case
    if model.logits_with_positions is not None and model.relative_positions:
        yield from _check_shifted_positions(ctx)


def _check_key_positions(ctx: CheckContext, tokens: Tensor) -> CaseResult | None:
    """A failure if the scores of a repeated token depend on the query's position, but not on that of the key.

    The softmax of such scores is uniform. None if any layer's scores depend on the key, or none on the query.
    """
    location: str | None = None
    found = False
    for call in trace_self_attention(ctx, tokens):
        scores, visible = call.scores[..., : call.scores.shape[-2]].float(), visible_keys(call)
        rounding = _score_rounding(call, ctx)
        high, low = scores.masked_fill(~visible, -torch.inf).amax(-1), scores.masked_fill(~visible, torch.inf).amin(-1)
        if float((high - low).max()) > rounding:
            return None
        is_rotated = call.q is not None and max_relative_change(call.q[0].float()) > _MIN_QUERY_CHANGE
        if is_rotated and not found and float((high.amax(-1) - high.amin(-1)).max()) > 10 * rounding:
            found, location = True, call.module or None
    if not found:
        return None
    return failure(
        "the scores of a repeated token depend on the position of the query, but not on that of the key",
        location=location,
        cause="positions are applied to the queries only, as when RoPE does not rotate the keys",
        fix="apply the same rotation to q and k, before a cache stores k",
    )


def _uses_rotation(ctx: CheckContext, tokens: Tensor) -> bool:
    """Whether the model probably uses RoPE: it computes cos or sin, or a name matches `_ROPE_NAME_PATTERN`."""
    with OpTracer(ctx.model.module) as tracer:
        ctx.logits(tokens)
    if tracer.trig_calls:
        return True
    names: list[str] = []
    for path, submodule in () if ctx.model.module is None else ctx.module.named_modules():
        values = vars(submodule) | submodule._buffers
        names += [path, *(name for name, value in values.items() if value is not None)]  # None: without RoPE
    return any(_ROPE_NAME_PATTERN.search(name.lower()) for name in names)


def _low_precision_score_error(attention: AttentionCall, ctx: CheckContext) -> float:
    """Upper estimate of the error of the scores that cos and sin tables in bf16 or fp16 cause; 0 for other dtypes."""
    if ctx.model.dtype not in LOW_PRECISION_DTYPES or attention.q is None:
        return 0.0
    size = _qk_size(attention, attention.scale or attention.q.shape[-1] ** -0.5)
    return 4 * torch.finfo(ctx.model.dtype).eps * max(size, 1e-30)


def _has_attention_sinks(ctx: CheckContext, tokens: Tensor) -> bool:
    """Whether there are attention sinks, whose weight is larger at positions with few earlier tokens."""
    config = get_config(ctx.model)
    if config is not None:
        return any(getattr(layer, "sink", False) for layer in self_attention_configs(config))
    sums = [call.pattern[..., : tokens.shape[1]].float().sum(-1) for call in trace_self_attention(ctx, tokens)]
    return not all(bool(((x - 1).abs() < _ROW_SUM_TOLERANCE).all()) for x in sums)


def check_score_diagonals(ctx: CheckContext, tokens: Tensor, *, center_rows: bool = False) -> CaseResult:
    """Check that scores are constant along each diagonal. `center_rows` is for ALiBi, which may add a row constant."""
    worst, array = Difference(0.0, 0.0, ()), None
    for call in trace_self_attention(ctx, tokens):
        v = call.v
        if v is not None and not torch.allclose(v, v[..., :1, :], rtol=1e-3, atol=1e-3 * max_finite_abs(v)):
            continue  # in layers after attention sinks, hidden states differ between positions
        length = call.scores.shape[-2]
        scores, visible = call.scores[..., :length].float(), visible_keys(call)
        scores = scores / _query_temperature(call, ctx)[..., None]
        is_max_subtracted = float(call.scores.amax(-1).abs().max()) < _ROW_MAX_TOLERANCE
        if center_rows or is_max_subtracted:
            scores = scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]
        array = array or MeasuredArray(
            "matrix",
            f"Scores of a repeated token, head 0 of {call.module or 'the first attention call'}",
            "key position",
            "query position",
            scores.masked_fill(~visible, 0.0).reshape(-1, length, length)[0].tolist(),
            expected="the same along each diagonal: a score depends on the distance only; masked keys are shown as 0",
        )
        both = visible[..., 1:, 1:] & visible[..., :-1, :-1]
        later, earlier = (x.masked_fill(~both, 0.0) for x in (scores[..., 1:, 1:], scores[..., :-1, :-1]))
        diff = max_difference(later, earlier)
        diff.tolerance = max(length * _score_rounding(call, ctx), _low_precision_score_error(call, ctx))
        if not diff.within_tolerance:
            _, head, i, j = diff.index
            message = f"the score at distance {i - j} differs between query positions {i} and {i + 1} (head {head})"
            return diff.failure(f"{message}, for a repeated token", call.module or None, array=array)
        if heads := _count_growing_heads(scores, visible, diff.tolerance):
            message = f"the scores grow linearly with the distance of the key (all {heads} heads)"
            return failure(message, location=call.module or None, cause=_ALIBI_SIGN_CAUSE, fix=_ALIBI_SIGN_FIX)
        worst = max(worst, diff, key=lambda item: item.max_abs)
    return worst.success("the scores of a repeated token depend only on the distance", array)


def _query_temperature(attention: AttentionCall, ctx: CheckContext) -> Tensor:
    """Factor (B, H, T) on the rotated queries of each position, relative to the first one; ones if there is none.

    Some models multiply the queries by a function of the position, such as log(position).
    """
    if attention.q is None:
        return torch.ones(1, 1, 1, device=attention.scores.device)
    q = attention.q.float()
    factor = q.norm(dim=-1) / q[..., :1, :].norm(dim=-1).clamp(min=1e-30)
    tolerance = rotation_tolerance(ctx)
    is_needed = bool(((factor - 1).abs() > tolerance).any()) and bool((factor > 0).all())
    if is_needed and find_rotation_layouts((q / factor[..., None])[0], tolerance):
        return factor
    return torch.ones_like(factor)


def _count_growing_heads(scores: Tensor, visible: Tensor, tolerance: float) -> int:
    """Number of heads, if in each head the last query's scores grow linearly with the key's distance; otherwise 0."""
    row, row_visible = scores[0, :, -1], visible[0, :, -1]
    if row.shape[-1] < 4 or not bool(row_visible.all()):
        return 0
    steps = row[:, :-1] - row[:, 1:]
    is_linear = (steps - steps[:, :1]).abs().amax(-1) <= tolerance
    return len(row) if bool((is_linear & (steps.amin(-1) > 0) & (steps.sum(-1) > 4 * tolerance)).all()) else 0


def _check_shifted_positions(ctx: CheckContext) -> Iterator[CaseResult]:
    """Check that the logits do not change when all positions are shifted by 1 or by 37."""
    logits_with_positions, tokens = require(ctx.model.logits_with_positions), ctx.random_tokens()
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    max_logit = max_finite_abs(logits_with_positions(tokens, positions))
    for shift in (1, 37):
        if ctx.model.max_seq_len is not None and tokens.shape[1] + shift > ctx.model.max_seq_len:
            continue
        diff = ctx.compare(
            lambda: logits_with_positions(tokens, positions), lambda: logits_with_positions(tokens, positions + shift)
        )
        diff.tolerance *= 1 + shift  # the rounding error of an angle grows with the angle
        if ctx.model.dtype in LOW_PRECISION_DTYPES:  # cos and sin tables are rounded too
            diff.tolerance = max(diff.tolerance, 4 * torch.finfo(ctx.model.dtype).eps * max_logit)
        yield diff.expect_equal(
            passed=f"the logits do not change when all positions are shifted by {shift}",
            failed=f"the logits change when all positions are shifted by {shift}, though positions are relative",
            location=f"position {diff.index[1]}",
        )
