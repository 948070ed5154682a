"""Sanity checks of a model before the first step, above all that no token attends to future tokens."""

from collections.abc import Callable

from cutaway.check import Report, check
from cutaway.errors import InputError
from cutaway.model import Transformer

BUDGET_SECONDS = 5.0
LEAK_CHECKS = ("causality", "causality-paths")


def run_preflight(model: Transformer, seed: int, log: Callable[[str], None]) -> None:
    """Run the quick checks of `cutaway check` on the model, without changing it.

    Raises InputError if the model attends to future tokens. Other findings are logged.
    """
    report = check(model, preflight=True, seed=seed, budget=BUDGET_SECONDS)
    _raise_on_leak(report)
    for finding in report.problems:
        log(f"{finding.check}: {finding.message} (see {finding.docs_path})")


def _raise_on_leak(report: Report) -> None:
    for finding in report.failures:
        if finding.check in LEAK_CHECKS:
            raise InputError(
                f"the model attends to future tokens, so it would learn to copy its targets and report a loss that is"
                f" too low: {finding.message}{f' ({finding.location})' if finding.location else ''}. Likely cause:"
                f" {finding.cause}. Run `cutaway check` for details; set training.preflight = false to train it anyway"
            )
