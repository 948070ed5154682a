"""Positions: that there are any, that only distances count where that is meant, and how RoPE turns q and k."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.adapters.declared_config import get_config, self_attention_configs
from cutaway.check.checks.attention import trace_self_attention, visible_keys
from cutaway.check.context import CheckContext
from cutaway.check.numerics import LOW_PRECISION_DTYPES, NOISE_MARGIN, Difference, max_difference, max_finite_abs
from cutaway.check.probes.op_tracer import AttentionCall, OpTracer
from cutaway.check.probes.rope_probe import (
    RopeLayer,
    expected_frequencies,
    find_rotation_layouts,
    get_rope_configs,
    max_relative_change,
    rotary_pairs,
    rotation_error,
    rotation_tolerance,
    trace_rope_layers,
)
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError
from cutaway.config import DynamicNTK, LongRope

ROPE_NAME_PATTERN = re.compile(r"rope|rotary|inv_freq|freqs|frequenc|cos|sin_?cached")


MIN_SCORE_ROUNDING = 1e-4
"""Of the largest score: what the rounding of angles may come to."""


CLEAR_DIFFERENCE_FACTOR = 100.0
"""Times the noise: what no measuring of it again could explain."""


ROW_SUM_TOLERANCE = 1e-3
"""Of one: what no rounding of a row's sum comes to."""


ROW_MAX_TOLERANCE = 1e-6


MAX_LOW_PRECISION_ANGLE = 2.0
"""Angles up to here are as exact in 8 bits as the numbers that they turn."""


ALIBI_SIGN_CAUSE = "the bias of the distance (ALiBi) has the wrong sign"


ALIBI_SIGN_FIX = "add -slope · (i - j) to the score of query i and key j"


def _repeated_token(context: CheckContext) -> Tensor:
    """One token again and again: without positions, nothing tells its places apart."""
    return context.random_tokens(1, 1).expand(-1, min(context.seq_len, 13)).contiguous()


def _score_spread(context: CheckContext, attention: AttentionCall) -> tuple[float, float]:
    """How far the scores of a head are apart, where it sees, and what rounding explains."""
    scores = attention.scores[..., : attention.scores.shape[-2]].float()
    seen = visible_keys(attention)
    high = scores.masked_fill(~seen, -torch.inf).amax((-1, -2))
    low = scores.masked_fill(~seen, torch.inf).amin((-1, -2))
    return float((high - low).max()), _score_rounding(attention, context)


def _score_rounding(attention: AttentionCall, context: CheckContext) -> float:
    """What the rounding of scores comes to."""
    scores = attention.scores.float()[..., : attention.scores.shape[-2]][visible_keys(attention)]
    size = max_finite_abs(scores)
    if attention.q is not None and attention.k is not None:  # a small score may be the sum of large products
        size = max(
            size,
            (attention.scale or 0.0)
            * max_finite_abs(attention.q.float().norm(dim=-1))
            * max_finite_abs(attention.k.float().norm(dim=-1)),
        )
    return (
        max(NOISE_MARGIN * context.noise_ratio, MIN_SCORE_ROUNDING / 10, 8 * torch.finfo(attention.scores.dtype).eps)
        * size
    )


def _compare_positions(context: CheckContext, tokens: Tensor) -> Difference:
    """Whether the logits of a text of one token are the same at all places."""
    logits = context.model.logits
    assert logits is not None

    @torch.no_grad()
    def seen() -> Difference:
        later = tokens.shape[1] - 1
        out = logits(tokens)
        gap = max_difference(out[:, 1:], out[:, :1].expand(-1, later, -1))
        gap.tolerance = NOISE_MARGIN * context.noise_ratio * max_finite_abs(out)
        if gap.max_abs > CLEAR_DIFFERENCE_FACTOR * gap.tolerance:
            return gap
        return context.compare(lambda: logits(tokens)[:, 1:], lambda: logits(tokens)[:, :1].expand(-1, later, -1))

    return context.compute_once(f"places {context.noise_ratio} {tokens.tolist()}", seen)


@register_check(
    "position-encoding",
    catches="a model that does not know positions: a table that is never added, a rotation that is never applied",
    cause="positions are not added, all are zero, or another axis (heads, rows) is taken for the sequence",
    fix="number the tokens along the sequence, and see that its place reaches the embedding or q and k; with "
    "has_positions=False a model is meant to have none",
    depends_on=("eval-determinism",),
)
def position_encoding(context: CheckContext) -> Iterator[CaseResult]:
    """Read one token again and again. Without positions its logits are the same everywhere, and in every attention so
    are all scores; with them one of the two is not. Where positions can be given, number a text backwards: its logits
    must change."""
    target, tokens = context.model, _repeated_token(context)
    if tokens.shape[1] < 3:
        raise SkipCheckError("needs texts of three tokens")
    yield from _check_positions_used(context)
    told = _compare_positions(context, tokens)
    if not told.within_tolerance:
        part = CaseResult("pass", "one token has other logits at other places", told.max_abs, told.tolerance)
        if not target.has_positions:
            message = "it is said to have no positions, but one token has other logits at other places"
            part = CaseResult("fail", message, told.max_abs, told.tolerance)
        yield part
        return
    if not target.has_positions:
        yield CaseResult("pass", "places are not told apart, as it is meant", told.max_abs, told.tolerance)
        return
    seen = trace_self_attention(context, tokens)
    if not any(bool((visible_keys(one).sum(-1) > 1).any()) for one in seen):
        raise SkipCheckError("each token sees itself alone")
    worst = max((_score_spread(context, one) for one in seen), key=lambda pair: pair[0] / max(pair[1], 1e-30))
    if worst[0] > worst[1]:
        yield CaseResult("pass", "scores change with the distance", *worst)
    else:
        yield CaseResult(
            "fail", "nothing tells the places of a text apart: neither logits nor scores change with them", *worst
        )


def _check_positions_used(context: CheckContext) -> Iterator[CaseResult]:
    """Whether positions that are given are used at all."""
    target = context.model
    placed, tokens = target.logits_with_positions, context.random_tokens()
    if placed is None or not target.has_positions or target.window == 1:
        return
    if target.max_seq_len is not None:
        tokens = tokens[:, : target.max_seq_len // 2]
    plain = torch.arange(tokens.shape[1], device=tokens.device)[None]
    given: list[list[Tensor]] = []
    for positions in (plain, 2 * plain):
        with torch.no_grad(), OpTracer(target.module) as witness:
            out = placed(tokens, positions)
        given.append([out, *(one.scores for one in witness.attentions)])
    if len(given[0]) == len(given[1]) > 1 and all(map(torch.equal, *given)):
        yield CaseResult(
            "fail", "the positions that a text is given change nothing, not even twice as far apart", 0.0, 0.0
        )


@register_check(
    "rope-shift-invariance",
    catches="a rotation by which more than distances counts: q and k are turned by different rules",
    cause="only one of q and k is turned, or each by other pairs, angles or positions (a cache's length, say)",
    fix="turn q and k by one function with their true positions; q·k then depends on i - j alone",
    depends_on=("causality-tile-edges", "causality", "causality-paths", "batch-isolation"),
)
def rope_shift_invariance(context: CheckContext) -> Iterator[CaseResult]:
    """Read one token again and again: each score must be that of the next query with the next key. Then number a text
    from 0 and from later on: the logits must stay."""
    target = context.model
    if target.relative_positions is False or not target.has_positions:
        raise SkipCheckError("for models in which only distances count")
    tokens = _repeated_token(context)
    if not _compare_positions(context, tokens).within_tolerance and not (
        target.relative_positions and _has_attention_sinks(context, tokens)
    ):
        if target.relative_positions:
            yield CaseResult("fail", "only distances are to count, but one token has other logits at other places")
            return
        raise SkipCheckError("for models in which only distances count; this one has absolute positions")
    config = get_config(target)
    known = None if config is None else [layer.position for layer in self_attention_configs(config)]
    turning = _uses_rotation(context, tokens) if known is None else any(each.kind == "rope" for each in known)
    rounded = any(getattr(each, "round_to_bf16", False) for each in known or ())  # Falcon's ALiBi, to bf16
    if (target.relative_positions or turning) and not rounded:
        yield _check_score_diagonals(context, tokens, center_rows=not turning)
    if target.logits_with_positions is not None and target.relative_positions:
        yield from _check_shifted_positions(context)


def _attention_sums_to_one(context: CheckContext, tokens: Tensor) -> bool:
    """Whether each query's weights sum to one; beside a sink they do not, and then it counts how many there are."""
    length = tokens.shape[1]
    return all(
        bool(((one.pattern[..., :length].float().sum(-1) - 1).abs() < ROW_SUM_TOLERANCE).all())
        for one in trace_self_attention(context, tokens)
    )


def _uses_rotation(context: CheckContext, tokens: Tensor) -> bool:
    """Whether there are signs of a rotation: angles are taken, or something is named so."""
    assert context.model.logits is not None
    with torch.no_grad(), OpTracer(context.model.module) as witness:
        context.model.logits(tokens)
    if witness.trig_calls:
        return True
    module = context.model.module
    names = [] if module is None else [name for part in module.modules() for name in (*vars(part), *part._buffers)]
    names += [] if module is None else [name for name, _ in module.named_modules()]
    return any(ROPE_NAME_PATTERN.search(name.lower()) for name in names)


def _low_precision_score_error(attention: AttentionCall, context: CheckContext) -> float:
    """What tables of cosines in a narrow type may do to a score."""
    if context.model.dtype not in LOW_PRECISION_DTYPES or attention.q is None or attention.k is None:
        return 0.0
    scale = attention.scale or attention.q.shape[-1] ** -0.5
    size = scale * max_finite_abs(attention.q.float().norm(dim=-1)) * max_finite_abs(attention.k.float().norm(dim=-1))
    return 4 * torch.finfo(context.model.dtype).eps * max(size, 1e-30)


def _has_attention_sinks(context: CheckContext, tokens: Tensor) -> bool:
    """Whether some attention goes to nothing: of that, places with few tokens before them have more."""
    config = get_config(context.model)
    if config is not None:
        return any(getattr(layer, "sink", False) for layer in self_attention_configs(config))
    return not _attention_sums_to_one(context, tokens)


def _check_score_diagonals(context: CheckContext, tokens: Tensor, *, center_rows: bool = False) -> CaseResult:
    """Whether scores are the same along each diagonal; `center_rows` is for ALiBi, which may add anything to a row."""
    worst = Difference(0.0, 0.0, ())
    for one in trace_self_attention(context, tokens):
        if one.v is not None and not torch.allclose(
            one.v, one.v[..., :1, :], rtol=1e-3, atol=1e-3 * max_finite_abs(one.v)
        ):
            continue  # behind sinks
        length = one.scores.shape[-2]
        scores, seen = one.scores[..., :length].float(), visible_keys(one)
        if (
            center_rows or float(one.scores.amax(-1).abs().max()) < ROW_MAX_TOLERANCE
        ):  # or each row was lowered by its largest
            scores = scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]
        both = seen[..., 1:, 1:] & seen[..., :-1, :-1]
        gap = max_difference(scores[..., 1:, 1:].masked_fill(~both, 0.0), scores[..., :-1, :-1].masked_fill(~both, 0.0))
        gap.tolerance = max(length * _score_rounding(one, context), _low_precision_score_error(one, context))
        if not gap.within_tolerance:
            _, head, i, j = gap.index
            message = (
                f"one token scores differently at distance {i - j}, from place {i} and from place {i + 1} (head {head})"
            )
            return CaseResult("fail", message, gap.max_abs, gap.tolerance, one.module or None)
        if heads := _count_growing_heads(scores, seen, gap.tolerance):
            message = f"the further a key is, the more it weighs, by an even step a token (all {heads} heads)"
            return CaseResult("fail", message, location=one.module or None, cause=ALIBI_SIGN_CAUSE, fix=ALIBI_SIGN_FIX)
        worst = max(worst, gap, key=lambda each: each.max_abs)
    return CaseResult("pass", "scores of one token depend on distances alone", worst.max_abs, worst.tolerance)


def _count_growing_heads(scores: Tensor, visible: Tensor, tolerance: float) -> int:
    """How many heads there are, where the last query's scores grow with the distance by an even step in all of them."""
    row, shown = scores[0, :, -1], visible[0, :, -1]
    if row.shape[-1] < 4 or not bool(shown.all()):
        return 0
    steps = row[:, :-1] - row[:, 1:]
    even = (steps - steps[:, :1]).abs().amax(-1) <= tolerance
    return len(row) if bool((even & (steps.amin(-1) > 0) & (steps.sum(-1) > 4 * tolerance)).all()) else 0


def _check_shifted_positions(context: CheckContext) -> Iterator[CaseResult]:
    placed, tokens = context.model.logits_with_positions, context.random_tokens()
    assert placed is not None
    plain = torch.arange(tokens.shape[1], device=tokens.device)[None]
    with torch.no_grad():
        size = max_finite_abs(placed(tokens, plain))
    for step in (1, 37):
        if context.model.max_seq_len is not None and tokens.shape[1] + step > context.model.max_seq_len:
            continue
        gap = context.compare(lambda: placed(tokens, plain), lambda: placed(tokens, plain + step))
        gap.tolerance *= 1 + step  # angles grow, and with them their rounding
        if context.model.dtype in LOW_PRECISION_DTYPES:  # of tables of cosines too
            gap.tolerance = max(gap.tolerance, 4 * torch.finfo(context.model.dtype).eps * size)
        yield context.expect_equal(
            gap,
            passed=f"numbered from {step} on, a text has the same logits",
            failed=f"numbered from {step} on, a text has other logits, though only distances should count",
            location=None if gap.within_tolerance else f"position {gap.index[1]}",
        )


@register_check(
    "rope-precision",
    catches="angles taken in bf16 or fp16: far positions fall together, and distances are no longer what they were",
    cause="positions or frequencies are cast with the rest of the model, or autocast lowers their product",
    fix="keep frequencies in fp32 and take angles, cos and sin in fp32 with autocast off; round cos and sin only",
    native_dtype=True,
)
def rope_precision(context: CheckContext) -> Iterator[CaseResult]:
    """Watch cos and sin in a pass in the model's own precision: of large angles none may be taken in 8 or 11 bits."""
    assert context.model.logits is not None
    with torch.no_grad(), OpTracer(context.model.module) as witness:
        if context.memo.get("uses_trig", True):
            context.model.logits(context.random_tokens())
    if not witness.trig_calls:
        raise SkipCheckError("needs angles whose cos or sin is taken in a pass")
    for one in witness.trig_calls:
        if one.dtype in LOW_PRECISION_DTYPES and one.max_abs > MAX_LOW_PRECISION_ANGLE:
            name = str(one.dtype).removeprefix("torch.")
            message = f"cos or sin is taken of angles up to {one.max_abs:.0f} in {name}"
            error = one.max_abs * torch.finfo(one.dtype).eps / 2
            yield CaseResult("fail", f"{message}: they are off by up to {error:.2g}", error, 1e-3, one.module or None)
            return
    yield CaseResult("pass", f"{len(witness.trig_calls)} cosines and sines are taken of fp32 angles")


MAGNITUDE_TOLERANCE = 5e-3
"""Of the factor of cos and sin."""


MAX_SEQ_LEN = 96
"""Tokens of a text that passes the length for which a scaling was made."""


MAX_ANGLE_UNCERTAINTY = 0.3
"""Radians: an angle whose rounding may be larger says nothing."""


SAME_FREQUENCY_CAUSE = (
    "the exponent is the same for all pairs: an integer division, or the index of the pair is not in it"
)


SAME_FREQUENCY_FIX = "take theta ** (-2 j / width) for the pair j, in floating point"


LAYOUT_NAMES = {"half": "(j, j + width/2)", "interleaved": "(2j, 2j + 1)"}


def _rotary_start(layer: RopeLayer) -> int:
    """The first dimension that turns: with a latent those without a position come first."""
    assert layer.attention.q is not None
    return layer.attention.q.shape[-1] - layer.rotary_dim if layer.is_latent else 0


def _rotary_layout(layer: RopeLayer, x: Tensor) -> str:
    """The configured layout. With a latent some libraries sort the pairs first, which no score shows: the better."""
    assert layer.rope is not None
    if not layer.is_latent:
        return layer.rope.layout
    return min(LAYOUT_NAMES, key=lambda layout: rotation_error(x, layout, layer.rotary_dim, _rotary_start(layer)))


def _describe_layout(layouts: set[tuple[str, int, int]]) -> str:
    layout, width, start = max(layouts, key=lambda each: each[1])
    return f"pairs {LAYOUT_NAMES[layout]} of {width} dimensions from {start} on"


@register_check(
    "rope-layout",
    catches="a rotation of the wrong pairs: neighbors where halves are meant, or a mixture that is no rotation at all",
    cause="two habits are mixed: pairs (j, j + width/2) and pairs (2j, 2j + 1), in the code, its tables or the weights",
    fix="build cos and sin for the pairs that are turned, and permute q and k weights when changing the habit",
)
def rope_layout(context: CheckContext) -> Iterator[CaseResult]:
    """Read one token again and again: its queries and keys may only turn from place to place. The pairs that keep
    their length are those that are turned; they must be the configured ones, or at least the same for q and k."""
    ropes = get_rope_configs(context)
    if ropes is None:
        yield from _check_layout_without_config(context)
        return
    if not any(rope for rope, _ in ropes):
        raise SkipCheckError("for models with RoPE")
    tried = [layer for layer in trace_rope_layers(context) if layer.rope is not None]
    if not tried:
        raise SkipCheckError("needs queries and keys that can be seen, with no other positions in them")
    bound, worst = rotation_tolerance(context), 0.0
    for layer in tried:
        for name, x in layer.queries_and_keys():
            layout, start = _rotary_layout(layer, x), _rotary_start(layer)
            far = rotation_error(x, layout, layer.rotary_dim, start)
            worst = max(worst, far)
            meant = f"pairs {LAYOUT_NAMES[layout]} of {layer.rotary_dim} dimensions"
            if far > bound:
                other = find_rotation_layouts(x, bound)
                seen = f"what turns is {_describe_layout(other)}" if other else "this is no rotation of any pairs"
                yield CaseResult("fail", f"{name} are to turn by {meant}, but {seen}", far, bound, layer.module_path)
                return
            frequency, _ = expected_frequencies(layer)
            ahead, back = (_max_angle_error(layer, x, layout, start, sign * frequency, context)[0] for sign in (1, -1))
            if ahead > 1 >= back:
                yield CaseResult(
                    "fail", f"{name} turn backwards: by -position · frequency", ahead, 1.0, layer.module_path
                )
                return
    yield CaseResult("pass", f"in {len(tried)} layers q and k turn by the configured pairs", worst, bound)


def _check_layout_without_config(context: CheckContext) -> Iterator[CaseResult]:
    """Without a configuration: both must turn by the same pairs, and turn only."""
    if not context.model.has_positions or not _compare_positions(context, _repeated_token(context)).within_tolerance:
        raise SkipCheckError("for models with RoPE and no other positions")
    bound, tried = rotation_tolerance(context), 0
    for layer in trace_rope_layers(context):
        (_, q), (_, k) = layer.queries_and_keys()
        if min(max_relative_change(q), max_relative_change(k)) <= bound:
            continue
        tried += 1
        of_q, of_k = find_rotation_layouts(q, bound), find_rotation_layouts(k, bound)
        same = of_q & of_k
        if same and (alike := _count_same_angle_pairs(q, max(same, key=lambda each: each[1]), bound)):
            yield CaseResult(
                "fail",
                f"all {alike} pairs turn by the same angle",
                location=layer.module_path,
                cause=SAME_FREQUENCY_CAUSE,
                fix=SAME_FREQUENCY_FIX,
            )
            return
        if same or _check_score_diagonals(context, _repeated_token(context)).verdict != "fail":
            continue
        if of_q and of_k:
            message = f"queries turn by {_describe_layout(of_q)}, and keys by {_describe_layout(of_k)}"
        else:
            message = f"{'keys' if of_q else 'queries'} do not turn: their length changes from place to place"
        errors = [
            min(rotation_error(x, layout, x.shape[-1], 0) for layout in LAYOUT_NAMES)
            for x, fits in ((q, of_q), (k, of_k))
            if not fits
        ]
        worst = max(errors) if errors else None
        yield CaseResult("fail", message, worst, None if worst is None else bound, layer.module_path)
        return
    if not tried:
        raise SkipCheckError("needs queries and keys that turn")
    yield CaseResult("pass", f"in {tried} layers q and k turn by the same pairs")


def _count_same_angle_pairs(x: Tensor, rotation: tuple[str, int, int], tolerance: float) -> int:
    """How many pairs turn, where all turn by one and the same angle; else 0."""
    z = rotary_pairs(x, *rotation)
    z = z[:, :, z[:, 0].abs().amin(0) > 1e-2 * float(z.abs().max())]
    turn = z[:, 1] / z[:, 0]
    alike = z.shape[-1] > 1 and bool(((turn - turn[:, :1]).abs() < tolerance).all())
    return z.shape[-1] if alike and bool(((turn - 1).abs() > tolerance).all()) else 0


def _max_angle_error(
    layer: RopeLayer, x: Tensor, layout: str, start: int, frequency: Tensor, context: CheckContext
) -> tuple[float, float, float, int, int]:
    """The worst of all angles: how many times its bound it is off, by how much, the bound, its pair and position."""
    z = rotary_pairs(x, layout, layer.rotary_dim, start).cpu()
    first = z[..., 0, :].abs()
    head = first.argmax(0)  # for each pair the head that shows it best
    z = z[head, :, torch.arange(z.shape[-1])]  # (pairs, T)
    positions = layer.positions.cpu().float()
    angle = frequency.cpu()[:, None].double() * positions.double()
    turned = z[:, :1].to(torch.complex128) * torch.polar(torch.ones_like(angle), angle)
    size = z[:, :1].abs().double()
    gap = (z - turned).abs() / size.clamp(min=1e-30)
    rounding = 2**-7 if context.model.dtype in LOW_PRECISION_DTYPES else 2e-6
    bound = rotation_tolerance(context) + angle.abs() * rounding
    use = (bound < MAX_ANGLE_UNCERTAINTY) & (size > 0.02 * float(size.max()))
    share = torch.where(use, gap / bound, 0.0)
    at = int(share.argmax())
    pair, place = divmod(at, share.shape[-1])
    return float(share.flatten()[at]), float(gap[pair, place]), float(bound[pair, place]), pair, int(positions[place])


@register_check(
    "rope-scaling",
    catches="angles that are not the configured ones: theta or a scaling for long contexts is ignored, or half applied",
    cause="theta, the scaling's factor, its blend of frequencies or its attention factor is read and never used",
    fix="compute frequencies (and the factor of cos and sin) from the configuration alone, and compare with a formula",
    depends_on=("position-encoding", "rope-layout"),
)
def rope_scaling(context: CheckContext) -> Iterator[CaseResult]:
    """Read one token at near and far positions, and see by how much each pair of q and k turns: position times the
    frequency of the configured formula. cos and sin must have the configured factor. Scalings that wait for long texts
    are tried with one."""
    ropes = get_rope_configs(context)
    if ropes is None:
        raise SkipCheckError("needs rope: theta, and the scaling")
    if not any(rope for rope, _ in ropes):
        raise SkipCheckError("for models with RoPE")
    lengths: list[int | None] = [None]
    for rope, _ in ropes:
        if rope is not None and isinstance(rope.scaling, DynamicNTK | LongRope):
            original = rope.scaling.original_length
            lengths += (
                [original] if context.model.logits_with_positions is not None or original + 3 <= MAX_SEQ_LEN else []
            )
    for length in dict.fromkeys(lengths):
        yield from _check_angles(context, length)


def _check_angles(context: CheckContext, beyond_length: int | None) -> Iterator[CaseResult]:
    tried = [layer for layer in trace_rope_layers(context, beyond_length=beyond_length) if layer.rope is not None]
    if not tried:
        raise SkipCheckError("needs queries and keys that can be seen, with no other positions in them")
    text = "" if beyond_length is None else f", in a text of more than {beyond_length} tokens"
    worst = (0.0, 0.0, 0.0)
    for layer in tried:
        assert layer.rope is not None
        frequency, magnitude = expected_frequencies(layer)
        kind = layer.rope.scaling.kind
        meant = f"theta {layer.rope.theta:g}" + ("" if kind == "none" else f" and {kind} scaling")
        for name, x in layer.queries_and_keys():
            share, gap, bound, pair, place = _max_angle_error(
                layer, x, _rotary_layout(layer, x), _rotary_start(layer), frequency, context
            )
            worst = max(worst, (share, gap, bound))
            if share > 1:
                message = f"pair {pair} of the {name} at position {place} is not where {meant} would turn it{text}"
                yield CaseResult("fail", message, gap, bound, layer.module_path)
                return
        if layer.max_elementwise is not None and abs(layer.max_elementwise / magnitude - 1) > MAGNITUDE_TOLERANCE:
            factor = f"{layer.max_elementwise:.4g}"
            message = f"cos and sin are multiplied by {factor}, where {kind} scaling has {magnitude:.4g}{text}"
            yield CaseResult("fail", message, layer.max_elementwise, magnitude, layer.module_path)
            return
    yield CaseResult("pass", f"in {len(tried)} layers q and k turn by the configured angles{text}", *worst[1:])
