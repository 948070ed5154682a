"""What `cutaway check` shows in a terminal: problems first and whole, the rest in a line each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cutaway.check.finding import Finding, Part, Report
from cutaway.cli.screen import visible
from cutaway.cli.size_view import console, heading, under

SIGNS = {"fail": ("✗", "bold red"), "warn": ("!", "bold yellow"), "pass": ("✓", "green"), "skip": ("·", "dim")}
MORE = 3
"""Other things that one check found wrong, at most."""


def show(
    report: Report,
    source: str,
    notes: Sequence[str] = (),
    *,
    verbose: bool = False,
    timed: bool = True,
    out: Console | None = None,
) -> None:
    """A report on one screen. Without `timed` it says nothing that differs from run to run."""
    out = out or console()
    parts: list[RenderableType] = [heading(visible(source), visible(report.target)), under(Text(known(report), "dim"))]
    parts += [under(Text(visible(note), "dim")) for note in notes]
    for finding in (*report.failures, *report.warnings):
        parts += [Text(), problem(finding)]
    parts.append(Text())
    parts += [everything(report, timed=timed), Text()] if verbose else [*others(report)]
    out.print(Group(*parts, verdict(report, timed=timed)))


def known(report: Report) -> str:
    """What the target is, in a line."""
    facts = report.facts
    told = [facts["kind"]] if facts.get("kind") and facts["kind"] not in report.target else []
    told += [f"{facts['layers']} layers"] if "layers" in facts else []
    told += [f"vocabulary of {facts['vocab']:,}"] if "vocab" in facts else []
    told += [str(facts[name]).removeprefix("torch.") for name in ("dtype", "device") if name in facts]
    return " · ".join(told)


def problem(finding: Finding) -> RenderableType:
    """All that a person needs to act on it."""
    sign, style = SIGNS[finding.verdict]
    body = pairs()
    for name, text in finding.told():
        if text:
            text = f"cutaway check --explain {finding.check}" if name == "explained in" else text
            body.add_row(Text(name, "dim"), Text(visible(text)))
    same = [part.message for part in finding.parts if part.verdict == finding.verdict]
    for message in [each for each in same if each != finding.message][:MORE]:
        body.add_row(Text("also", "dim"), Text(visible(message)))
    head = Text.assemble((f"{sign} {finding.check}", style), f"  {visible(finding.message)}")
    return Group(hanging(head), Padding(body, (0, 0, 0, 2)))


def pairs() -> Table:
    """A name, and what is said under it."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def hanging(text: Text) -> RenderableType:
    """Text whose later lines stand to the right of its first."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=0)
    table.add_column(width=2)
    table.add_column(overflow="fold")
    table.add_row(text[:2], text[2:])
    return table


def others(report: Report) -> Iterator[RenderableType]:
    """What passed, in a line; what was skipped, by its reason."""
    table = pairs()
    passed = [finding.check for finding in report.findings if finding.verdict == "pass"]
    if passed:
        table.add_row(Text("✓ passed", "green"), Text(", ".join(passed)))
    for reason, names in skipped(report).items():
        table.add_row(Text("· skipped", "dim"), Text.assemble((f"{visible(reason)}: ", "dim"), ", ".join(names)))
    if table.row_count:
        yield table
        yield Text()


def skipped(report: Report) -> dict[str, list[str]]:
    """Names of checks by the reason why they were not tried."""
    found: dict[str, list[str]] = {}
    for finding in report.findings:
        if finding.verdict == "skip":
            found.setdefault(finding.message.removeprefix("skipped: "), []).append(finding.check)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def everything(report: Report, *, timed: bool) -> RenderableType:
    """Each check, and each thing it tried, with figures."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("tried", overflow="fold", ratio=1)
    for name in ("measured", "threshold", *(["seconds"] if timed else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for finding in report.findings:
        whole = Part(finding.verdict, finding.message, finding.measured, finding.threshold)
        for n, part in enumerate(finding.parts or [whole]):
            sign, style = SIGNS[part.verdict]
            row = [Text(sign, style), Text(finding.check if n == 0 else ""), Text(visible(part.message))]
            row += [Text(figure(part.measured)), Text(figure(part.threshold))]
            row += [Text(f"{finding.seconds:.2f}" if n == 0 else "", "dim")] if timed else []
            table.add_row(*row)
    return table


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def verdict(report: Report, *, timed: bool) -> Text:
    """The last line: what it comes to."""
    counts = report.counts()
    tried = len(report.findings) - counts["skip"]
    if not report.ok:
        said = Text(f"{counts['fail']} of {tried} checks failed", "bold red")
    elif tried:
        said = Text("nothing wrong was found" if not counts["warn"] else "nothing failed", "bold green")
    else:
        said = Text("nothing could be tried", "bold yellow")
    rest = [f"{counts['warn']} to look at"] if counts["warn"] else []
    rest += [f"{counts['pass']} passed", f"{counts['skip']} skipped"]
    rest += [f"{report.seconds:.1f} s"] if timed else []
    return said.append(f" · {' · '.join(rest)}", "not bold default")


def names(known: Mapping[str, Any]) -> None:
    """All checks, by the part of a Transformer that they ask about."""
    out = console()
    table = pairs()
    room = None
    for each in known.values():
        here = each.run.__module__.rpartition(".")[2]
        if room not in (None, here):
            table.add_row()
        room = here
        table.add_row(Text(each.name, "bold"), Text(each.catches))
    out.print(table)
    out.print(under(Text(f"{len(known)} checks; cutaway check --explain NAME says more of one", "dim")))


def explain(text: str) -> None:
    """A page, set for the terminal."""
    from rich.markdown import Markdown

    console().print(Markdown(text, hyperlinks=False))
