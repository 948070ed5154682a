"""Queries: the list of checks, and the checks of `ct.check` on the open model, sent one by one as they finish."""

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field

from cutaway.check import Check, Finding, check, get_checks
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult

MAX_BUDGET_SECONDS = 240.0
"""Maximum time after which no further check is started. It is below the time limit of a query."""
Bound = Literal["at most", "at least"]


class ListChecks(Query):
    """All checks, in the order in which they run: name, subject, and what each compares."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        return QueryResult({"checks": [_check_to_dict(entry) for entry in get_checks().values()]})


def _check_to_dict(entry: Check) -> dict[str, object]:
    names = ("name", "title", "subject", "catches", "description", "preflight")
    return {name: getattr(entry, name) for name in names}


class RunCheck(Query):
    """Run the checks on the open model. Each finding is a partial result; the result has counts, time, noise and which
    problems probably have the cause that another one names.

    The model is locked meanwhile, because checks change its mode and weights and restore them at the end.
    """

    preflight: bool = False
    """Whether to run only the checks that training runs before its first step."""
    budget: Annotated[float, Field(gt=0, le=MAX_BUDGET_SECONDS)] = 60.0
    """Time in seconds after which no further check is started."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        def send_finding(finding: Finding) -> None:
            job.send_partial(QueryResult(finding_to_dict(finding)))

        job.report_progress(0, 1, "rounding noise")
        with inspector.lock:
            report = check(
                inspector.model,
                preflight=self.preflight,
                budget=self.budget,
                progress=lambda done, total, name: job.report_progress(done, total, get_checks()[name].title),
                on_finding=send_finding,
            )
        symptoms = {finding.check: finding.symptom_of for finding in report.findings if finding.symptom_of is not None}
        data = {"counts": report.counts(), "seconds": report.seconds, "noise": report.noise, "symptoms": symptoms}
        return QueryResult(data)


def finding_to_dict(finding: Finding) -> dict[str, object]:
    """Return a finding as JSON values, with `bound`: whether the threshold is the largest or smallest correct value."""
    cases = [
        asdict(case) | {"bound": find_bound(case.verdict, case.measured, case.threshold)} for case in finding.cases
    ]
    bound = find_bound(finding.verdict, finding.measured, finding.threshold)
    return asdict(finding) | {"bound": bound, "cases": cases}


def find_bound(verdict: str, measured: float | None, threshold: float | None) -> Bound | None:
    """Return which side of the threshold is correct, or None if there is no threshold.

    A check reports a measured value, a threshold and a verdict. Most thresholds are upper limits; a few are lower
    limits, such as that of a difference that must exist.
    """
    if measured is None or threshold is None:
        return None
    is_correct = verdict == "pass"
    return "at most" if (measured <= threshold) == is_correct else "at least"
