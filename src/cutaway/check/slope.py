"""Whether the gradient is the slope: what autograd says of the text's vectors, beside what moving them does."""

import torch
from torch import Tensor

from cutaway.check.exam import MARGIN, CannotError, Exam, scale_of
from cutaway.check.finding import Part
from cutaway.check.vectors import moved, tables

STEPS = (1e-2, 2e-3, 5e-4)
"""Of the vectors' usual size: how far they are moved, and half as far."""
SMOOTH, WRONG = 0.02, 0.15
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
            size = max(float(tables(module, logits, tokens)[0](tokens).float().square().mean().sqrt()), 1e-30)
            count = 3 if not exam.slow else 1
            directions = [
                torch.randn(gradient.shape, generator=exam.generator).to(gradient.device) for _ in range(count)
            ]
            due = torch.tensor([float((gradient.float() * each).sum()) for each in directions])

            def risen(step: float) -> Tensor:
                """How fast the sum rises in each direction, over two steps."""
                found = []
                for each in directions:
                    ends = []
                    for sign in (1.0, -1.0):
                        added[0].data = (sign * step * each).to(added[0].dtype)
                        ends.append(float((logits(tokens).float() * weights).sum(dtype=torch.float64)))
                    found.append((ends[0] - ends[1]) / (2 * step))
                return torch.tensor(found)

            smooth = False
            for step in STEPS:  # where a long step meets an edge, a short one may not
                one, seen = risen(step * size), risen(step * size / 2)
                noise = MARGIN * exam.ratio * scale_of(out) * out.numel() ** 0.5 / (step * size)
                whole = max(float(seen.norm()), float(due.norm()))
                gap, bound = float((due - seen).norm()), WRONG * whole + noise
                if gap <= bound:
                    return Part("pass", "the gradient by the text's vectors is what moving them does", gap, bound)
                smooth = smooth or float((one - seen).norm()) <= SMOOTH * whole
    if not smooth:
        raise CannotError("needs logits that change smoothly with the text's vectors")
    said = f"the gradient by the text's vectors is {float(due[0]):.4g} where moving them gives {float(seen[0]):.4g}"
    return wrong(said, gap, bound)


def wrong(message: str, measured: float, bound: float = 0.0) -> Part:
    return Part(
        "fail",
        message,
        measured,
        bound,
        cause="a part of the way back is cut (detach(), no_grad(), .data), or a backward pass of one's own is wrong",
        fix="follow the gradient back layer by layer; compare one's own backward with torch.autograd.gradcheck",
    )
