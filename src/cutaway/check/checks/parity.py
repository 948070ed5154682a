"""One model in two ways: by another implementation, and in another precision."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.module_state import upcast_to_fp32
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.probes.first_divergence import find_first_divergence
from cutaway.check.probes.reload import get_reloaded_model
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError

FAR_POSITION = 1000
"""Where positions are no longer whole numbers in bf16."""


@register_check(
    "parity",
    catches="a difference between two implementations of the same weights, and the layer where it begins",
    cause="the two read a setting or a tensor differently: a layout, an epsilon, a scale, an activation",
    fix="compare the first layer that differs step by step; one of the two departs from the published equations",
    needs=("logits", "reference_logits|reload"),
)
def parity(context: CheckContext) -> CaseResult:
    """Read the same text by both. The second is what was given, or for a model of transformers cutaway's own reading of
    what it saves."""
    target = context.model
    assert target.logits is not None
    logits = target.logits
    if target.reference_logits is not None:
        tokens, other = context.random_tokens(), target.reference_logits
        gap = context.compare(lambda: logits(tokens), lambda: other(tokens))
        where = None if gap.within_tolerance else f"position {gap.index[1]}"
    else:
        found = get_reloaded_model(context)
        if found.reference_difference is None:
            raise SkipCheckError(found.no_reference_reason or "needs reference_logits")
        gap, where = found.reference_difference, found.divergent_layer
    return context.expect_equal(
        gap,
        passed="the other implementation gives the same logits",
        failed="the other implementation of the same weights gives other logits",
        location=where,
    )


@register_check(
    "low-precision",
    catches="a step that the model's own precision cannot carry: angles, norms or sums in 8 bits, overflow in fp16",
    cause="positions, squares or a long sum are computed in bf16 or fp16, or a value is beyond what fp16 holds",
    fix="compute positions, norms and softmax in fp32 and round the result",
    native_dtype=True,
)
def low_precision(context: CheckContext) -> Iterator[CaseResult]:
    """Read a text in the model's own precision and with the same weights in fp32, near and at far positions: the two
    are as close as the model's own rounding explains."""
    target, module = context.model, context.model.module
    if target.dtype not in LOW_PRECISION_DTYPES:
        raise SkipCheckError("needs weights in bf16 or fp16")
    if module is None:
        raise SkipCheckError("needs the module")
    assert target.logits is not None
    tokens, near = context.random_tokens(), target.logits
    asked: dict[str, Callable[[], Tensor]] = {"": lambda: near(tokens)}
    if target.logits_with_positions is not None and target.relative_positions:
        placed = target.logits_with_positions
        start = min(FAR_POSITION, (target.max_seq_len or 10 * FAR_POSITION) - tokens.shape[1])
        positions = (start + torch.arange(tokens.shape[1], device=tokens.device)).expand_as(tokens)
        if start > 0:
            asked[f" at position {start}"] = lambda: placed(tokens, positions)
    for where, run in asked.items():

        def wide(run: Callable[[], Tensor] = run) -> Tensor:
            with upcast_to_fp32(module):
                return run()

        with torch.no_grad():
            own, exact = run(), wide()
        if exact.isfinite().all() and not own.isfinite().all():
            yield CaseResult("fail", f"logits are not finite in {_dtype_name(target.dtype)}, and are in fp32{where}")
            return
        gap = context.compare(run, wide, first_result=own, second_result=exact)
        yield context.expect_equal(
            gap,
            passed=f"in {_dtype_name(target.dtype)} as near to fp32 as rounding explains{where}",
            failed=f"in {_dtype_name(target.dtype)} further from fp32 than rounding explains{where}",
            location=None if gap.within_tolerance else find_first_divergence(context, run, wide),
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype).removeprefix("torch."))
