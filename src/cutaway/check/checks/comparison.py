"""One model in two ways: by another implementation, and in another precision."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cutaway.check.again import again
from cutaway.check.exam import NARROW, CannotError, Exam, widened
from cutaway.check.finding import Part
from cutaway.check.registry import check
from cutaway.check.where import first_difference

FAR = 1000
"""Where positions are no longer whole numbers in bf16."""


@check(
    "parity",
    catches="a difference between two implementations of the same weights, and the layer where it begins",
    cause="the two read a setting or a tensor differently: a layout, an epsilon, a scale, an activation",
    fix="compare the first layer that differs step by step; one of the two departs from the published equations",
    needs=("logits", "against|reloaded"),
)
def parity(exam: Exam) -> Part:
    """Read the same text by both. The second is what was given, or for a model of transformers cutaway's own reading of
    what it saves."""
    target = exam.target
    assert target.logits is not None
    logits = target.logits
    if target.against is not None:
        tokens, other = exam.text(), target.against
        gap = exam.same(lambda: logits(tokens), lambda: other(tokens))
        where = None if gap.ok else f"position {gap.index[1]}"
    else:
        found = again(exam)
        if found.parity is None:
            raise CannotError(found.why or "needs against")
        gap, where = found.parity, found.parted
    return exam.judge(
        gap,
        held="the other implementation gives the same logits",
        broken="the other implementation of the same weights gives other logits",
        where=where,
    )


@check(
    "own-precision",
    catches="a step that the model's own precision cannot carry: angles, norms or sums in 8 bits, overflow in fp16",
    cause="positions, squares or a long sum are computed in bf16 or fp16, or a value is beyond what fp16 holds",
    fix="compute positions, norms and softmax in fp32 and round the result",
    own=True,
)
def own_precision(exam: Exam) -> Iterator[Part]:
    """Read a text in the model's own precision and with the same weights in fp32, near and at far positions: the two
    are as close as the model's own rounding explains."""
    target, module = exam.target, exam.target.module
    if target.dtype not in NARROW:
        raise CannotError("needs weights in bf16 or fp16")
    if module is None:
        raise CannotError("needs the module")
    assert target.logits is not None
    tokens, near = exam.text(), target.logits
    asked: dict[str, Callable[[], Tensor]] = {"": lambda: near(tokens)}
    if target.placed is not None and target.relative:
        placed = target.placed
        start = min(FAR, (target.longest or 10 * FAR) - tokens.shape[1])
        positions = (start + torch.arange(tokens.shape[1], device=tokens.device)).expand_as(tokens)
        if start > 0:
            asked[f" at position {start}"] = lambda: placed(tokens, positions)
    for where, run in asked.items():

        def wide(run: Callable[[], Tensor] = run) -> Tensor:
            with widened(module):
                return run()

        with torch.no_grad():
            own, exact = run(), wide()
        if exact.isfinite().all() and not own.isfinite().all():
            yield Part("fail", f"logits are not finite in {name_of(target.dtype)}, and are in fp32{where}")
            return
        gap = exam.same(run, wide, first=own, second=exact)
        yield exam.judge(
            gap,
            held=f"in {name_of(target.dtype)} as near to fp32 as rounding explains{where}",
            broken=f"in {name_of(target.dtype)} further from fp32 than rounding explains{where}",
            where=None if gap.ok else first_difference(exam, run, wide),
        )


def name_of(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype).removeprefix("torch."))
