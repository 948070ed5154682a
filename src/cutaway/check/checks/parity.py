"""Parity checks: parity (two implementations), low-precision (bf16 or fp16 against fp32) and norm-precision."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.module_state import can_upcast, upcast_to_fp32
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.probes.first_divergence import find_first_divergence
from cutaway.check.probes.op_tracer import OpTracer
from cutaway.check.probes.reload import get_reloaded_model
from cutaway.check.registry import register_check
from cutaway.check.report.finding import CaseResult, SkipCheckError, failure, success, warning

_FAR_POSITION = 1000
"""A position beyond the integers that bf16 represents exactly."""


@register_check("parity", needs=("logits", "reference_logits|reload"))
def parity(ctx: CheckContext) -> CaseResult:
    """Catches a difference between two implementations with the same weights; locates the first layer that differs.

    Run the same tokens with the model and with a reference implementation: the logits must be equal. The reference is
    `reference_logits`, or, for a transformers model, cutaway's implementation loaded from the saved checkpoint.

    Cause: the two interpret a config field or a tensor differently: a layout, an epsilon, a scale, an activation.
    Fix: compare the two op by op in the first layer that differs; one of them deviates from the published equations.
    """
    model, logits = ctx.model, ctx.logits
    if model.reference_logits is not None:
        tokens, reference_logits = ctx.random_tokens(), model.reference_logits
        diff = ctx.compare(lambda: logits(tokens), lambda: reference_logits(tokens))
        location = None if diff.within_tolerance else f"position {diff.index[1]}"
    else:
        reloaded = get_reloaded_model(ctx)
        if reloaded.reference_difference is None:
            raise SkipCheckError(reloaded.no_reference_reason or "needs reference_logits")
        diff, location = reloaded.reference_difference, reloaded.divergent_layer
    return diff.expect_equal(
        passed="the reference implementation gives the same logits",
        failed="the reference implementation with the same weights gives other logits",
        location=location,
    )


@register_check("low-precision", native_dtype=True)
def low_precision(ctx: CheckContext) -> Iterator[CaseResult]:
    """Catches an op that needs more precision than the model's dtype: angles, norms or sums in bf16, overflow in fp16.

    Run a sequence in the model's own dtype and with the same weights in fp32, at near and far positions: the difference
    must be within the model's own rounding noise.

    Cause: positions, squares or a long sum are computed in bf16 or fp16, or a value exceeds the range of fp16.
    Fix: compute positions, norms and softmax in fp32 and cast the result.
    """
    model, module = ctx.model, ctx.model.module
    if model.dtype not in LOW_PRECISION_DTYPES:
        raise SkipCheckError("needs weights in bf16 or fp16")
    if module is None:
        raise SkipCheckError("needs the module")
    if not can_upcast(model):
        raise SkipCheckError(
            f"needs a model that also runs with its weights in fp32; this one runs in {model.dtype} only"
        )
    tokens, logits = ctx.random_tokens(), ctx.logits
    runs: dict[str, Callable[[], Tensor]] = {"": lambda: logits(tokens)}
    if model.logits_with_positions is not None and model.relative_positions:
        logits_with_positions = model.logits_with_positions
        start = min(_FAR_POSITION, (model.max_seq_len or 10 * _FAR_POSITION) - tokens.shape[1])
        positions = (start + torch.arange(tokens.shape[1], device=tokens.device)).expand_as(tokens)
        if start > 0:
            runs[f" at position {start}"] = lambda: logits_with_positions(tokens, positions)
    for where, run in runs.items():

        def run_in_fp32(run: Callable[[], Tensor] = run) -> Tensor:
            with upcast_to_fp32(module):
                return run()

        native, fp32 = run(), run_in_fp32()
        dtype = "bf16" if model.dtype == torch.bfloat16 else "fp16"
        if fp32.isfinite().all() and not native.isfinite().all():
            yield failure(f"the logits are finite in fp32 but not in {dtype}{where}")
            return
        diff = ctx.compare(run, run_in_fp32, first_result=native, second_result=fp32)
        yield diff.expect_equal(
            passed=f"the difference between {dtype} and fp32 is within rounding noise{where}",
            failed=f"the difference between {dtype} and fp32 exceeds rounding noise{where}",
            location=None if diff.within_tolerance else find_first_divergence(ctx, run, run_in_fp32),
        )


@register_check("norm-precision", native_dtype=True)
def norm_precision(ctx: CheckContext) -> CaseResult:
    """Catches a norm whose mean square or variance is computed in bf16 or fp16 instead of fp32.

    Trace the square roots of one number per token in a forward pass in the model's own dtype: none may be in bf16 or
    fp16. PyTorch's own norms accumulate in fp32.

    Cause: the norm does not convert its input to fp32: squares have errors of 0.4 % in bf16, and overflow in fp16.
    Fix: compute x.float().pow(2).mean(-1, keepdim=True) and its rsqrt in fp32, then convert the normalized x back.
    """
    if ctx.model.dtype not in LOW_PRECISION_DTYPES:
        raise SkipCheckError("needs weights in bf16 or fp16")
    with OpTracer(ctx.model.module) as tracer:
        ctx.logits(ctx.random_tokens())
    low = [call for call in tracer.root_calls if call.dtype in LOW_PRECISION_DTYPES]
    if not low:
        return success("no norm is computed in bf16 or fp16")
    dtype = "bf16" if low[0].dtype == torch.bfloat16 else "fp16"
    message = f"a mean square or variance is computed in {dtype} ({len(low)} of {len(tracer.root_calls)} norms)"
    return warning(message, float(len(low)), 0.0, low[0].module or None)
