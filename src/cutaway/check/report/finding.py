"""What a check found, and all of it together."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["fail", "warn", "pass", "skip"]


SEVERITY: dict[Verdict, int] = {"pass": 0, "skip": 0, "warn": 1, "fail": 2}


@dataclass
class CaseResult:
    """One thing that a check tried: a path of the code, a side of the padding, a layer."""

    verdict: Verdict
    message: str
    measured: float | None = None
    threshold: float | None = None
    location: str | None = None
    """The layer, position or path where it first appears."""
    cause: str | None = None
    """What is usually wrong, where it is not what the check says."""
    fix: str | None = None


@dataclass
class Finding:
    """What one check says of a model."""

    check: str
    verdict: Verdict
    message: str
    measured: float | None = None
    threshold: float | None = None
    location: str | None = None
    cause: str | None = None
    """What is usually wrong, where something is."""
    fix: str | None = None
    docs_path: str = ""
    """Where the check is explained; `cutaway check --explain NAME` shows the same."""
    seconds: float = 0.0
    cases: list[CaseResult] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.verdict:<4}  {self.check}: {self.message}"]
        if self.verdict in ("fail", "warn"):
            lines += [f"      {name}: {text}" for name, text in self.details() if text]
        return "\n".join(lines)

    def details(self) -> list[tuple[str, str | None]]:
        """What a person wants to know of a problem, beside the message."""
        figures = None if self.measured is None else f"{self.measured:.3g}"
        if figures and self.threshold is not None:
            figures += f", threshold {self.threshold:.3g}"
        return [
            ("measured", figures),
            ("location", self.location),
            ("likely cause", self.cause),
            ("fix", self.fix),
            ("docs", self.docs_path),
        ]


@dataclass
class Report:
    """All findings on one target, in the order in which the checks ran."""

    model_name: str
    findings: list[Finding]
    seed: int
    seconds: float = 0.0
    properties: dict[str, Any] = field(default_factory=dict)
    """What was found out about the target before it was checked."""
    noise: dict[str, float] = field(default_factory=dict)
    """How far the target is from itself when its products are rounded otherwise, as a share of its largest output."""

    @property
    def ok(self) -> bool:
        """Nothing failed. A warning is no failure; what was skipped is not known."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "fail"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "warn"]

    def __getitem__(self, check: str) -> Finding:
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(check)

    def counts(self) -> dict[str, int]:
        """How many findings have each verdict."""
        counted = Counter(finding.verdict for finding in self.findings)
        return {verdict: counted[verdict] for verdict in ("fail", "warn", "pass", "skip")}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok, "counts": self.counts()}

    def summary(self) -> str:
        counts = self.counts()
        named = [
            f"{counts['fail']} failed",
            f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}",
            f"{counts['pass']} passed",
        ]
        return ", ".join([*named, f"{counts['skip']} skipped"]) + f", in {self.seconds:.1f} s"

    def __str__(self) -> str:
        shown = [finding for finding in self.findings if finding.verdict in ("fail", "warn")]
        return "\n".join([*map(str, shown), f"{self.model_name}: {self.summary()}"])


class SkipCheckError(Exception):
    """Why a check could not be tried."""
