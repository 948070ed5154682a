"""Whether the gradient is the slope: what autograd says of the text's vectors, beside what moving them does."""

import torch
from torch import Tensor

from cutaway.check.exam import MARGIN, SLOW, CannotError, Exam, scale_of
from cutaway.check.finding import Part
from cutaway.check.vectors import moved, tables

STEP = 1e-2
"""Of the vectors' usual size: how far they are moved; then half as far."""
NEAR = 1 / 16
"""Of a step: where the gradient is right there, it was a kink."""
SMOOTH, WRONG = 0.02, 0.06
"""How far two slopes may be apart to be called one, and the gradient from them to be called another."""


def slope(exam: Exam) -> Part:
    """Move the text's vectors a little to both sides, in random directions: what a random sum of the logits changes by
    must be what its gradient says."""
    module, logits = exam.target.module, exam.target.logits
    assert module is not None
    assert logits is not None
    tokens = exam.text(1, min(8, exam.length))
    with torch.enable_grad(), moved(module, logits, tokens) as added:
        out = logits(tokens)
        if not added or not out.requires_grad:
            raise CannotError("needs logits that carry a gradient")
        weights = torch.randn(out.shape, generator=exam.generator).to(out.device, torch.float32)
        (gradient,) = torch.autograd.grad((out.float() * weights).sum(), added[0], allow_unused=True)
        if gradient is None:
            return wrong("the text's vectors get no gradient", 0.0)
        with torch.no_grad():
            size = float(tables(module, logits, tokens)[0](tokens).float().square().mean().sqrt())
            noise = exam.ratio * scale_of(out) * out.numel() ** 0.5 / (STEP * max(size, 1e-30))
            due, seen = [], []
            near: list[tuple[float, float]] = []

            def risen(direction: Tensor, step: float) -> float:
                values = []
                for sign in (1.0, -1.0):
                    added[0].data = (sign * step * direction).to(added[0].dtype)
                    values.append(float((logits(tokens).float() * weights).sum(dtype=torch.float64)))
                return (values[0] - values[1]) / (2 * step)

            for _ in range(3 if exam.seconds_a_pass < SLOW else 1):
                direction = torch.randn(gradient.shape, generator=exam.generator).to(gradient.device)
                due.append(float((gradient.float() * direction).sum()))
                seen.append([risen(direction, STEP * size * share) for share in (1.0, 0.5)])
                if abs(due[-1] - seen[-1][1]) > WRONG * abs(due[-1]):  # a kink may lie within the step, and not nearer
                    near.append((abs(due[-1] - seen[-1][1]), abs(due[-1] - risen(direction, STEP * size * NEAR))))
            added[0].data.zero_()
    whole = max(sum(each[1] ** 2 for each in seen), sum(each**2 for each in due)) ** 0.5
    bound = WRONG * whole + MARGIN * noise
    rough = sum((a - b) ** 2 for a, b in seen) ** 0.5
    gap = sum((each - b) ** 2 for each, (_, b) in zip(due, seen, strict=True)) ** 0.5
    if gap <= bound:
        return Part("pass", "the gradient by the text's vectors is what moving them does", gap, bound)
    kinked = bool(near) and sum(b for _, b in near) < 0.5 * sum(a for a, _ in near)
    if kinked or rough > SMOOTH * whole + MARGIN * noise:
        raise CannotError("needs logits that change smoothly with the text's vectors")
    return wrong(
        f"the gradient by the text's vectors is {due[0]:.4g} where moving them gives {seen[0][1]:.4g}", gap, bound
    )


def wrong(message: str, measured: float, bound: float = 0.0) -> Part:
    return Part(
        "fail",
        message,
        measured,
        bound,
        cause="a part of the way back is cut (detach(), no_grad(), .data), or a backward pass of one's own is wrong",
        fix="follow the gradient back layer by layer; compare one's own backward with torch.autograd.gradcheck",
    )
