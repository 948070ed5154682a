"""Markdown output of a report: a summary line and a table, such as for the step summary of GitHub Actions."""

from cutaway.check.report.baseline import BaselineReport, get_accepted
from cutaway.check.report.finding import Finding, Report
from cutaway.check.report.text_file import escape_unprintable

_STATUS = {"passed": "✅ passed", "failed": "❌ failed", "inconclusive": "❔ inconclusive"}
_NUM_MESSAGE_CHARS = 300


def format_markdown(report: Report, source: str) -> str:
    """Format a report as Markdown: problems in a table, then the passed and the skipped checks, which are collapsed."""
    lines = [f"### cutaway check `{_escape(source).replace('`', '')}`: {_STATUS[report.status]}", "", report.summary()]
    accepted = get_accepted(report)
    problems = report.problems
    problems += [finding for finding in report.findings if finding.check in accepted]
    if problems:
        lines += ["", "| check | verdict | finding | location | fix |", "|---|---|---|---|---|"]
        lines += [_format_row(finding, accepted.get(finding.check)) for finding in problems]
    if isinstance(report, BaselineReport) and report.fixed:
        lines += ["", "Fixed, and still in the baseline:", ""]
        lines += [f"- {entry.check}: {_escape(entry.message)}" for entry in report.fixed]
    for verdict, title in (("pass", "passed"), ("skip", "skipped")):
        names = [finding.check for finding in report.findings if finding.verdict == verdict]
        if names:
            text = ", ".join(names)
            lines += ["", f"<details><summary>{len(names)} {title}</summary>", "", text, "", "</details>"]
    return "\n".join(lines) + "\n"


def _format_row(finding: Finding, reason: str | None) -> str:
    verdict = finding.verdict if reason is None else f"accepted ({finding.verdict}): {reason}".removesuffix(": ")
    cells = [finding.check, verdict, finding.message, finding.location or "", finding.fix or ""]
    return f"| {' | '.join(map(_escape, cells))} |"


def _escape(text: str) -> str:
    """One line of text without Markdown or HTML markup: messages can contain text of the checked model."""
    text = " ".join(escape_unprintable(text).split())
    text = text if len(text) <= _NUM_MESSAGE_CHARS else f"{text[:_NUM_MESSAGE_CHARS]} …"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{char}" if char in "\\|*_`[]" else char for char in text)
