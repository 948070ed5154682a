"""Positions: that there are any, and that only distances count where that is meant."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.check.checks.attention import own_attentions, visible
from cutaway.check.described import config_of, own_layers
from cutaway.check.exam import MARGIN, NARROW, CannotError, Exam, Gap, apart, scale_of
from cutaway.check.finding import Part
from cutaway.check.registry import check
from cutaway.check.witness import Attention, Witness

ROTARY = re.compile(r"rope|rotary|inv_freq|freqs|frequenc|cos|sin_?cached")
LEAST = 1e-4
"""Of the largest score: what the rounding of angles may come to."""
CLEAR = 100.0
"""Times the noise: what no measuring of it again could explain."""
SUM = 1e-3
"""Of one: what no rounding of a row's sum comes to."""
EXACT = 1e-6
ANGLE = 2.0
"""Angles up to here are as exact in 8 bits as the numbers that they turn."""

UPSIDE = "the bias of the distance (ALiBi) has the wrong sign"
NEARER = "add -slope · (i - j) to the score of query i and key j"


def constant(exam: Exam) -> Tensor:
    """One token again and again: without positions, nothing tells its places apart."""
    return exam.text(1, 1).expand(-1, min(exam.length, 13)).contiguous()


def spread(exam: Exam, one: Attention) -> tuple[float, float]:
    """How far the scores of a head are apart, where it sees, and what rounding explains."""
    scores = one.scores[..., : one.scores.shape[-2]].float()
    seen = visible(one)
    high = scores.masked_fill(~seen, -torch.inf).amax((-1, -2))
    low = scores.masked_fill(~seen, torch.inf).amin((-1, -2))
    return float((high - low).max()), noise(one, exam)


def noise(one: Attention, exam: Exam) -> float:
    """What the rounding of scores comes to."""
    scores = one.scores.float()[..., : one.scores.shape[-2]][visible(one)]
    size = scale_of(scores)
    if one.q is not None and one.k is not None:  # a small score may be the sum of large products
        size = max(
            size, (one.scale or 0.0) * scale_of(one.q.float().norm(dim=-1)) * scale_of(one.k.float().norm(dim=-1))
        )
    return max(MARGIN * exam.ratio, LEAST / 10, 8 * torch.finfo(one.scores.dtype).eps) * size


def places_differ(exam: Exam, tokens: Tensor) -> Gap:
    """Whether the logits of a text of one token are the same at all places."""
    logits = exam.target.logits
    assert logits is not None

    @torch.no_grad()
    def seen() -> Gap:
        later = tokens.shape[1] - 1
        out = logits(tokens)
        gap = apart(out[:, 1:], out[:, :1].expand(-1, later, -1))
        gap.bound = MARGIN * exam.ratio * scale_of(out)
        if gap.worst > CLEAR * gap.bound:
            return gap
        return exam.same(lambda: logits(tokens)[:, 1:], lambda: logits(tokens)[:, :1].expand(-1, later, -1))

    return exam.once(f"places {exam.ratio} {tokens.tolist()}", seen)


@check(
    "token-order",
    catches="a model that does not know positions: a table that is never added, a rotation that is never applied",
    cause="positions are not added, all are zero, or another axis (heads, rows) is taken for the sequence",
    fix="number the tokens along the sequence, and see that its place reaches the embedding or q and k; with "
    "ordered=False a model is meant to have none",
    after=("eval-repeatable",),
)
def token_order(exam: Exam) -> Iterator[Part]:
    """Read one token again and again. Without positions its logits are the same everywhere, and in every attention so
    are all scores; with them one of the two is not. Where positions can be given, number a text backwards: its logits
    must change."""
    target, tokens = exam.target, constant(exam)
    if tokens.shape[1] < 3:
        raise CannotError("needs texts of three tokens")
    yield from heeded(exam)
    told = places_differ(exam, tokens)
    if not told.ok:
        part = Part("pass", "one token has other logits at other places", told.worst, told.bound)
        if not target.ordered:
            part = Part("fail", "it is said to have no positions, but one token has other logits at other places",
                        told.worst, told.bound)  # fmt: skip
        yield part
        return
    if not target.ordered:
        yield Part("pass", "places are not told apart, as it is meant", told.worst, told.bound)
        return
    seen = own_attentions(exam, tokens)
    if not any(bool((visible(one).sum(-1) > 1).any()) for one in seen):
        raise CannotError("each token sees itself alone")
    worst = max((spread(exam, one) for one in seen), key=lambda pair: pair[0] / max(pair[1], 1e-30))
    if worst[0] > worst[1]:
        yield Part("pass", "scores change with the distance", *worst)
    else:
        yield Part(
            "fail", "nothing tells the places of a text apart: neither logits nor scores change with them", *worst
        )


def heeded(exam: Exam) -> Iterator[Part]:
    """Whether positions that are given are used at all."""
    target = exam.target
    placed, tokens = target.placed, exam.text()
    if placed is None or not target.ordered or target.window == 1:
        return
    if target.longest is not None:
        tokens = tokens[:, : target.longest // 2]
    plain = torch.arange(tokens.shape[1], device=tokens.device)[None]
    given: list[list[Tensor]] = []
    for positions in (plain, 2 * plain):
        with torch.no_grad(), Witness(target.module) as witness:
            out = placed(tokens, positions)
        given.append([out, *(one.scores for one in witness.attentions)])
    if len(given[0]) == len(given[1]) > 1 and all(map(torch.equal, *given)):
        yield Part("fail", "the positions that a text is given change nothing, not even twice as far apart", 0.0, 0.0)


@check(
    "rope-shift",
    catches="a rotation by which more than distances counts: q and k are turned by different rules",
    cause="only one of q and k is turned, or each by other pairs, angles or positions (a cache's length, say)",
    fix="turn q and k by one function with their true positions; q·k then depends on i - j alone",
    after=("causality-edges", "causality", "causality-paths", "rows-apart"),
)
def rope_shift(exam: Exam) -> Iterator[Part]:
    """Read one token again and again: each score must be that of the next query with the next key. Then number a text
    from 0 and from later on: the logits must stay."""
    target = exam.target
    if target.relative is False or not target.ordered:
        raise CannotError("for models in which only distances count")
    tokens = constant(exam)
    if not places_differ(exam, tokens).ok and not (target.relative and has_sinks(exam, tokens)):
        if target.relative:
            yield Part("fail", "only distances are to count, but one token has other logits at other places")
            return
        raise CannotError("for models in which only distances count; this one has absolute positions")
    config = config_of(target)
    known = None if config is None else [layer.position for layer in own_layers(config)]
    turning = turns(exam, tokens) if known is None else any(each.kind == "rope" for each in known)
    rounded = any(getattr(each, "rounded", False) for each in known or ())  # Falcon's ALiBi, to bf16
    if (target.relative or turning) and not rounded:
        yield along_diagonals(exam, tokens, centred=not turning)
    if target.placed is not None and target.relative:
        yield from shifted(exam)


def all_weigh_one(exam: Exam, tokens: Tensor) -> bool:
    """Whether each query's weights sum to one; beside a sink they do not, and then it counts how many there are."""
    length = tokens.shape[1]
    return all(
        bool(((one.pattern[..., :length].float().sum(-1) - 1).abs() < SUM).all())
        for one in own_attentions(exam, tokens)
    )


def turns(exam: Exam, tokens: Tensor) -> bool:
    """Whether there are signs of a rotation: angles are taken, or something is named so."""
    assert exam.target.logits is not None
    with torch.no_grad(), Witness(exam.target.module) as witness:
        exam.target.logits(tokens)
    if witness.turned:
        return True
    module = exam.target.module
    names = [] if module is None else [name for part in module.modules() for name in (*vars(part), *part._buffers)]
    names += [] if module is None else [name for name, _ in module.named_modules()]
    return any(ROTARY.search(name.lower()) for name in names)


def narrow(one: Attention, exam: Exam) -> float:
    """What tables of cosines in a narrow type may do to a score."""
    if exam.target.dtype not in NARROW or one.q is None or one.k is None:
        return 0.0
    scale = one.scale or one.q.shape[-1] ** -0.5
    size = scale * scale_of(one.q.float().norm(dim=-1)) * scale_of(one.k.float().norm(dim=-1))
    return 4 * torch.finfo(exam.target.dtype).eps * max(size, 1e-30)


def has_sinks(exam: Exam, tokens: Tensor) -> bool:
    """Whether some attention goes to nothing: of that, places with few tokens before them have more."""
    config = config_of(exam.target)
    if config is not None:
        return any(getattr(layer, "sink", False) for layer in own_layers(config))
    return not all_weigh_one(exam, tokens)


def along_diagonals(exam: Exam, tokens: Tensor, *, centred: bool = False) -> Part:
    """Whether scores are the same along each diagonal; `centred` is for ALiBi, which may add anything to a row."""
    worst = Gap(0.0, 0.0, ())
    for one in own_attentions(exam, tokens):
        if one.v is not None and not torch.allclose(one.v, one.v[..., :1, :], rtol=1e-3, atol=1e-3 * scale_of(one.v)):
            continue  # behind sinks
        length = one.scores.shape[-2]
        scores, seen = one.scores[..., :length].float(), visible(one)
        if centred or float(one.scores.amax(-1).abs().max()) < EXACT:  # or each row was lowered by its largest
            scores = scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]
        both = seen[..., 1:, 1:] & seen[..., :-1, :-1]
        gap = apart(scores[..., 1:, 1:].masked_fill(~both, 0.0), scores[..., :-1, :-1].masked_fill(~both, 0.0))
        gap.bound = max(length * noise(one, exam), narrow(one, exam))
        if not gap.ok:
            _, head, i, j = gap.index
            message = (
                f"one token scores differently at distance {i - j}, from place {i} and from place {i + 1} (head {head})"
            )
            return Part("fail", message, gap.worst, gap.bound, one.module or None)
        if heads := growing(scores, seen, gap.bound):
            message = f"the further a key is, the more it weighs, by an even step a token (all {heads} heads)"
            return Part("fail", message, where=one.module or None, cause=UPSIDE, fix=NEARER)
        worst = max(worst, gap, key=lambda each: each.worst)
    return Part("pass", "scores of one token depend on distances alone", worst.worst, worst.bound)


def growing(scores: Tensor, seen: Tensor, bound: float) -> int:
    """How many heads there are, where the last query's scores grow with the distance by an even step in all of them."""
    row, shown = scores[0, :, -1], seen[0, :, -1]
    if row.shape[-1] < 4 or not bool(shown.all()):
        return 0
    steps = row[:, :-1] - row[:, 1:]
    even = (steps - steps[:, :1]).abs().amax(-1) <= bound
    return len(row) if bool((even & (steps.amin(-1) > 0) & (steps.sum(-1) > 4 * bound)).all()) else 0


def shifted(exam: Exam) -> Iterator[Part]:
    placed, tokens = exam.target.placed, exam.text()
    assert placed is not None
    plain = torch.arange(tokens.shape[1], device=tokens.device)[None]
    with torch.no_grad():
        size = scale_of(placed(tokens, plain))
    for step in (1, 37):
        if exam.target.longest is not None and tokens.shape[1] + step > exam.target.longest:
            continue
        gap = exam.same(lambda: placed(tokens, plain), lambda: placed(tokens, plain + step))
        gap.bound *= 1 + step  # angles grow, and with them their rounding
        if exam.target.dtype in NARROW:  # of tables of cosines too
            gap.bound = max(gap.bound, 4 * torch.finfo(exam.target.dtype).eps * size)
        yield exam.judge(
            gap,
            held=f"numbered from {step} on, a text has the same logits",
            broken=f"numbered from {step} on, a text has other logits, though only distances should count",
            where=None if gap.ok else f"position {gap.index[1]}",
        )


@check(
    "rope-precision",
    catches="angles taken in bf16 or fp16: far positions fall together, and distances are no longer what they were",
    cause="positions or frequencies are cast with the rest of the model, or autocast lowers their product",
    fix="keep frequencies in fp32 and take angles, cos and sin in fp32 with autocast off; round cos and sin only",
    own=True,
)
def rope_precision(exam: Exam) -> Iterator[Part]:
    """Watch cos and sin in a pass in the model's own precision: of large angles none may be taken in 8 or 11 bits."""
    assert exam.target.logits is not None
    with torch.no_grad(), Witness(exam.target.module) as witness:
        if exam.known.get("turned", True):
            exam.target.logits(exam.text())
    if not witness.turned:
        raise CannotError("needs angles whose cos or sin is taken in a pass")
    for one in witness.turned:
        if one.dtype in NARROW and one.largest > ANGLE:
            name = str(one.dtype).removeprefix("torch.")
            message = f"cos or sin is taken of angles up to {one.largest:.0f} in {name}"
            error = one.largest * torch.finfo(one.dtype).eps / 2
            yield Part("fail", f"{message}: they are off by up to {error:.2g}", error, 1e-3, one.module or None)
            return
    yield Part("pass", f"{len(witness.turned)} cosines and sines are taken of fp32 angles")
