"""What `cutaway check` shows in a terminal: problems first and whole, the rest in a line each."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cutaway.check.registry import Check
from cutaway.check.report.finding import CaseResult, Finding, Report
from cutaway.cli.views.terminal import build_console, escape_control_characters, format_heading, indent

VERDICT_SYMBOLS = {
    "fail": ("✗", "bold red"),
    "warn": ("!", "bold yellow"),
    "pass": ("✓", "green"),
    "skip": ("·", "dim"),
}
MAX_EXTRA_MESSAGES = 3
"""Other things that one check found wrong, at most."""


def render_report(
    report: Report,
    source: str,
    notes: Sequence[str] = (),
    *,
    verbose: bool = False,
    show_times: bool = True,
    out: Console | None = None,
) -> None:
    """A report on one screen. Without `show_times` it says nothing that differs from run to run."""
    out = out or build_console()
    parts: list[RenderableType] = [
        format_heading(escape_control_characters(source), escape_control_characters(report.model_name)),
        indent(Text(_describe_target(report), "dim")),
    ]
    parts += [indent(Text(escape_control_characters(note), "dim")) for note in notes]
    for finding in (*report.failures, *report.warnings):
        parts += [Text(), _render_finding(finding)]
    parts.append(Text())
    parts += (
        [_findings_table(report, show_times=show_times), Text()] if verbose else [*_render_passed_and_skipped(report)]
    )
    out.print(Group(*parts, _format_verdict(report, show_times=show_times)))


def _describe_target(report: Report) -> str:
    """What the target is, in a line."""
    facts = report.properties
    told = [facts["kind"]] if facts.get("kind") and facts["kind"] not in report.model_name else []
    told += [f"{facts['num_layers']} layers"] if "num_layers" in facts else []
    told += [f"vocabulary of {facts['vocab_size']:,}"] if "vocab_size" in facts else []
    told += [str(facts[name]).removeprefix("torch.") for name in ("dtype", "device") if name in facts]
    return " · ".join(told)


def _render_finding(finding: Finding) -> RenderableType:
    """All that a person needs to act on it."""
    sign, style = VERDICT_SYMBOLS[finding.verdict]
    body = _two_column_table()
    for name, text in finding.details():
        if text:
            text = f"cutaway check --explain {finding.check}" if name == "docs" else text
            body.add_row(Text(name, "dim"), Text(escape_control_characters(text)))
    same = [part.message for part in finding.cases if part.verdict == finding.verdict]
    for message in [each for each in same if each != finding.message][:MAX_EXTRA_MESSAGES]:
        body.add_row(Text("also", "dim"), Text(escape_control_characters(message)))
    head = Text.assemble((f"{sign} {finding.check}", style), f"  {escape_control_characters(finding.message)}")
    return Group(_hanging_indent(head), Padding(body, (0, 0, 0, 2)))


def _two_column_table() -> Table:
    """A name, and what is said under it."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _hanging_indent(text: Text) -> RenderableType:
    """Text whose later lines stand to the right of its first."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=0)
    table.add_column(width=2)
    table.add_column(overflow="fold")
    table.add_row(text[:2], text[2:])
    return table


def _render_passed_and_skipped(report: Report) -> Iterator[RenderableType]:
    """What passed, in a line; what was skipped, by its reason."""
    table = _two_column_table()
    passed = [finding.check for finding in report.findings if finding.verdict == "pass"]
    if passed:
        table.add_row(Text("✓ passed", "green"), Text(", ".join(passed)))
    for reason, names in skipped_by_reason(report).items():
        table.add_row(
            Text("· skipped", "dim"), Text.assemble((f"{escape_control_characters(reason)}: ", "dim"), ", ".join(names))
        )
    if table.row_count:
        yield table
        yield Text()


def skipped_by_reason(report: Report) -> dict[str, list[str]]:
    """Names of checks by the reason why they were not tried."""
    found: dict[str, list[str]] = {}
    for finding in report.findings:
        if finding.verdict == "skip":
            found.setdefault(finding.message.removeprefix("skipped: "), []).append(finding.check)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _findings_table(report: Report, *, show_times: bool) -> RenderableType:
    """Each check, and each thing it tried, with figures."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("tried", overflow="fold", ratio=1)
    for name in ("measured", "threshold", *(["seconds"] if show_times else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for finding in report.findings:
        whole = CaseResult(finding.verdict, finding.message, finding.measured, finding.threshold)
        for n, part in enumerate(finding.cases or [whole]):
            sign, style = VERDICT_SYMBOLS[part.verdict]
            row = [
                Text(sign, style),
                Text(finding.check if n == 0 else ""),
                Text(escape_control_characters(part.message)),
            ]
            row += [Text(_format_measurement(part.measured)), Text(_format_measurement(part.threshold))]
            row += [Text(f"{finding.seconds:.2f}" if n == 0 else "", "dim")] if show_times else []
            table.add_row(*row)
    return table


def _format_measurement(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _format_verdict(report: Report, *, show_times: bool) -> Text:
    """The last line: what it comes to."""
    counts = report.counts()
    tried = len(report.findings) - counts["skip"]
    if not report.ok:
        said = Text(f"{counts['fail']} of {tried} checks failed", "bold red")
    elif tried:
        said = Text("nothing wrong was found" if not counts["warn"] else "nothing failed", "bold green")
    else:
        said = Text("nothing could be tried", "bold yellow")
    rest = [f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"] if counts["warn"] else []
    rest += [f"{counts['pass']} passed", f"{counts['skip']} skipped"]
    rest += [f"{report.seconds:.1f} s"] if show_times else []
    return said.append(f" · {' · '.join(rest)}", "not bold default")


def render_check_list(checks: Mapping[str, Check]) -> None:
    """All checks, by the part of a Transformer that they ask about."""
    out = build_console()
    table = _two_column_table()
    room = None
    for each in checks.values():
        here = each.run.__module__.rpartition(".")[2]
        if room not in (None, here):
            table.add_row()
        room = here
        table.add_row(Text(each.name, "bold"), Text(each.catches))
    out.print(table)
    out.print(indent(Text(f"{len(checks)} checks; cutaway check --explain NAME says more of one", "dim")))


def render_check_docs(text: str) -> None:
    """A page, set for the terminal."""
    from rich.markdown import Markdown

    build_console().print(Markdown(text, hyperlinks=False))
