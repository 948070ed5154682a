"""Terminal report of `cutaway check`. Failures and warnings are shown in full, passed and skipped checks in short."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cutaway.check.registry import Check
from cutaway.check.report.baseline import BaselineReport, get_accepted
from cutaway.check.report.finding import CaseResult, Finding, Report
from cutaway.cli.views.terminal import (
    borderless_table,
    build_console,
    escape_control_characters,
    format_heading,
    indent,
)

VERDICT_SYMBOLS = {
    "fail": ("✗", "bold red"),
    "inconclusive": ("?", "bold magenta"),
    "warn": ("!", "bold yellow"),
    "pass": ("✓", "green"),
    "skip": ("·", "dim"),
    "accepted": ("~", "dim"),
}
MAX_EXTRA_MESSAGES = 3
"""Maximum number of messages of further cases that are shown with a finding."""


def render_report(
    report: Report,
    source: str,
    notes: Sequence[str] = (),
    *,
    verbose: bool = False,
    show_times: bool = True,
    out: Console | None = None,
) -> None:
    """Print a report of `cutaway check`, below the model's source and the notes about it.

    Without `show_times`, no durations are printed, so that the output is reproducible.
    """
    out = out or build_console()
    parts: list[RenderableType] = [
        format_heading(*map(escape_control_characters, (source, report.model_name))),
        indent(Text(_describe_target(report), "dim")),
    ]
    parts += [indent(Text(escape_control_characters(note), "dim")) for note in notes]
    for finding in report.problems:
        parts += [Text(), _render_finding(finding)]
    parts.append(Text())
    if verbose:
        parts += [_findings_table(report, show_times=show_times), Text(), *_render_baseline(report)]
    else:
        parts += _render_passed_and_skipped(report)
    out.print(Group(*parts, _format_verdict(report, show_times=show_times)))


def _describe_target(report: Report) -> str:
    """Return one line with the kind, number of layers, vocabulary size, dtype and device of the checked model."""
    properties = report.properties
    kind = str(properties.get("kind", ""))
    items = [kind] if kind and kind not in report.model_name else []
    items += [f"{properties['num_layers']} layers"] if "num_layers" in properties else []
    items += [f"vocabulary of {properties['vocab_size']:,}"] if "vocab_size" in properties else []
    items += [str(properties[name]).removeprefix("torch.") for name in ("dtype", "device") if name in properties]
    return " · ".join(items)


def _render_finding(finding: Finding) -> RenderableType:
    """Render a failure, an inconclusive check or a warning, with its details."""
    symbol, style = VERDICT_SYMBOLS[finding.verdict]
    body = borderless_table("lL")
    for name, text in finding.details():
        if text:
            text = f"cutaway check --explain {finding.check}" if name == "docs" else text
            body.add_row(Text(name, "dim"), Text(escape_control_characters(text)))
    case_messages = [case.message for case in finding.cases if case.verdict == finding.verdict]
    for message in [text for text in case_messages if text != finding.message][:MAX_EXTRA_MESSAGES]:
        body.add_row(Text("also", "dim"), Text(escape_control_characters(message)))
    head = Text.assemble((f"{symbol} {finding.check}", style), f"  {escape_control_characters(finding.message)}")
    return Group(_hanging_indent(head), Padding(body, (0, 0, 0, 2)))


def _hanging_indent(text: Text) -> RenderableType:
    """Render a text that starts with a symbol and a space. Its further lines are indented by two columns."""
    table = borderless_table("lL", gap=0)
    table.add_row(text[:2], text[2:])
    return table


def _render_passed_and_skipped(report: Report) -> Iterator[RenderableType]:
    """Render the passed checks in one row, the skipped checks in one row per reason, and the baseline."""
    table = borderless_table("lL")
    passed = [finding.check for finding in report.findings if finding.verdict == "pass"]
    if passed:
        table.add_row(Text("✓ passed", "green"), Text(", ".join(passed)))
    for reason, names in skipped_by_reason(report).items():
        reason_text = f"{escape_control_characters(reason)}: "
        table.add_row(Text("· skipped", "dim"), Text.assemble((reason_text, "dim"), ", ".join(names)))
    _add_baseline_rows(table, report)
    if table.row_count:
        yield table
        yield Text()


def _render_baseline(report: Report) -> Iterator[RenderableType]:
    """Render the accepted findings, and the entries of the baseline that no longer occur."""
    table = borderless_table("lL")
    _add_baseline_rows(table, report)
    if table.row_count:
        yield table
        yield Text()


def _add_baseline_rows(table: Table, report: Report) -> None:
    """Add one row per accepted finding, and one row per entry of the baseline that no longer occurs."""
    for check, reason in get_accepted(report).items():
        message = escape_control_characters(f"{report[check].message}{f' ({reason})' if reason else ''}")
        table.add_row(Text("~ accepted", "dim"), Text.assemble(f"{check}: ", (message, "dim")))
    for entry in report.fixed if isinstance(report, BaselineReport) else ():
        message = escape_control_characters(f"{entry.message}; remove it from the baseline")
        table.add_row(Text("✓ fixed", "green"), Text.assemble(f"{entry.check}: ", (message, "dim")))


def skipped_by_reason(report: Report) -> dict[str, list[str]]:
    """Return a dict from reason to the names of the checks skipped for it, with the most frequent reason first."""
    names_by_reason: dict[str, list[str]] = {}
    for finding in report.findings:
        if finding.verdict == "skip":
            names_by_reason.setdefault(finding.message.removeprefix("skipped: "), []).append(finding.check)
    return dict(sorted(names_by_reason.items(), key=lambda pair: -len(pair[1])))


def _findings_table(report: Report, *, show_times: bool) -> RenderableType:
    """Return a table of all checks and cases, with their measurements."""
    headers = ["", "check", "case", "measured", "threshold", *(["seconds"] if show_times else [])]
    table, accepted = borderless_table("llLrrr"[: len(headers)], headers), get_accepted(report)
    for finding in report.findings:
        single_case = CaseResult(finding.verdict, finding.message, finding.measured, finding.threshold)
        for index, case in enumerate(finding.cases or [single_case]):
            texts = [finding.check if index == 0 else "", escape_control_characters(case.message)]
            texts += ["" if value is None else f"{value:.3g}" for value in (case.measured, case.threshold)]
            if show_times:
                texts.append(f"{finding.seconds:.2f}" if index == 0 else "")
            is_accepted = finding.check in accepted and case.verdict not in ("pass", "skip")
            table.add_row(Text(*VERDICT_SYMBOLS["accepted" if is_accepted else case.verdict]), *map(Text, texts))
    return table


def _format_verdict(report: Report, *, show_times: bool) -> Text:
    """Format the last line of the report: the overall verdict and the number of checks by verdict."""
    counts = report.counts()
    num_run = len(report.findings) - counts["skip"]
    if report.failures:
        verdict = Text(f"{counts['fail']} of {num_run} checks failed", "bold red")
    elif report.inconclusive:
        verdict = Text(f"{counts['inconclusive']} of {num_run} checks are inconclusive", "bold magenta")
    elif num_run:
        problems = "no new problems found" if counts.get("accepted") else "no problems found"
        verdict = Text(problems if not counts["warn"] else "no check failed", "bold green")
    else:
        verdict = Text("no check could be run", "bold yellow")
    counts_text = [f"{counts['inconclusive']} inconclusive"] if report.failures and report.inconclusive else []
    counts_text += [f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"] if counts["warn"] else []
    counts_text += [f"{counts['accepted']} accepted"] if counts.get("accepted") else []
    counts_text += [f"{counts['pass']} passed", f"{counts['skip']} skipped"]
    counts_text += [f"{report.seconds:.1f} s"] if show_times else []
    return verdict.append(f" · {' · '.join(counts_text)}", "not bold default")


def render_check_list(checks: Mapping[str, Check]) -> None:
    """Print the name of each check and what it catches, grouped by module."""
    out = build_console()
    table = borderless_table("lL")
    previous_module = None
    for check in checks.values():
        module = check.run.__module__.rpartition(".")[2]
        if previous_module not in (None, module):
            table.add_row()
        previous_module = module
        table.add_row(Text(check.name, "bold"), Text(check.catches))
    out.print(table)
    out.print(indent(Text(f"{len(checks)} checks; cutaway check --explain NAME describes one", "dim")))


def render_check_docs(text: str) -> None:
    """Print the documentation of a check."""
    from rich.markdown import Markdown

    build_console().print(Markdown(text, hyperlinks=False))
