"""`ct.check`: every check that a model can be asked, in order, and one report."""

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
"""Numbers of a buffer that is put back as it was."""
SINGLE_THREAD_MAX_PARAMS = 20_000_000
"""Parameters below which several threads gain little, and wait long for each other where other programs run."""
ProgressCallback = Callable[[int, int, str], None]
"""Called with checks done, all checks, and the name of the next."""


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
    """Is this Transformer right?

    `model` is a model of cutaway or of transformers, another nn.Module, or a function tokens (B, T) → logits
    (B, T, V). `overrides` are its other functions (`logits_with_mask=`, `logits_with_cache=`, `loss=` …) and its
    properties (`kind=`, `window=` …), as `CheckedModel` lists them.
    Checks are chosen by `only` and `skip`; after `budget` seconds the rest is skipped. The model is left as it was.
    """
    asked = select_checks(only, skip)
    asked = [each for each in asked if each.preflight] if preflight else asked
    if budget <= 0:
        raise InputError(f"the budget is {budget} seconds; give some time, such as 30")
    start = time.monotonic()
    with (
        _preserve_module_state(model, overrides),
        _limit_threads(model),
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
    ):
        torch.manual_seed(seed)
        found = build_checked_model(model, overrides, seed=seed)
        report = _run_checks(found, asked, seed=seed, budget=budget, progress=progress)
    report.seconds = time.monotonic() - start
    return report


def _preserve_module_state(model: Any, overrides: dict[str, Any]) -> Any:
    """The module's modes, gradients and switches are put back when all is over."""
    module = overrides.get("module", model)
    module = getattr(module, "model", module) if not isinstance(module, nn.Module) else module
    return ModuleStateGuard(module) if isinstance(module, nn.Module) else nullcontext()


@contextmanager
def _limit_threads(model: Any) -> Iterator[None]:
    """A small model is asked by one thread: several would only wait for each other.

    Where the CPU has no bf16, torch turns oneDNN off for the whole process at the first product in it: after the check
    it is as before, or else a training that was asked first would not end in the bits of one that was not.
    """
    module = getattr(model, "model", model)
    count = (
        sum(each.numel() for each in module.parameters()) if isinstance(module, nn.Module) else SINGLE_THREAD_MAX_PARAMS
    )
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    if count < SINGLE_THREAD_MAX_PARAMS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = onednn


class BufferSnapshot:
    """The small buffers of a module as they are now: running means, say, or frequencies that follow a text's length."""

    def __init__(self, module: nn.Module | None) -> None:
        parts = [] if module is None else module.modules()
        self.entries = [
            (part, name, each, each.detach().clone())
            for part in parts
            for name, each in part._buffers.items()
            if each is not None and each.numel() <= MAX_RESTORED_BUFFER_NUMEL and not each.is_meta
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for part, name, buffer, before in self.entries:
            if part._buffers.get(name) is not buffer:
                part._buffers[name] = buffer
            if not torch.equal(buffer, before.to(buffer.dtype)):
                buffer.copy_(before)


class ModuleStateGuard:
    """Modes and gradients of a module, before and after."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.training_flags = {part: part.training for part in self.module.modules()}
        self.buffers = BufferSnapshot(self.module)
        self.gradients = {part: part.grad for part in self.module.parameters()}
        self.module.eval()

    def __exit__(self, *_: object) -> None:
        for part, training in self.training_flags.items():
            part.training = training
        self.buffers.restore()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient


def _run_checks(
    model: CheckedModel, checks: list[Check], *, seed: int, budget: float, progress: ProgressCallback | None = None
) -> Report:
    """All findings on a target."""
    start = time.monotonic()
    narrow = model.dtype in LOW_PRECISION_DTYPES and can_upcast(model)
    context = CheckContext(model, seed=seed, budget=budget)
    findings: list[Finding] = []
    noise: dict[str, float] = {}
    for own in (False, True) if narrow else (False,):  # what a CPU may be slow in comes last
        with upcast_to_fp32(model.module) if narrow and not own else nullcontext():
            if model.logits is not None and own:
                context.switch_to_dtype(model.dtype)
            elif model.logits is not None:
                _calibrate_context(context)
            if model.logits is not None:
                dtype = torch.float32 if narrow and not own else model.dtype
                noise[str(dtype).removeprefix("torch.")] = context.noise_ratio
            buffers = BufferSnapshot(model.module)
            for each in checks:
                if narrow and each.native_dtype != own:
                    continue
                if progress is not None:
                    progress(len(findings), len(checks), each.name)
                failed = {finding.check for finding in findings if finding.verdict == "fail"}
                findings.append(_run_check(each, context, failed))
                buffers.restore()
    order = {each.name: n for n, each in enumerate(checks)}
    findings.sort(key=lambda finding: order[finding.check])
    return Report(model.name, findings, seed, time.monotonic() - start, model.properties(), noise)


def _calibrate_context(context: CheckContext) -> None:
    """A first text: where even that raises, it is most likely for its tokens or its length."""
    try:
        context.calibrate()
    except CutawayError:
        raise
    except Exception as error:
        target = context.model
        raise InputError(
            f"{target.name} was called with {context.seq_len} tokens below {target.vocab_size} and "
            f"{format_raised(error)}; where that is not how it is to be called, give vocab_size= and max_seq_len="
        ) from error


def _run_check(check: Check, context: CheckContext, failed_checks: Collection[str] = ()) -> Finding:
    """One check's finding: the worst of what it tried."""
    start = time.monotonic()
    missing = _missing_requirement(check, context.model)
    known = [name for name in check.depends_on if name in failed_checks]
    if known and missing is None:
        missing = f"{known[0]} failed, which would show here too"
    if missing:
        return Finding(check.name, "skip", f"skipped: {missing}", docs_path=check.docs_path)
    if context.seconds_left <= 0:
        return Finding(
            check.name,
            "skip",
            f"skipped: {context.budget:g} s are over; give a larger budget",
            docs_path=check.docs_path,
        )
    context.generator.manual_seed(context.seed)  # so that a check asked alone sees what it sees among others
    try:
        found = check.run(context)
        parts = [found] if isinstance(found, CaseResult) else list(found)
    except SkipCheckError as error:
        parts = [CaseResult("skip", f"skipped: {error}")]
    except UserFunctionError as error:
        parts = [CaseResult("warn", f"{COULD_NOT_RUN}: {error}")]
    except Exception as error:  # the target's own code broke: that is a finding, and no reason to stop
        parts = [CaseResult("warn", f"{COULD_NOT_RUN}: it {format_raised(error)}")]
    if context.model.module is not None:
        context.model.module.eval()
    parts = parts or [CaseResult("skip", "skipped: there was nothing to try")]
    worst = max(parts, key=lambda part: (SEVERITY[part.verdict], part.verdict == "pass"))
    trouble = worst.verdict in ("fail", "warn") and not worst.message.startswith(COULD_NOT_RUN)
    return Finding(
        check.name,
        worst.verdict,
        worst.message,
        worst.measured,
        worst.threshold,
        worst.location,
        (worst.cause or check.cause) if trouble else None,
        (worst.fix or check.fix) if trouble else None,
        check.docs_path,
        time.monotonic() - start,
        parts,
    )


def _missing_requirement(check: Check, model: CheckedModel) -> str | None:
    """What a target lacks to be asked."""
    if model.kind not in check.kinds:
        return f"for {' and '.join(f'{kind}s' for kind in check.kinds)} only"
    available = set(model.available_functions())
    for need in check.needs:
        if not available & set(need.split("|")):
            return f"needs {need.replace('|', ' or ')}"
    return None
