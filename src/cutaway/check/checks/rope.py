"""Rotations: which dimensions make a pair, and by which angles they turn."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.checks.positions import along_diagonals, constant, places_differ
from cutaway.check.exam import NARROW, CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.registry import check
from cutaway.check.turning import Layer, bound_of, fitting, frequencies, layers, moved, pairs, rope_of, strain
from cutaway.config import DynamicNTK, LongRope

LOUD = 5e-3
"""Of the factor of cos and sin."""
MOST = 96
"""Tokens of a text that passes the length for which a scaling was made."""
VAGUE = 0.3
"""Radians: an angle whose rounding may be larger says nothing."""
ALIKE = "the exponent is the same for all pairs: an integer division, or the index of the pair is not in it"
SPREAD = "take theta ** (-2 j / width) for the pair j, in floating point"
NAMES = {"half": "(j, j + width/2)", "interleaved": "(2j, 2j + 1)"}


def start_of(layer: Layer) -> int:
    """The first dimension that turns: with a latent those without a position come first."""
    assert layer.one.q is not None
    return layer.one.q.shape[-1] - layer.width if layer.latent else 0


def layout_of(layer: Layer, x: Tensor) -> str:
    """The configured layout. With a latent some libraries sort the pairs first, which no score shows: the better."""
    assert layer.rope is not None
    if not layer.latent:
        return layer.rope.layout
    return min(NAMES, key=lambda layout: strain(x, layout, layer.width, start_of(layer)))


def described(found: set[tuple[str, int, int]]) -> str:
    layout, width, start = max(found, key=lambda each: each[1])
    return f"pairs {NAMES[layout]} of {width} dimensions from {start} on"


@check(
    "rope-layout",
    catches="a rotation of the wrong pairs: neighbours where halves are meant, or a mixture that is no rotation at all",
    cause="two habits are mixed: pairs (j, j + width/2) and pairs (2j, 2j + 1), in the code, its tables or the weights",
    fix="build cos and sin for the pairs that are turned, and permute q and k weights when changing the habit",
)
def rope_layout(exam: Exam) -> Iterator[Part]:
    """Read one token again and again: its queries and keys may only turn from place to place. The pairs that keep
    their length are those that are turned; they must be the configured ones, or at least the same for q and k."""
    ropes = rope_of(exam)
    if ropes is None:
        yield from of_any(exam)
        return
    if not any(rope for rope, _ in ropes):
        raise CannotError("for models with RoPE")
    tried = [layer for layer in layers(exam) if layer.rope is not None]
    if not tried:
        raise CannotError("needs queries and keys that can be seen, with no other positions in them")
    bound, worst = bound_of(exam), 0.0
    for layer in tried:
        for name, x in layer.vectors():
            layout, start = layout_of(layer, x), start_of(layer)
            far = strain(x, layout, layer.width, start)
            worst = max(worst, far)
            meant = f"pairs {NAMES[layout]} of {layer.width} dimensions"
            if far > bound:
                other = fitting(x, bound)
                seen = f"what turns is {described(other)}" if other else "this is no rotation of any pairs"
                yield Part("fail", f"{name} are to turn by {meant}, but {seen}", far, bound, layer.where)
                return
            frequency, _ = frequencies(layer)
            ahead, back = (off(layer, x, layout, start, sign * frequency, exam)[0] for sign in (1, -1))
            if ahead > 1 >= back:
                yield Part("fail", f"{name} turn backwards: by -position · frequency", ahead, 1.0, layer.where)
                return
    yield Part("pass", f"in {len(tried)} layers q and k turn by the configured pairs", worst, bound)


def of_any(exam: Exam) -> Iterator[Part]:
    """Without a configuration: both must turn by the same pairs, and turn only."""
    if not exam.target.ordered or not places_differ(exam, constant(exam)).ok:
        raise CannotError("for models with RoPE and no other positions")
    bound, tried = bound_of(exam), 0
    for layer in layers(exam):
        (_, q), (_, k) = layer.vectors()
        if min(moved(q), moved(k)) <= bound:
            continue
        tried += 1
        of_q, of_k = fitting(q, bound), fitting(k, bound)
        same = of_q & of_k
        if same and (alike := one_angle(q, max(same, key=lambda each: each[1]), bound)):
            yield Part("fail", f"all {alike} pairs turn by the same angle", where=layer.where, cause=ALIKE, fix=SPREAD)
            return
        if same or along_diagonals(exam, constant(exam)).verdict != "fail":
            continue
        if of_q and of_k:
            message = f"queries turn by {described(of_q)}, and keys by {described(of_k)}"
        else:
            message = f"{'keys' if of_q else 'queries'} do not turn: their length changes from place to place"
        worst = max(
            min(strain(x, layout, x.shape[-1], 0) for layout in NAMES) for x, fits in ((q, of_q), (k, of_k)) if not fits
        ) if not (of_q and of_k) else None  # fmt: skip
        yield Part("fail", message, worst, None if worst is None else bound, layer.where)
        return
    if not tried:
        raise CannotError("needs queries and keys that turn")
    yield Part("pass", f"in {tried} layers q and k turn by the same pairs")


def one_angle(x: Tensor, how: tuple[str, int, int], bound: float) -> int:
    """How many pairs turn, where all turn by one and the same angle; else 0."""
    z = pairs(x, *how)
    z = z[:, :, z[:, 0].abs().amin(0) > 1e-2 * float(z.abs().max())]
    turn = z[:, 1] / z[:, 0]
    alike = z.shape[-1] > 1 and bool(((turn - turn[:, :1]).abs() < bound).all())
    return z.shape[-1] if alike and bool(((turn - 1).abs() > bound).all()) else 0


def off(
    layer: Layer, x: Tensor, layout: str, start: int, frequency: Tensor, exam: Exam
) -> tuple[float, float, float, int, int]:
    """The worst of all angles: how many times its bound it is off, by how much, the bound, its pair and position."""
    z = pairs(x, layout, layer.width, start).cpu()
    first = z[..., 0, :].abs()
    head = first.argmax(0)  # for each pair the head that shows it best
    z = z[head, :, torch.arange(z.shape[-1])]  # (pairs, T)
    positions = layer.positions.cpu().float()
    angle = frequency.cpu()[:, None].double() * positions.double()
    turned = z[:, :1].to(torch.complex128) * torch.polar(torch.ones_like(angle), angle)
    size = z[:, :1].abs().double()
    gap = (z - turned).abs() / size.clamp(min=1e-30)
    rounding = 2**-7 if exam.target.dtype in NARROW else 2e-6
    bound = bound_of(exam) + angle.abs() * rounding
    use = (bound < VAGUE) & (size > 0.02 * float(size.max()))
    share = torch.where(use, gap / bound, 0.0)
    at = int(share.argmax())
    pair, place = divmod(at, share.shape[-1])
    return float(share.flatten()[at]), float(gap[pair, place]), float(bound[pair, place]), pair, int(positions[place])


@check(
    "rope-scaling",
    catches="angles that are not the configured ones: theta or a scaling for long contexts is ignored, or half applied",
    cause="theta, the scaling's factor, its blend of frequencies or its attention factor is read and never used",
    fix="compute frequencies (and the factor of cos and sin) from the configuration alone, and compare with a formula",
    after=("token-order", "rope-layout"),
)
def rope_scaling(exam: Exam) -> Iterator[Part]:
    """Read one token at near and far positions, and see by how much each pair of q and k turns: position times the
    frequency of the configured formula. cos and sin must have the configured factor. Scalings that wait for long texts
    are tried with one."""
    ropes = rope_of(exam)
    if ropes is None:
        raise CannotError("needs rope: theta, and the scaling")
    if not any(rope for rope, _ in ropes):
        raise CannotError("for models with RoPE")
    lengths: list[int | None] = [None]
    for rope, _ in ropes:
        if rope is not None and isinstance(rope.scaling, DynamicNTK | LongRope):
            original = rope.scaling.original_length
            lengths += [original] if exam.target.placed is not None or original + 3 <= MOST else []
    for length in dict.fromkeys(lengths):
        yield from angles(exam, length)


def angles(exam: Exam, beyond: int | None) -> Iterator[Part]:
    tried = [layer for layer in layers(exam, beyond=beyond) if layer.rope is not None]
    if not tried:
        raise CannotError("needs queries and keys that can be seen, with no other positions in them")
    text = "" if beyond is None else f", in a text of more than {beyond} tokens"
    worst = (0.0, 0.0, 0.0)
    for layer in tried:
        assert layer.rope is not None
        frequency, magnitude = frequencies(layer)
        kind = layer.rope.scaling.kind
        meant = f"theta {layer.rope.theta:g}" + ("" if kind == "none" else f" and {kind} scaling")
        for name, x in layer.vectors():
            share, gap, bound, pair, place = off(layer, x, layout_of(layer, x), start_of(layer), frequency, exam)
            worst = max(worst, (share, gap, bound))
            if share > 1:
                message = f"pair {pair} of the {name} at position {place} is not where {meant} would turn it{text}"
                yield Part("fail", message, gap, bound, layer.where)
                return
        if layer.loud is not None and abs(layer.loud / magnitude - 1) > LOUD:
            message = f"cos and sin are multiplied by {layer.loud:.4g}, where {kind} scaling has {magnitude:.4g}{text}"
            yield Part("fail", message, layer.loud, magnitude, layer.where)
            return
    yield Part("pass", f"in {len(tried)} layers q and k turn by the configured angles{text}", *worst[1:])
