"""RoPE checks: rope-precision, rope-layout, rope-scaling."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cutaway.check.adapters.declared_config import find_declared_theta
from cutaway.check.checked_model import require
from cutaway.check.checks.attention import trace_self_attention
from cutaway.check.checks.positions import check_score_diagonals, compare_positions, repeated_token
from cutaway.check.context import CheckContext
from cutaway.check.module_state import preserve_state
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.probes.op_tracer import OpTracer
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
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, success, warning
from cutaway.config import DynamicNTK, LongRope
from cutaway.config import Rope as RopeConfig

_MAX_LOW_PRECISION_ANGLE = 2.0
"""Angles up to this value are as exact in bf16 as the vectors that they rotate."""
_MAGNITUDE_TOLERANCE = 5e-3
"""Relative tolerance of the attention factor on cos and sin."""
_MAX_SEQ_LEN = 96
"""Maximum length of the sequence that is used to test a RoPE scaling beyond its original length."""
_MIN_EXTENDING_SEQ_LEN, _EXTENDING_SEQ_LEN = 512, 1030
"""Tables of cos and sin that grow with the sequence usually have 512 or 1024 positions at first."""
_MAX_ANGLE_UNCERTAINTY = 0.3
"""Angles whose possible rounding error is larger than this, in radians, are not compared."""
_SAME_FREQUENCY_CAUSE = "the exponent is the same for all pairs: an integer division, or the pair index is missing"
_SAME_FREQUENCY_FIX = "use theta ** (-2 j / rotary_dim) for pair j, in floating point"
_MIN_ROTATION = 10.0
"""Smallest change of rotated values between positions, in units of the tolerance of a rotation."""
_ROTATED_VALUES_CAUSE = "RoPE is applied to v too, so that the output depends on absolute positions"
_ROTATED_VALUES_FIX = "rotate q and k only"
_LAYOUT_NAMES = {"half": "(j, j + rotary_dim/2)", "interleaved": "(2j, 2j + 1)"}


@register_check("rope-precision", native_dtype=True)
def rope_precision(ctx: CheckContext) -> CaseResult:
    """Catches RoPE angles in bf16 or fp16: large positions are rounded to the same value, and distances change.

    Trace cos and sin calls in a forward pass in the model's own dtype: large angles must not be in bf16 or fp16, nor
    rounded to bf16 before a conversion to fp32. A model with a table of cos and sin also runs a long sequence, for
    which the table may be computed again.

    Cause: positions or frequencies are cast with the rest of the model, or autocast computes their product in bf16.
    Fix: keep frequencies in fp32, compute angles, cos and sin in fp32 without autocast, and cast only cos and sin.
    """
    with OpTracer(ctx.model.module) as tracer:
        if ctx.uses_trig:
            ctx.logits(ctx.random_tokens())
        if not tracer.trig_calls and _may_extend_table(ctx):
            length = min(require(ctx.model.max_seq_len), _EXTENDING_SEQ_LEN)
            with preserve_state(ctx.module):
                ctx.logits(ctx.random_tokens(1, length))
    if not tracer.trig_calls:
        raise SkipCheckError("needs cos or sin calls in the forward pass")
    for call in tracer.trig_calls:
        if call.dtype in LOW_PRECISION_DTYPES and call.max_abs > _MAX_LOW_PRECISION_ANGLE:
            name = str(call.dtype).removeprefix("torch.")
            message = f"cos or sin is computed in {name} for angles up to {call.max_abs:.0f}"
            error = call.max_abs * torch.finfo(call.dtype).eps / 2
            return failure(f"{message}, whose rounding error is up to {error:.2g}", error, 1e-3, call.module or None)
    return success(f"in {len(tracer.trig_calls)} cos and sin calls, no large angle is in bf16 or fp16")


def _may_extend_table(ctx: CheckContext) -> bool:
    """Whether a long sequence could make the model compute cos and sin in bf16 or fp16 for a longer table."""
    model = ctx.model
    if model.module is None or model.dtype not in LOW_PRECISION_DTYPES or ctx.is_slow:
        return False
    return model.relative_positions is True and (model.max_seq_len or 0) > _MIN_EXTENDING_SEQ_LEN


def _rotary_start(layer: RopeLayer) -> int:
    """The first rotated dimension: in latent attention, the dimensions without RoPE come first."""
    return layer.head_dim - layer.rotary_dim if layer.is_latent else 0


def _rotary_layout(layer: RopeLayer, x: Tensor) -> str:
    """RoPE layout of x: the configured layout or, for latent attention, the layout that fits x better.

    Some libraries permute the dimensions of latent attention first, which does not change the scores.
    """
    if not layer.is_latent:
        return require(layer.rope).layout
    return min(_LAYOUT_NAMES, key=lambda layout: rotation_error(x, layout, layer.rotary_dim, _rotary_start(layer)))


def _describe_layout(layouts: set[tuple[str, int, int]]) -> str:
    """Describe the (layout, rotary_dim, first rotated dimension) with the largest rotary_dim."""
    layout, rotary_dim, start = max(layouts, key=lambda candidate: candidate[1])
    return f"pairs {_LAYOUT_NAMES[layout]} of {rotary_dim} dimensions from {start} on"


@register_check("rope-layout")
def rope_layout(ctx: CheckContext) -> CaseResult:
    """Catches RoPE on the wrong pairs: interleaved instead of half-split, or a mixture that is not a rotation.

    Run a sequence of one repeated token: its queries and keys may differ between positions only by a rotation. The
    pairs of dimensions that keep their norm are the rotated ones. They must be the configured pairs or, without a known
    configuration, the same for q and k. The values of the first layer must not be rotated.

    Cause: two layouts are mixed: pairs (j, j + rotary_dim/2) and (2j, 2j + 1), in the code, the tables or the weights.
    Fix: build cos and sin for the pairs that are rotated, and permute the q and k weights to change the layout.
    """
    ropes = get_rope_configs(ctx)
    if ropes is not None and not any(rope for rope, _ in ropes):
        raise SkipCheckError("for models with RoPE")
    if (module := _find_rotated_values(ctx)) is not None:
        case = failure if ropes is not None else warning
        message = "the values are rotated by their positions, as the keys are"
        return case(message, location=module or None, cause=_ROTATED_VALUES_CAUSE, fix=_ROTATED_VALUES_FIX)
    if ropes is None:
        return _check_layout_without_config(ctx)
    layers = [layer for layer in trace_rope_layers(ctx) if layer.rope is not None]
    if not layers:
        raise SkipCheckError("needs queries and keys that can be traced, without other positions in them")
    tolerance, worst = rotation_tolerance(ctx), 0.0
    for layer in layers:
        for name, x in layer.queries_and_keys():
            layout, start = _rotary_layout(layer, x), _rotary_start(layer)
            error = rotation_error(x, layout, layer.rotary_dim, start)
            worst = max(worst, error)
            if error > tolerance:
                message = f"{name} are not rotated by pairs {_LAYOUT_NAMES[layout]} of {layer.rotary_dim} dimensions, "
                other = find_rotation_layouts(x, tolerance)
                message += f"but by {_describe_layout(other)}" if other else "nor by any other pairs"
                return failure(message, error, tolerance, layer.module_path)
            frequency, _ = expected_frequencies(layer)
            errors = [_max_angle_error(layer, x, sign * frequency, ctx).ratio for sign in (1, -1)]
            if errors[0] > 1 >= errors[1]:
                message = f"{name} are rotated in the wrong direction: by -position · frequency"
                return failure(message, errors[0], 1.0, layer.module_path)
    return success(f"in {len(layers)} layers q and k are rotated by the configured pairs", worst, tolerance)


def _find_rotated_values(ctx: CheckContext) -> str | None:
    """The module of the first attention call, if its values of a repeated token are rotated as its keys; else None."""
    tokens, tolerance = repeated_token(ctx), rotation_tolerance(ctx)
    call = next(iter(trace_self_attention(ctx, tokens)), None)
    if call is None or call.k is None or call.v is None:
        return None
    k, v = call.k[0].float(), call.v[0].float()
    if k.shape[-1] != v.shape[-1] or max_relative_change(v) <= _MIN_ROTATION * tolerance:
        return None
    return call.module if find_rotation_layouts(k, tolerance) & find_rotation_layouts(v, tolerance) else None


def _check_layout_without_config(ctx: CheckContext) -> CaseResult:
    """Without a configuration, check that the same pairs of q and k are rotated."""
    # queries and keys may also have learned positions that the values do not have (Shortformer)
    is_absolute = ctx.model.relative_positions is False or not ctx.model.has_positions
    if is_absolute or not compare_positions(ctx, repeated_token(ctx)).within_tolerance:
        raise SkipCheckError("for models with RoPE")
    tolerance, num_checked = rotation_tolerance(ctx), 0
    for layer in trace_rope_layers(ctx):
        (_, q), (_, k) = layer.queries_and_keys()
        if min(max_relative_change(q), max_relative_change(k)) <= tolerance:
            continue
        num_checked += 1
        q_layouts, k_layouts = find_rotation_layouts(q, tolerance), find_rotation_layouts(k, tolerance)
        common = q_layouts & k_layouts
        widest = max(common, key=lambda candidate: candidate[1], default=None)
        if widest is not None and (num_pairs := _count_same_angle_pairs(q, widest, tolerance)):
            message, cause = f"all {num_pairs} pairs are rotated by the same angle", _SAME_FREQUENCY_CAUSE
            return failure(message, location=layer.module_path, cause=cause, fix=_SAME_FREQUENCY_FIX)
        if not q_layouts:  # the queries of each position may have another factor, such as log(position)
            norms = q.norm(dim=-1, keepdim=True)
            q_layouts = find_rotation_layouts(q * norms[..., :1, :] / norms.clamp(min=1e-30), tolerance)
            common = q_layouts & k_layouts
        if common or check_score_diagonals(ctx, repeated_token(ctx)).verdict != "fail":
            continue
        if q_layouts and k_layouts:
            message = f"queries are rotated by {_describe_layout(q_layouts)}, keys by {_describe_layout(k_layouts)}"
        else:
            message = f"{'keys' if q_layouts else 'queries'} are not rotated: their norm changes with the position"
        not_rotated = [x for x, layouts in ((q, q_layouts), (k, k_layouts)) if not layouts]
        errors = [min(rotation_error(x, layout, x.shape[-1], 0) for layout in _LAYOUT_NAMES) for x in not_rotated]
        worst = max(errors, default=None)
        return failure(message, worst, None if worst is None else tolerance, layer.module_path)
    if not num_checked:
        raise SkipCheckError("needs queries and keys that are rotated")
    return success(f"in {num_checked} layers q and k are rotated by the same pairs")


def _count_same_angle_pairs(x: Tensor, rotation: tuple[str, int, int], tolerance: float) -> int:
    """Number of rotated pairs of x, if all are rotated by the same angle; otherwise 0."""
    z = rotary_pairs(x, *rotation)
    z = z[:, :, z[:, 0].abs().amin(0) > 1e-2 * float(z.abs().max())]
    rotation_factor = z[:, 1] / z[:, 0]
    same = z.shape[-1] > 1 and bool(((rotation_factor - rotation_factor[:, :1]).abs() < tolerance).all())
    return z.shape[-1] if same and bool(((rotation_factor - 1).abs() > tolerance).all()) else 0


class _AngleError(NamedTuple):
    """The angle of a layer with the largest error relative to its tolerance."""

    ratio: float
    """Error divided by the tolerance."""
    error: float
    tolerance: float
    pair: int
    position: int


def _max_angle_error(layer: RopeLayer, x: Tensor, frequency: Tensor, ctx: CheckContext) -> _AngleError:
    """Largest error, relative to its tolerance, of the angles of x (queries or keys).

    The angle of each rotated pair is compared with position times frequency.
    """
    z = rotary_pairs(x, _rotary_layout(layer, x), layer.rotary_dim, _rotary_start(layer)).cpu()
    first = z[..., 0, :].abs()
    head = first.argmax(0)  # per pair, the head with the largest norm
    z = z[head, :, torch.arange(z.shape[-1])]  # (pairs, T)
    positions = layer.positions.cpu().float()
    angle = frequency.cpu()[:, None].double() * positions.double()
    expected = z[:, :1].to(torch.complex128) * torch.polar(torch.ones_like(angle), angle)
    norm = z[:, :1].abs().double()
    error = (z - expected).abs() / norm.clamp(min=1e-30)
    rounding = 2**-7 if ctx.model.dtype in LOW_PRECISION_DTYPES else 2e-6
    tolerance = rotation_tolerance(ctx) + angle.abs() * rounding
    compared = (tolerance < _MAX_ANGLE_UNCERTAINTY) & (norm > 0.02 * float(norm.max()))
    ratio = torch.where(compared, error / tolerance, 0.0)
    pair, n = divmod(int(ratio.argmax()), ratio.shape[-1])
    worst = float(ratio[pair, n]), float(error[pair, n]), float(tolerance[pair, n])
    return _AngleError(*worst, pair, int(positions[n]))


@register_check("rope-scaling", depends_on=("position-encoding", "rope-layout"))
def rope_scaling(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches RoPE angles that differ from the configuration: theta or a context-extension scaling is ignored.

    Run one token at near and far positions and measure the rotation of each pair of q and k: it must be position times
    the frequency of the configured formula. cos and sin must have the configured attention factor. Scalings that change
    the angles beyond the original length are also tested beyond that length.

    Cause: theta, the scaling factor, its frequency interpolation or its attention factor is read and never used.
    Fix: compute frequencies (and the factor on cos and sin) from the configuration, and test them with the formula.
    """
    ropes = get_rope_configs(ctx)
    if ropes is None:
        theta = None if ctx.model.module is None else find_declared_theta(ctx.module)
        if theta is None:
            raise SkipCheckError("needs the RoPE parameters (the property rope=)")
        yield _check_declared_theta(ctx, theta)
        return
    if not any(rope for rope, _ in ropes):
        raise SkipCheckError("for models with RoPE")
    lengths: list[int | None] = [None]
    for rope, _ in ropes:
        if rope is not None and isinstance(rope.scaling, DynamicNTK | LongRope):
            original = rope.scaling.original_length
            lengths += [original] if ctx.model.logits_with_positions is not None or original + 3 <= _MAX_SEQ_LEN else []
    for length in dict.fromkeys(lengths):
        yield _check_angles(ctx, length)


def _check_declared_theta(ctx: CheckContext, theta: float) -> CaseResult:
    """Compare the angles of q and k with the theta in the module's own configuration. The layout is measured."""
    tolerance, num_checked = rotation_tolerance(ctx), 0
    for layer in trace_rope_layers(ctx):
        q, k = (x for _, x in layer.queries_and_keys())
        if max(map(max_relative_change, (q, k))) <= tolerance:  # a layer without RoPE
            continue
        layouts = find_rotation_layouts(q, tolerance) & find_rotation_layouts(k, tolerance)
        layouts = {layout for layout in layouts if layout[1] > 2 and layout[2] == 0}
        if not layouts:
            continue
        num_checked += 1
        candidates = [
            replace(layer, rope=RopeConfig(theta=theta, layout=layout, rotary_dim=rotary_dim))
            for layout, rotary_dim, _ in layouts
        ]
        angles = [_max_angle_error(other, k, expected_frequencies(other)[0], ctx) for other in candidates]
        index = min(range(len(angles)), key=lambda n: angles[n].ratio)
        angle = angles[index]
        if angle.ratio > 1:
            message = (
                f"pair {angle.pair} of the keys at position {angle.position} has another angle than theta {theta:g}"
            )
            measured = _measure_theta(candidates[index], k)
            message += f", which the configuration states, gives; the measured theta is {measured:.4g}"
            return failure(message, measured, theta, layer.module_path)
    if not num_checked:
        raise SkipCheckError("needs queries and keys that are rotated")
    return success(f"in {num_checked} layers k has the angles of theta {theta:g}, which the configuration states")


def _measure_theta(layer: RopeLayer, x: Tensor) -> float:
    """The theta that explains the angle of pair 1 between positions 0 and 1: its frequency is theta^(-2 / dim)."""
    z = rotary_pairs(x, require(layer.rope).layout, layer.rotary_dim, 0)[..., 1]  # (H, T)
    head = int(z[:, 0].abs().argmax())
    frequency = float(torch.angle(z[head, 1] / z[head, 0]).abs())
    return frequency ** (-layer.rotary_dim / 2)


def _check_angles(ctx: CheckContext, beyond_length: int | None) -> CaseResult:
    """Compare the angles of q and k, and the factor on cos and sin, with the configured formula, in each layer."""
    layers = [layer for layer in trace_rope_layers(ctx, beyond_length=beyond_length) if layer.rope is not None]
    if not layers:
        raise SkipCheckError("needs queries and keys that can be traced, without other positions in them")
    condition = "" if beyond_length is None else f", beyond the original length of {beyond_length} tokens"
    worst = _AngleError(0.0, 0.0, 0.0, 0, 0)
    for layer in layers:
        config = require(layer.rope)
        frequency, magnitude = expected_frequencies(layer)
        kind = config.scaling.kind
        rope = f"theta {config.theta:g}" + ("" if kind == "none" else f" and {kind} scaling")
        for name, x in layer.queries_and_keys():
            angle = _max_angle_error(layer, x, frequency, ctx)
            worst = max(worst, angle)
            if angle.ratio > 1:
                message = f"pair {angle.pair} of the {name} at position {angle.position} has another angle than {rope}"
                return failure(f"{message} gives{condition}", angle.error, angle.tolerance, layer.module_path)
        if layer.max_elementwise is not None and abs(layer.max_elementwise / magnitude - 1) > _MAGNITUDE_TOLERANCE:
            factor = f"{layer.max_elementwise:.4g}"
            message = f"cos and sin are multiplied by {factor} instead of {magnitude:.4g} ({kind} scaling){condition}"
            return failure(message, layer.max_elementwise, magnitude, layer.module_path)
    message = f"in {len(layers)} layers q and k have the configured angles{condition}"
    return success(message, worst.error, worst.tolerance)
