"""`ct.check`: run the checks on a model and return a report. The module's state is restored afterwards."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from cutaway.check.adapters.auto import build_checked_model
from cutaway.check.adapters.cached_forward import describe_cached_forward, restore_cache
from cutaway.check.adapters.user_functions import UserFunctionError
from cutaway.check.checked_model import count_parameters, require
from cutaway.check.context import CheckContext
from cutaway.check.function_calls import locate_exception
from cutaway.check.module_state import BufferSnapshot, can_upcast, fork_rng, preserve_state, upcast_to_fp32
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.registry import Check, select_checks
from cutaway.check.report.finding import (
    SEVERITY,
    CaseResult,
    Finding,
    Report,
    SkipCheckError,
    failure,
    skipped,
)
from cutaway.check.report.grouping import group_by_cause
from cutaway.errors import CutawayError, InputError, format_raised

_COULD_NOT_RUN = "could not run"
_SINGLE_THREAD_MAX_PARAMS = 20_000_000
"""Models with fewer parameters run on one thread. More threads would gain little, and would wait for each other on a
busy machine."""
ProgressCallback = Callable[[int, int, str], None]
"""Called with the number of finished checks, the number of all checks, and the name of the next check."""
FindingCallback = Callable[[Finding], None]
"""Called with the finding of each check when it has finished."""


def check(
    model: object = None,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    seed: int = 0,
    budget: float = 30.0,
    preflight: bool = False,
    progress: ProgressCallback | None = None,
    on_finding: FindingCallback | None = None,
    **overrides: Any,
) -> Report:
    """Run correctness checks on a Transformer and return a report.

    `model` is a cutaway model, a transformers model, another nn.Module, or a function from tokens (B, T) to logits
    (B, T, V). `overrides` are fields of `CheckedModel`: further functions of the model (`logits_with_mask=`,
    `logits_with_cache=`, `loss=` …) and its properties (`kind=`, `window=` …).
    `only` and `skip` select checks by name. Checks that have not started after `budget` seconds are skipped.
    `preflight` runs only the checks that training runs before its first step. `progress` is called before and
    `on_finding` after each check; an exception that they raise ends the run. The module's state is restored afterwards.
    """
    selected = select_checks(only, skip)
    if preflight:
        selected = [entry for entry in selected if entry.preflight]
    if budget <= 0:
        raise InputError(
            f"budget is {budget}, but it must be a time above 0 seconds; pass a positive number, such as 30"
        )
    start, module = time.monotonic(), _find_module(model, overrides)
    num_params = _SINGLE_THREAD_MAX_PARAMS if module is None else count_parameters(module)
    preserved = nullcontext() if module is None else preserve_state(module)
    with restore_cache(module), preserved, _preserve_process_state(num_params, seed), torch.no_grad():
        checked = build_checked_model(model, overrides, seed=seed)
        report = _run_checks(CheckContext(checked, seed=seed, budget=budget), selected, progress, on_finding)
    report.seconds = time.monotonic() - start
    return report


def _find_module(model: object, overrides: Mapping[str, object]) -> nn.Module | None:
    """The nn.Module to check: the override `module`, `model` itself, or the attribute `model` of a checkpoint.

    None if there is no nn.Module, as for a function.
    """
    source = overrides.get("module", model)
    module = source if isinstance(source, nn.Module) else getattr(source, "model", None)
    return module if isinstance(module, nn.Module) else None


@contextmanager
def _preserve_process_state(num_params: int, seed: int) -> Iterator[None]:
    """Seed torch and run small models on one thread; restore random state, thread count and oneDNN flag on exit.

    On CPUs without bf16 support, torch disables oneDNN for the whole process at the first bf16 matrix product. If the
    flag were not restored, a training run after a check would differ bitwise from one without a check.
    """
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    if num_params < _SINGLE_THREAD_MAX_PARAMS:
        torch.set_num_threads(1)
    try:
        with fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = onednn


def _run_checks(
    ctx: CheckContext,
    checks: list[Check],
    progress: ProgressCallback | None,
    on_finding: FindingCallback | None,
) -> Report:
    """Run the checks and return a report. The weights of a bf16 or fp16 model are upcast to fp32 for most checks.

    Checks with `native_dtype` then run in the model's own dtype. A model that does not run with fp32 weights is checked
    in its own dtype only.
    """
    model, dtype = ctx.model, require(ctx.model.dtype)
    upcast = dtype in LOW_PRECISION_DTYPES and can_upcast(model)
    findings: dict[str, Finding] = {}
    noise: dict[str, float] = {}
    # Checks in the model's own dtype run last, because a CPU can be slow in bf16 or fp16.
    for native in (False, True) if upcast else (False,):
        with upcast_to_fp32(model.module) if upcast and not native else nullcontext():
            if native:
                ctx.switch_to_dtype(dtype)
            else:
                _calibrate_context(ctx)
            noise[str(torch.float32 if upcast and not native else dtype).removeprefix("torch.")] = ctx.noise_ratio
            buffers = BufferSnapshot(model.module)
            for entry in checks:
                if upcast and entry.native_dtype != native:
                    continue
                if progress is not None:
                    progress(len(findings), len(checks), entry.name)
                failed = [name for name in entry.depends_on if name in findings and findings[name].verdict == "fail"]
                findings[entry.name] = _run_check(entry, ctx, failed)
                buffers.restore()
                if on_finding is not None:
                    on_finding(findings[entry.name])
    ordered = [findings[entry.name] for entry in checks]
    group_by_cause(ordered)
    return Report(model.name, ordered, ctx.seed, properties=model.properties(), noise=noise)


def _calibrate_context(ctx: CheckContext) -> None:
    """Measure the rounding noise and the time of a forward pass.

    If the model raises an exception, raise InputError with a hint: the likely reason is a token id or a sequence length
    that the model does not support.
    """
    try:
        ctx.calibrate()
    except CutawayError:
        raise
    except Exception as error:
        model = ctx.model
        raise InputError(
            f"{model.name} was called with {ctx.seq_len} token ids below {model.vocab_size} and "
            f"{format_raised(error)}; if the model takes other token ids or shorter sequences, pass vocab_size= and "
            "max_seq_len="
        ) from error


def _run_check(check: Check, ctx: CheckContext, failed_dependencies: list[str]) -> Finding:
    """Run one check, and return the worst of its case results (a failure, else a warning) as the finding.

    An exception of a function that has worked before is a failure. After any other exception, or a wrong output of a
    user's function, the check is inconclusive. Cases before the exception are kept.
    """
    start = time.monotonic()
    if reason := _inapplicable_reason(check, ctx):
        return Finding(check.name, "skip", f"skipped: {reason}", docs_path=check.docs_path)
    if reason := _not_run_reason(ctx, failed_dependencies):
        return Finding(check.name, "skip", f"skipped: {reason}", not_run=True, docs_path=check.docs_path)
    ctx.generator.manual_seed(ctx.seed)  # a check draws the same tokens whether or not other checks run before it
    cases: list[CaseResult] = []
    try:
        result = check.run(ctx)
        for case in [result] if isinstance(result, CaseResult) else result:
            weighed = ctx.weigh_case(case)
            # Checks in the model's own dtype test whether rounding explains a difference, so noise is what they expect.
            cases.append(case if check.native_dtype else weighed)
    except SkipCheckError as error:
        cases.append(skipped(error))
    except UserFunctionError as error:
        cases.append(CaseResult("inconclusive", f"{_COULD_NOT_RUN}: {error}"))
    except Exception as error:  # raised by the checked model: report it and continue with the other checks
        cases.append(_exception_result(ctx, error))
    if ctx.model.module is not None:
        ctx.model.module.eval()
    cases = cases or [skipped("there are no cases to run")]
    worst = max(cases, key=lambda case: (SEVERITY[case.verdict], case.verdict == "pass"))
    array = worst.array or next((case.array for case in cases if case.array is not None), None)
    fields = vars(worst) | {"array": array}
    if worst.verdict in ("fail", "warn") and not worst.message.startswith(_COULD_NOT_RUN):
        fields |= {"cause": worst.cause or check.cause, "fix": worst.fix or check.fix}
    seconds = time.monotonic() - start
    return Finding(check.name, **fields, docs_path=check.docs_path, seconds=seconds, cases=cases)


def _exception_result(ctx: CheckContext, error: Exception) -> CaseResult:
    """A failure if the exception was raised by a function of the model that has worked before, else inconclusive.

    NotImplementedError skips the check.
    """
    location, crash = locate_exception(error), ctx.calls.describe_crash(error)
    if isinstance(error, NotImplementedError):  # the model states that it does not support this input
        return skipped(f"the model {format_raised(error)}")
    if crash is None:
        message = f"{_COULD_NOT_RUN}: the model {format_raised(error)}"
        return CaseResult("inconclusive", message, location=location)
    cause = "the code path of this input was not run before, or depends on a shape, a dtype or a state of the module"
    fix = "run the model on this input, and follow the traceback; reject unsupported inputs with NotImplementedError"
    return failure(crash, location=location, cause=cause, fix=fix)


def _inapplicable_reason(check: Check, ctx: CheckContext) -> str | None:
    """Why a check does not apply to the model: its kind, or a missing function. None if it applies."""
    if ctx.model.kind not in check.kinds:
        return f"for {' and '.join(f'{kind}s' for kind in check.kinds)} only"
    available = set(ctx.model.available_functions())
    for requirement in check.needs:
        if not available & set(requirement.split("|")):
            return f"needs {requirement.replace('|', ' or ')}" + _hint(requirement, ctx)
    return None


def _hint(requirement: str, ctx: CheckContext) -> str:
    """The argument that is missing, as code, if it is a forward pass with a KV cache."""
    if requirement != "logits_with_cache":
        return ""
    return f"; {describe_cached_forward(None if ctx.model.module is None else ctx.module.forward)}"


def _not_run_reason(ctx: CheckContext, failed_dependencies: list[str]) -> str | None:
    """Why a check that applies is skipped: a failed dependency, or the time budget. None if it runs."""
    if failed_dependencies:
        return f"{failed_dependencies[0]} failed, and the same bug would fail this check"
    if ctx.seconds_left <= 0:
        return f"the budget of {ctx.budget:g} s is used up; pass a larger budget"
    return None
