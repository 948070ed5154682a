"""`CaseResult`, `Finding` and `Report`: the results of checks."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal

Verdict = Literal["fail", "inconclusive", "warn", "pass", "skip"]
"""`inconclusive`: the rounding noise of the model is so large that the check proves nothing."""
SEVERITY: dict[Verdict, int] = {"pass": 0, "skip": 0, "warn": 1, "inconclusive": 2, "fail": 3}
Status = Literal["passed", "failed", "inconclusive"]


@dataclass
class MeasuredArray:
    """Measured values of a case that can be drawn: a matrix, or lines over one axis."""

    kind: Literal["matrix", "lines"]
    title: str
    x_label: str
    """What the columns of a matrix, or the points of a line, are."""
    y_label: str
    """What the rows of a matrix, or the values of a line, are."""
    values: list[list[float]]
    """The rows of a matrix, or one list per line."""
    names: list[str] = field(default_factory=list)
    """Names of the rows or lines; empty if the rows are numbered."""
    expected: str = ""
    """What the values of a correct model are."""


@dataclass
class CaseResult:
    """Result of one case of a check, such as one code path, one padding side or one layer."""

    verdict: Verdict
    message: str
    measured: float | None = None
    threshold: float | None = None
    location: str | None = None
    """The layer, position or row where the problem first appears."""
    cause: str | None = None
    """The usual cause, if it differs from the check's `cause`."""
    fix: str | None = None
    array: MeasuredArray | None = None


failure, warning, success = partial(CaseResult, "fail"), partial(CaseResult, "warn"), partial(CaseResult, "pass")


def skipped(reason: object) -> CaseResult:
    """Result of a case that does not apply to the model."""
    return CaseResult("skip", f"skipped: {reason}")


@dataclass
class Finding:
    """Result of one check on one model."""

    check: str
    verdict: Verdict
    message: str
    measured: float | None = None
    threshold: float | None = None
    location: str | None = None
    cause: str | None = None
    """The usual cause of the problem; None if there is no problem."""
    fix: str | None = None
    docs_path: str = ""
    """Documentation page of the check; `cutaway check --explain NAME` prints the same text."""
    seconds: float = 0.0
    cases: list[CaseResult] = field(default_factory=list)
    array: MeasuredArray | None = None
    """Measured values to draw, of this case or of the first one that has any."""
    symptom_of: str | None = None
    """Check that probably names the cause of this problem more precisely; None if there is none."""
    not_run: bool = False
    """Whether a skipped check applies to the model, but a check that it depends on failed, or the time was over."""

    def __str__(self) -> str:
        lines = [f"{self.verdict:<4}  {self.check}: {self.message}"]
        if self.is_problem:
            lines += [f"      {name}: {text}" for name, text in self.details() if text]
        return "\n".join(lines)

    @property
    def is_problem(self) -> bool:
        """Whether the finding needs attention: a failure, a warning or an inconclusive check."""
        return SEVERITY[self.verdict] > 0

    def details(self) -> list[tuple[str, str | None]]:
        """(label, text) pairs that describe a problem in addition to the message; the text is None if it is unknown."""
        figures = None if self.measured is None else f"{self.measured:.3g}"
        if figures and self.threshold is not None:
            figures += f", threshold {self.threshold:.3g}"
        return [
            ("measured", figures),
            ("location", self.location),
            ("probably the same cause as", self.symptom_of),
            ("likely cause", self.cause if self.symptom_of is None else None),
            ("fix", self.fix if self.symptom_of is None else None),
            ("docs", self.docs_path),
        ]


@dataclass(repr=False)
class Report:
    """All findings on one model, in the order of the checks."""

    model_name: str
    findings: list[Finding]
    seed: int
    seconds: float = 0.0
    properties: dict[str, object] = field(default_factory=dict)
    """The model's properties, as set or inferred before the checks ran."""
    noise: dict[str, float] = field(default_factory=dict)
    """dtype → rounding noise relative to the largest output."""

    @property
    def status(self) -> Status:
        """`failed` if a check failed, else `inconclusive` if a check was inconclusive, else `passed`."""
        return "failed" if self.failures else "inconclusive" if self.inconclusive else "passed"

    @property
    def ok(self) -> bool:
        """Whether the status is `passed`. Warnings and skipped checks do not change the status."""
        return self.status == "passed"

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "fail"]

    @property
    def inconclusive(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "inconclusive"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "warn"]

    @property
    def skipped(self) -> list[Finding]:
        """The checks that did not run; the message is the reason."""
        return [finding for finding in self.findings if finding.verdict == "skip"]

    @property
    def problems(self) -> list[Finding]:
        """Failures, inconclusive checks and warnings, the most severe first. Symptoms follow the problem that names
        their cause."""
        ranked = [*self.failures, *self.inconclusive, *self.warnings]
        checks = {finding.check for finding in ranked}
        groups: dict[str, list[Finding]] = {}
        for finding in ranked:
            groups.setdefault(finding.symptom_of if finding.symptom_of in checks else finding.check, []).append(finding)
        return [finding for cause, group in groups.items() for finding in sorted(group, key=lambda f: f.check != cause)]

    def __getitem__(self, check: str) -> Finding:
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(check)

    def counts(self) -> dict[str, int]:
        """Number of findings per verdict."""
        counted = Counter(finding.verdict for finding in self.findings)
        return {verdict: counted[verdict] for verdict in ("fail", "inconclusive", "warn", "pass", "skip")}

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"ok": self.ok, "status": self.status, "counts": self.counts()}

    def summary(self) -> str:
        """The number of findings per verdict and the run time in seconds, in one line."""
        counts = self.counts()
        warnings = f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"
        warnings = f"{counts['inconclusive']} inconclusive, {warnings}" if counts["inconclusive"] else warnings
        over_budget = sum(finding.not_run and "budget" in finding.message for finding in self.skipped)
        skipped = f"{counts['skip']} skipped{f' ({over_budget} for lack of time)' if over_budget else ''}"
        rest = f"{counts['pass']} passed, {skipped}, in {self.seconds:.1f} s"
        return f"{counts['fail']} failed, {warnings}, {rest}"

    def __repr__(self) -> str:
        return f"<Report of {self.model_name}: {self.summary()}>"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.problems), f"{self.model_name}: {self.summary()}"])


class SkipCheckError(Exception):
    """Raised by a check that does not apply to the model; the message is the reason."""
