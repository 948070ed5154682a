"""Before the first step a model is asked whether it is right: one that sees the future only seems to learn."""

from collections.abc import Callable

from cutaway.check import Report, check
from cutaway.errors import InputError
from cutaway.model import Transformer

SECONDS = 5.0
LEAKS = ("causality", "causality-paths")


def doubt(model: Transformer, seed: int, say: Callable[[str], None]) -> None:
    """Ask the quick checks; a leak is an error, and whatever else they find is told. The model stays as it is."""
    report = check(model, quick=True, seed=seed, budget=SECONDS)
    stop_on_a_leak(report)
    for finding in (*report.failures, *report.warnings):
        say(f"{finding.check}: {finding.message} ({finding.page} explains it)")


def stop_on_a_leak(report: Report) -> None:
    for finding in report.failures:
        if finding.check in LEAKS:
            raise InputError(
                f"this model sees the future, so it would learn to copy its answers and look brilliant: "
                f"{finding.message}{f' ({finding.where})' if finding.where else ''}. Likely cause: {finding.cause}. "
                "`cutaway check` says more; training.check = false trains it all the same"
            )
