"""`ct.check`: run the checks on a model and return a report; restore the module afterwards."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from cutaway.check.adapters.auto import build_checked_model
from cutaway.check.adapters.user_functions import UserFunctionError
from cutaway.check.checked_model import CheckedModel
from cutaway.check.context import CheckContext
from cutaway.check.module_state import can_upcast, upcast_to_fp32
from cutaway.check.numerics import LOW_PRECISION_DTYPES
from cutaway.check.registry import Check, select_checks
from cutaway.check.report.finding import SEVERITY, CaseResult, Finding, Report, SkipCheckError
from cutaway.errors import CutawayError, InputError, format_raised

COULD_NOT_RUN = "could not run"
MAX_RESTORED_BUFFER_NUMEL = 1 << 16
"""Largest buffer, in elements, that is copied and restored."""
SINGLE_THREAD_MAX_PARAMS = 20_000_000
"""Models with fewer parameters run on one thread: more gain little, and wait for each other on a busy machine."""
ProgressCallback = Callable[[int, int, str], None]
"""Called with the number of finished checks, the number of all checks, and the name of the next check."""


def check(
    model: Any = None,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    seed: int = 0,
    budget: float = 30.0,
    preflight: bool = False,
    progress: ProgressCallback | None = None,
    **overrides: Any,
) -> Report:
    """Run correctness checks on a Transformer and return a report.

    `model` is a cutaway model, a transformers model, another nn.Module, or a function tokens (B, T) → logits
    (B, T, V). `overrides` sets other functions of the model (`logits_with_mask=`, `logits_with_cache=`, `loss=` …) and
    its properties (`kind=`, `window=` …); `CheckedModel` lists them.
    `only` and `skip` select checks; checks that have not started after `budget` seconds are skipped; `preflight` runs
    only the checks that training runs before its first step. The module's state is restored afterwards.
    """
    selected = select_checks(only, skip)
    if preflight:
        selected = [entry for entry in selected if entry.preflight]
    if budget <= 0:
        raise InputError(f"budget is {budget}; it is a time in seconds, so pass a positive number, such as 30")
    start = time.monotonic()
    with (
        _preserve_module_state(model, overrides),
        _limit_threads(model),
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
    ):
        torch.manual_seed(seed)
        checked = build_checked_model(model, overrides, seed=seed)
        report = _run_checks(checked, selected, seed=seed, budget=budget, progress=progress)
    report.seconds = time.monotonic() - start
    return report


def _preserve_module_state(model: Any, overrides: dict[str, Any]) -> Any:
    """Return a context manager that restores the module's training flags, buffers and gradients."""
    module = overrides.get("module", model)
    module = getattr(module, "model", module) if not isinstance(module, nn.Module) else module
    return ModuleStateGuard(module) if isinstance(module, nn.Module) else nullcontext()


@contextmanager
def _limit_threads(model: Any) -> Iterator[None]:
    """Run small models on one thread: several threads would mostly wait for each other.

    On CPUs without bf16, torch disables oneDNN for the whole process at the first bf16 matrix product. The flag is
    restored here; otherwise a training run after a check would differ bitwise from one without a check.
    """
    module = getattr(model, "model", model)
    if isinstance(module, nn.Module):
        num_params = sum(param.numel() for param in module.parameters())
    else:
        num_params = SINGLE_THREAD_MAX_PARAMS
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    if num_params < SINGLE_THREAD_MAX_PARAMS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = onednn


class BufferSnapshot:
    """Copies of a module's small buffers: running means, RoPE frequencies that depend on the sequence length."""

    def __init__(self, module: nn.Module | None) -> None:
        submodules = [] if module is None else module.modules()
        self.entries = [
            (submodule, name, buffer, buffer.detach().clone())
            for submodule in submodules
            for name, buffer in submodule._buffers.items()
            if buffer is not None and buffer.numel() <= MAX_RESTORED_BUFFER_NUMEL and not buffer.is_meta
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the buffers and their values."""
        for submodule, name, buffer, value in self.entries:
            if submodule._buffers.get(name) is not buffer:
                submodule._buffers[name] = buffer
            if not torch.equal(buffer, value.to(buffer.dtype)):
                buffer.copy_(value)


class ModuleStateGuard:
    """Context manager that restores a module's training flags, buffers and gradients on exit."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.training_flags = {submodule: submodule.training for submodule in self.module.modules()}
        self.buffers = BufferSnapshot(self.module)
        self.gradients = {param: param.grad for param in self.module.parameters()}
        self.module.eval()

    def __exit__(self, *_: object) -> None:
        for submodule, training in self.training_flags.items():
            submodule.training = training
        self.buffers.restore()
        for param, grad in self.gradients.items():
            param.grad = grad


def _run_checks(
    model: CheckedModel, checks: list[Check], *, seed: int, budget: float, progress: ProgressCallback | None = None
) -> Report:
    """Run checks on a model. Low-precision models are checked in fp32 first, then in their own dtype."""
    start = time.monotonic()
    upcast = model.dtype in LOW_PRECISION_DTYPES and can_upcast(model)
    context = CheckContext(model, seed=seed, budget=budget)
    findings: list[Finding] = []
    noise: dict[str, float] = {}
    for native in (False, True) if upcast else (False,):  # the own dtype last: a CPU can be slow in it
        with upcast_to_fp32(model.module) if upcast and not native else nullcontext():
            if model.logits is not None and native:
                context.switch_to_dtype(model.dtype)
            elif model.logits is not None:
                _calibrate_context(context)
            if model.logits is not None:
                dtype = torch.float32 if upcast and not native else model.dtype
                noise[str(dtype).removeprefix("torch.")] = context.noise_ratio
            buffers = BufferSnapshot(model.module)
            for entry in checks:
                if upcast and entry.native_dtype != native:
                    continue
                if progress is not None:
                    progress(len(findings), len(checks), entry.name)
                failed = {finding.check for finding in findings if finding.verdict == "fail"}
                findings.append(_run_check(entry, context, failed))
                buffers.restore()
    order = {entry.name: index for index, entry in enumerate(checks)}
    findings.sort(key=lambda finding: order[finding.check])
    return Report(model.name, findings, seed, time.monotonic() - start, model.properties(), noise)


def _calibrate_context(context: CheckContext) -> None:
    """Run the first forward pass. If it raises, the token ids or the sequence length are the likely reason."""
    try:
        context.calibrate()
    except CutawayError:
        raise
    except Exception as error:
        model = context.model
        raise InputError(
            f"{model.name} was called with {context.seq_len} tokens below {model.vocab_size} and "
            f"{format_raised(error)}; if it takes other token ids or shorter sequences, pass vocab_size= and "
            "max_seq_len="
        ) from error


def _run_check(check: Check, context: CheckContext, failed_checks: Collection[str] = ()) -> Finding:
    """Run one check; the finding is the worst of its case results."""
    start = time.monotonic()
    missing = _missing_requirement(check, context.model)
    failed = [name for name in check.depends_on if name in failed_checks]
    if failed and missing is None:
        missing = f"{failed[0]} failed, and the same bug would fail this check"
    if missing:
        return Finding(check.name, "skip", f"skipped: {missing}", docs_path=check.docs_path)
    if context.seconds_left <= 0:
        return Finding(
            check.name,
            "skip",
            f"skipped: the budget of {context.budget:g} s is used up; pass a larger budget",
            docs_path=check.docs_path,
        )
    context.generator.manual_seed(context.seed)  # a check draws the same tokens alone and among others
    try:
        result = check.run(context)
        cases = [result] if isinstance(result, CaseResult) else list(result)
    except SkipCheckError as error:
        cases = [CaseResult("skip", f"skipped: {error}")]
    except UserFunctionError as error:
        cases = [CaseResult("warn", f"{COULD_NOT_RUN}: {error}")]
    except Exception as error:  # raised by the checked model: a finding, not a reason to stop
        cases = [CaseResult("warn", f"{COULD_NOT_RUN}: it {format_raised(error)}")]
    if context.model.module is not None:
        context.model.module.eval()
    cases = cases or [CaseResult("skip", "skipped: there are no cases to run")]
    worst = max(cases, key=lambda case: (SEVERITY[case.verdict], case.verdict == "pass"))
    has_problem = worst.verdict in ("fail", "warn") and not worst.message.startswith(COULD_NOT_RUN)
    return Finding(
        check.name,
        worst.verdict,
        worst.message,
        worst.measured,
        worst.threshold,
        worst.location,
        (worst.cause or check.cause) if has_problem else None,
        (worst.fix or check.fix) if has_problem else None,
        check.docs_path,
        time.monotonic() - start,
        cases,
    )


def _missing_requirement(check: Check, model: CheckedModel) -> str | None:
    """Why a check does not apply to a model: its kind, or a function that it lacks. None if it applies."""
    if model.kind not in check.kinds:
        return f"for {' and '.join(f'{kind}s' for kind in check.kinds)} only"
    available = set(model.available_functions())
    for requirement in check.needs:
        if not available & set(requirement.split("|")):
            return f"needs {requirement.replace('|', ' or ')}"
    return None
