"""Ask a target all that it can be asked."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from cutaway.check.discover import discover
from cutaway.check.exam import NARROW, CannotError, Exam, can_widen, widened
from cutaway.check.finding import SEVERITY, Finding, Part, Report
from cutaway.check.offered import OfferError
from cutaway.check.registry import Check, chosen
from cutaway.check.target import Target
from cutaway.errors import CutawayError, InputError, raised

UNTRIED = "could not be tried"
SMALL = 1 << 16
"""Numbers of a buffer that is put back as it was."""
CROWDED = 20_000_000
"""Parameters below which several threads gain little, and wait long for each other where other programs run."""
Progress = Callable[[int, int, str], None]
"""Called with checks done, all checks, and the name of the next."""


def check(
    target: Any = None,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    seed: int = 0,
    budget: float = 30.0,
    quick: bool = False,
    progress: Progress | None = None,
    **offers: Any,
) -> Report:
    """Is this Transformer right?

    `target` is a model of cutaway or of transformers, another nn.Module, or a function tokens (B, T) → logits
    (B, T, V). `offers` are what it has beside (`padded=`, `cached=`, `loss=` …) and facts (`kind=`, `window=` …), as
    `Target` lists them.
    Checks are chosen by `only` and `skip`; after `budget` seconds the rest is skipped. The model is left as it was.
    """
    asked = chosen(only, skip)
    asked = [each for each in asked if each.quick] if quick else asked
    if budget <= 0:
        raise InputError(f"the budget is {budget} seconds; give some time, such as 30")
    start = time.monotonic()
    with kept(target, offers), alone(target), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        found = discover(target, offers, seed=seed)
        report = examine(found, asked, seed=seed, budget=budget, progress=progress)
    report.seconds = time.monotonic() - start
    return report


def kept(target: Any, offers: dict[str, Any]) -> Any:
    """The module's modes, gradients and switches are put back when all is over."""
    module = offers.get("module", target)
    module = getattr(module, "model", module) if not isinstance(module, nn.Module) else module
    return Kept(module) if isinstance(module, nn.Module) else nullcontext()


@contextmanager
def alone(target: Any) -> Iterator[None]:
    """A small model is asked by one thread: several would only wait for each other.

    Where the CPU has no bf16, torch turns oneDNN off for the whole process at the first product in it: after the check
    it is as before, or else a training that was asked first would not end in the bits of one that was not.
    """
    module = getattr(target, "model", target)
    count = sum(each.numel() for each in module.parameters()) if isinstance(module, nn.Module) else CROWDED
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    if count < CROWDED:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = onednn


class Buffers:
    """The small buffers of a module as they are now: running means, say, or frequencies that follow a text's length."""

    def __init__(self, module: nn.Module | None) -> None:
        parts = [] if module is None else module.modules()
        self.found = [
            (part, name, each, each.detach().clone())
            for part in parts
            for name, each in part._buffers.items()
            if each is not None and each.numel() <= SMALL and not each.is_meta
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for part, name, buffer, before in self.found:
            if part._buffers.get(name) is not buffer:
                part._buffers[name] = buffer
            if not torch.equal(buffer, before.to(buffer.dtype)):
                buffer.copy_(before)


class Kept:
    """Modes and gradients of a module, before and after."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.modes = {part: part.training for part in self.module.modules()}
        self.buffers = Buffers(self.module)
        self.gradients = {part: part.grad for part in self.module.parameters()}
        self.module.eval()

    def __exit__(self, *_: object) -> None:
        for part, training in self.modes.items():
            part.training = training
        self.buffers.put_back()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient


def examine(
    target: Target, asked: list[Check], *, seed: int, budget: float, progress: Progress | None = None
) -> Report:
    """All findings on a target."""
    start = time.monotonic()
    narrow = target.dtype in NARROW and can_widen(target)
    exam = Exam(target, seed=seed, budget=budget)
    findings: list[Finding] = []
    noise: dict[str, float] = {}
    for own in (False, True) if narrow else (False,):  # what a CPU may be slow in comes last
        with widened(target.module) if narrow and not own else nullcontext():
            if target.logits is not None and own:
                exam.narrow(target.dtype)
            elif target.logits is not None:
                calibrate(exam)
            if target.logits is not None:
                dtype = torch.float32 if narrow and not own else target.dtype
                noise[str(dtype).removeprefix("torch.")] = exam.ratio
            buffers = Buffers(target.module)
            for each in asked:
                if narrow and each.own != own:
                    continue
                if progress is not None:
                    progress(len(findings), len(asked), each.name)
                failed = {finding.check for finding in findings if finding.verdict == "fail"}
                findings.append(ask(each, exam, failed))
                buffers.put_back()
    order = {each.name: n for n, each in enumerate(asked)}
    findings.sort(key=lambda finding: order[finding.check])
    return Report(target.name, findings, seed, time.monotonic() - start, target.facts(), noise)


def calibrate(exam: Exam) -> None:
    """A first text: where even that raises, it is most likely for its tokens or its length."""
    try:
        exam.calibrate()
    except CutawayError:
        raise
    except Exception as error:
        target = exam.target
        raise InputError(
            f"{target.name} was called with {exam.length} tokens below {target.vocab} and {raised(error)}; "
            f"where that is not how it is to be called, give vocab= and longest="
        ) from error


def ask(check: Check, exam: Exam, failed: Collection[str] = ()) -> Finding:
    """One check's finding: the worst of what it tried."""
    start = time.monotonic()
    missing = missing_for(check, exam.target)
    known = [name for name in check.after if name in failed]
    if known and missing is None:
        missing = f"{known[0]} failed, which would show here too"
    if missing:
        return Finding(check.name, "skip", f"skipped: {missing}", page=check.page)
    if exam.left <= 0:
        return Finding(
            check.name, "skip", f"skipped: {exam.budget:g} s are over; give a larger budget", page=check.page
        )
    exam.generator.manual_seed(exam.seed)  # so that a check asked alone sees what it sees among others
    try:
        found = check.run(exam)
        parts = [found] if isinstance(found, Part) else list(found)
    except CannotError as error:
        parts = [Part("skip", f"skipped: {error}")]
    except OfferError as error:
        parts = [Part("warn", f"{UNTRIED}: {error}")]
    except Exception as error:  # the target's own code broke: that is a finding, and no reason to stop
        parts = [Part("warn", f"{UNTRIED}: it {raised(error)}")]
    if exam.target.module is not None:
        exam.target.module.eval()
    parts = parts or [Part("skip", "skipped: there was nothing to try")]
    worst = max(parts, key=lambda part: (SEVERITY[part.verdict], part.verdict == "pass"))
    trouble = worst.verdict in ("fail", "warn") and not worst.message.startswith(UNTRIED)
    return Finding(
        check.name,
        worst.verdict,
        worst.message,
        worst.measured,
        worst.threshold,
        worst.where,
        (worst.cause or check.cause) if trouble else None,
        (worst.fix or check.fix) if trouble else None,
        check.page,
        time.monotonic() - start,
        parts,
    )


def missing_for(check: Check, target: Target) -> str | None:
    """What a target lacks to be asked."""
    if target.kind not in check.kinds:
        return f"for {' and '.join(f'{kind}s' for kind in check.kinds)} only"
    offered = set(target.offers())
    for need in check.needs:
        if not offered & set(need.split("|")):
            return f"needs {need.replace('|', ' or ')}"
    return None
