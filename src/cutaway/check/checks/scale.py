"""What q·k is multiplied by."""

import math
from collections.abc import Iterator

import torch

from cutaway.check.checks.attention import drawn, equation
from cutaway.check.described import all_layers, config_of
from cutaway.check.exam import CannotError, Exam
from cutaway.check.finding import Part
from cutaway.check.plain import HEADS, WIDTH
from cutaway.check.registry import check
from cutaway.check.theirs import is_one
from cutaway.check.trail import BIASED, Scaled, Trails

OFF = 0.02
"""Of a scale: far less than any mistake, far more than rounding."""


@check(
    "attention-scale",
    catches="scores that are not divided by sqrt(d_head), or by something else: attention too sharp or too flat",
    cause="the scale is missing, applied twice, or of the wrong width (d_model, or d_head without the root)",
    fix="multiply q·k by 1/sqrt(d_head) once, on every path; a scale that is meant is given as scale=",
)
def attention_scale(exam: Exam) -> Iterator[Part]:
    """Follow q and k from their projections to the softmax, and write down each number that they or the scores are
    multiplied by. The product must be the model's scale: 1/sqrt(d_head), unless its configuration says another."""
    target = exam.target
    assert target.logits is not None
    if target.attention is not None:
        yield bare(exam)
        return
    with torch.no_grad(), Trails(target.module) as trails:
        target.logits(exam.text(1, min(exam.length, 7)))
    if not trails.scaled:
        raise CannotError("needs attention whose queries can be followed from their projection to the softmax")
    wanted, known = expected(exam, trails.scaled)
    tried = 0
    doubt = None
    for one, scale in zip(trails.scaled, wanted, strict=True):
        biased = known or not math.isclose(one.factor, 1.0)  # T5 has a learned bias, and no scale at all
        sure = (None, *((BIASED,) if biased else ()), *(("normalised", "learned") if known else ()))
        if one.doubt not in sure:
            doubt = one.doubt
            continue
        tried += 1
        if not math.isclose(one.factor, scale, rel_tol=OFF):
            root = math.isclose(scale, one.width**-0.5, rel_tol=1e-6)
            meant = f"1/sqrt({one.width}) = {scale:.4g}" if root else f"{scale:.4g}"
            yield Part(
                "fail",
                f"q·k is multiplied by {one.factor:.4g}{named(one, exam)}, where {meant} is meant",
                one.factor,
                scale,
                one.module or None,
            )
            return
    if not tried:
        raise CannotError(f"the queries, keys or scores are {doubt}, so that other scales are usual; give scale=")
    yield Part("pass", f"in {tried} attentions q·k is multiplied by {trails.scaled[0].factor:.4g}, as is meant")


def expected(exam: Exam, seen: list[Scaled]) -> tuple[list[float], bool]:
    """The scale of each attention, and whether it is known, and not just usual."""
    if exam.target.scale is not None:
        return [exam.target.scale] * len(seen), True
    usual = [one.width**-0.5 for one in seen]
    config = config_of(exam.target)
    if config is None:
        if exam.target.module is not None and is_one(exam.target.module):
            raise CannotError("needs scale: this family's own is not known")
        return usual, False
    layers = [layer.scale for layer in all_layers(config)]
    if len(layers) != len(seen):
        if len(set(layers)) > 1:
            raise CannotError(f"{len(seen)} attentions were seen of {len(layers)}, which have different scales")
        layers = layers[:1] * len(seen)
    return [scale or root for scale, root in zip(layers, usual, strict=True)], True


def named(one: Scaled, exam: Exam) -> str:
    """Which mistake makes such a number."""
    width = one.width
    names = {
        "no scale at all": 1.0,
        "1/d_head, without the root": 1 / width,
        "sqrt(d_head), not its inverse": width**0.5,
    }
    names |= {"the scale once too often": one.width**-1.0, "1/sqrt(sqrt(d_head))": width**-0.25}
    names |= {f"1/sqrt({width * n}), the width of {n} heads": (width * n) ** -0.5 for n in range(2, 129)}
    for name, value in names.items():
        if math.isclose(value, one.factor, rel_tol=1e-3):
            return f" ({name})"
    return ""


def bare(exam: Exam) -> Part:
    """A kernel alone: which scale makes the equation give what it gives."""
    attention, meant = exam.target.attention, exam.target.scale or WIDTH**-0.5
    assert attention is not None
    q, k, v = drawn(exam, HEADS)
    tried = (meant, 1.0, 1 / WIDTH, WIDTH**0.5, WIDTH**-0.25, (HEADS * WIDTH) ** -0.5, WIDTH**-0.5)
    for scale in tried:
        gap = exam.same(lambda: attention(q, k, v), lambda: equation(exam, q, k, v, scale))
        if gap.ok:
            right = math.isclose(scale, meant, rel_tol=OFF)
            said = f"the kernel multiplies q·k by {scale:.4g}"
            return Part("pass" if right else "fail", said + ("" if right else f", not by {meant:.4g}"), scale, meant)
    raise CannotError("the kernel gives softmax(q·kᵀ·scale)·v for no usual scale")
