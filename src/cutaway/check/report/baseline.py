"""Baseline: accepted findings in a JSON file. They are reported, but do not change the status of a report.

An entry accepts one case of a check on one model. Numbers in its message are replaced by `#`, because measured values
and positions differ between machines and random seeds.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cutaway.bounded_files import read_json_object
from cutaway.check.registry import get_check
from cutaway.check.report.finding import SEVERITY, CaseResult, Finding, Report, Verdict
from cutaway.check.report.text_file import write_atomically
from cutaway.errors import InputError

_VERSION = 1
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:[.,]\d+)*(?:e[-+]?\d+)?|\b(?:inf|nan)\b")
_ACCEPTABLE: tuple[Verdict, ...] = ("fail", "inconclusive", "warn")


def mask_numbers(message: str) -> str:
    """Replace the numbers of a message by `#`, so that it is the same in each run."""
    return _NUMBER.sub("#", message)


@dataclass(frozen=True)
class BaselineEntry:
    """An accepted case of a check."""

    model: str
    """The SOURCE argument of the command or of `--cutaway`, such as models.gpt:make."""
    check: str
    verdict: Verdict
    message: str
    """The message of the case, with `#` for each number."""
    reason: str = ""
    """Why the finding is accepted. A person writes it; `--write-baseline` keeps it."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.check, self.message

    def accepts(self, case: CaseResult) -> bool:
        """Whether the entry accepts a case of its check: the same message, and a verdict that is not more severe."""
        return mask_numbers(case.message) == self.message and SEVERITY[case.verdict] <= SEVERITY[self.verdict]


@dataclass
class BaselineReport(Report):
    """A report whose status does not depend on accepted findings."""

    accepted: dict[str, str] = field(default_factory=dict)
    """Name of each check whose problems are all accepted → the reasons."""
    fixed: list[BaselineEntry] = field(default_factory=list)
    """Entries whose check ran and did not report the problem again."""

    @property
    def failures(self) -> list[Finding]:
        return self._without_accepted(super().failures)

    @property
    def inconclusive(self) -> list[Finding]:
        return self._without_accepted(super().inconclusive)

    @property
    def warnings(self) -> list[Finding]:
        return self._without_accepted(super().warnings)

    def _without_accepted(self, findings: Iterable[Finding]) -> list[Finding]:
        return [finding for finding in findings if finding.check not in self.accepted]

    def counts(self) -> dict[str, int]:
        """Number of findings per verdict; accepted findings are counted as `accepted` only."""
        accepted = Counter[str](finding.verdict for finding in self.findings if finding.check in self.accepted)
        counts = {verdict: count - accepted[verdict] for verdict, count in super().counts().items()}
        return counts | {"accepted": len(self.accepted)}

    def summary(self) -> str:
        return f"{super().summary()}, {len(self.accepted)} accepted"


def get_accepted(report: Report) -> Mapping[str, str]:
    """Name of each accepted check → the reasons; empty for a report without a baseline."""
    return report.accepted if isinstance(report, BaselineReport) else {}


@dataclass(frozen=True)
class Baseline:
    """The entries of a baseline file. One file can hold the entries of several models."""

    entries: tuple[BaselineEntry, ...] = ()

    def apply(self, report: Report, model: str) -> BaselineReport:
        """Return the report with the accepted findings marked.

        Of a finding with accepted and new problems, only the new ones remain.
        """
        findings, accepted = [], {}
        for finding in report.findings:
            problems = list_problems(finding)
            matches = [self._find_entry(model, finding.check, case) for case in problems]
            new = [case for case, entry in zip(problems, matches, strict=True) if entry is None]
            if problems and not new:
                reasons = dict.fromkeys(entry.reason for entry in matches if entry is not None and entry.reason)
                accepted[finding.check] = "; ".join(reasons)
            findings.append(_keep_cases(finding, new) if 0 < len(new) < len(problems) else finding)
        values = {entry.name: getattr(report, entry.name) for entry in fields(Report)} | {"findings": findings}
        return BaselineReport(**values, accepted=accepted, fixed=self._list_fixed(report, model))

    def update(self, report: Report, model: str) -> "Baseline":
        """Return the baseline that accepts exactly the problems of this report, with the reasons of existing entries.

        Entries of other models, and of checks that did not run to a result, are kept.
        """
        reasons = {entry.key: entry.reason for entry in self.entries}
        fixed = {entry.key for entry in self._list_fixed(report, model)}
        entries = {entry.key: entry for entry in self.entries if entry.key not in fixed}
        for finding in report.findings:
            for case in sorted(list_problems(finding), key=lambda case: SEVERITY[case.verdict]):
                entry = BaselineEntry(model, finding.check, case.verdict, mask_numbers(case.message))
                entries[entry.key] = replace(entry, reason=reasons.get(entry.key, ""))
        return Baseline(tuple(sorted(entries.values(), key=lambda entry: entry.key)))

    def _find_entry(self, model: str, check: str, case: CaseResult) -> BaselineEntry | None:
        candidates = (entry for entry in self.entries if (entry.model, entry.check) == (model, check))
        return next((entry for entry in candidates if entry.accepts(case)), None)

    def _list_fixed(self, report: Report, model: str) -> list[BaselineEntry]:
        """Entries of checks that ran to a result without the accepted message.

        A skipped or inconclusive check does not show that a problem is fixed.
        """
        messages = {
            finding.check: {mask_numbers(case.message) for case in list_problems(finding)}
            for finding in report.findings
            if finding.verdict not in ("skip", "inconclusive")
        }
        own = [entry for entry in self.entries if entry.model == model and entry.check in messages]
        return [entry for entry in own if entry.message not in messages[entry.check]]

    def write(self, path: Path) -> None:
        data = {"version": _VERSION, "accepted": [asdict(entry) for entry in self.entries]}
        write_atomically(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def list_problems(finding: Finding) -> list[CaseResult]:
    """The cases of a finding that failed, are inconclusive or have a warning; the finding itself if it has no cases."""
    cases = finding.cases or [CaseResult(finding.verdict, finding.message)]
    return [case for case in cases if SEVERITY[case.verdict] > 0]


def _keep_cases(finding: Finding, problems: list[CaseResult]) -> Finding:
    """Return the finding with only these problems; the most severe one is its message."""
    worst = max(problems, key=lambda case: SEVERITY[case.verdict])
    texts: dict[str, Any] = {"cause": worst.cause, "fix": worst.fix}
    if finding.cause is not None:  # the finding has the texts of the check, unless it could not run
        check = get_check(finding.check)
        texts = {"cause": worst.cause or check.cause, "fix": worst.fix or check.fix}
    names = ("verdict", "message", "measured", "threshold", "location")
    cases = [case for case in finding.cases if SEVERITY[case.verdict] == 0 or case in problems]
    array = worst.array or finding.array
    return replace(finding, **{name: getattr(worst, name) for name in names}, **texts, array=array, cases=cases)


def load_baseline(path: Path) -> Baseline:
    """Read a baseline file. Raise InputError if it is missing or invalid."""
    if not path.exists():
        raise InputError(f"the baseline '{path}' does not exist; create it with cutaway check … --write-baseline")
    data = read_json_object(path, InputError)
    entries = data.get("accepted")
    if data.get("version") != _VERSION or not isinstance(entries, list):
        raise InputError(
            f'\'{path}\' is not a baseline of cutaway check: it needs "version": {_VERSION} and a list "accepted"; '
            "write it again with --write-baseline"
        )
    return Baseline(tuple(_parse_entry(entry, f"'{path}': accepted[{index}]") for index, entry in enumerate(entries)))


def _parse_entry(data: object, where: str) -> BaselineEntry:
    names = [entry.name for entry in fields(BaselineEntry)]
    if not isinstance(data, dict) or not data.keys() <= set(names):
        raise InputError(f"{where} must be an object with the keys {', '.join(names)}; correct the file")
    for name in names:
        if not isinstance(data.get(name, "" if name == "reason" else None), str):
            raise InputError(f"{where} has no text '{name}'; correct the file, or write it again with --write-baseline")
    if data["verdict"] not in _ACCEPTABLE:
        raise InputError(f"{where} has the verdict '{data['verdict']}'; use one of {', '.join(_ACCEPTABLE)}")
    return BaselineEntry(**data)
