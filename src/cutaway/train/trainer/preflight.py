"""Before the first step a model is asked whether it is right: one that sees the future only seems to learn."""

from collections.abc import Callable

from cutaway.check import Report, check
from cutaway.errors import InputError
from cutaway.model import Transformer

BUDGET_SECONDS = 5.0
LEAK_CHECKS = ("causality", "causality-paths")


def run_preflight(model: Transformer, seed: int, log: Callable[[str], None]) -> None:
    """Ask the quick checks; a leak is an error, and whatever else they find is told. The model stays as it is."""
    report = check(model, preflight=True, seed=seed, budget=BUDGET_SECONDS)
    _raise_on_leak(report)
    for finding in (*report.failures, *report.warnings):
        log(f"{finding.check}: {finding.message} ({finding.docs_path} explains it)")


def _raise_on_leak(report: Report) -> None:
    for finding in report.failures:
        if finding.check in LEAK_CHECKS:
            raise InputError(
                f"this model sees the future, so it would learn to copy its answers and look brilliant: "
                f"{finding.message}{f' ({finding.location})' if finding.location else ''}. Likely cause:"
                f" {finding.cause}. `cutaway check` says more; training.preflight = false trains it all the same"
            )
