"""What `cutaway learn` shows in a terminal."""

import sys
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text

from cutaway.cli.screen import visible
from cutaway.cli.size_view import console, grid, under
from cutaway.learn.exercises import Exercise
from cutaway.learn.guard import Judged

LINES = 20
"""Of what a learner prints, as many are shown."""
STYLES = {"passed": "green", "tried": "yellow", "begun": "cyan", "not begun": "dim"}
SIGNS = {"right": ("✓", "green"), "wrong": ("✗", "red"), "failed": ("✗", "red"), "missing": ("✗", "red")}


def state(of: str) -> Text:
    return Text(of, STYLES[of])


def list_all(rows: list[dict[str, Any]]) -> None:
    table = grid("rlrrll", ["", "exercise", "minutes", "notebook", "about", ""])
    for each in rows:
        done = Text() if each["state"] == "not begun" else state(each["state"])
        notebook = str(int(each["notebook"][:2]))
        table.add_row(str(each["number"]), each["title"], str(each["minutes"]), notebook, each["belongs_to"], done)
    out = console()
    out.print(table)
    out.print("[dim]Begin with `cutaway learn start 1`; the file says what to do.[/dim]")


def progress(rows: list[dict[str, Any]], passed: int) -> None:
    table = grid("rllrrl", ["", "exercise", "state", "tries", "hints", "last"])
    for each in rows:
        when = (each["passed"] or each["last"] or "")[:10]
        hints = f"{each['hints']}/{each['all_hints']}" if each["hints"] else ""
        table.add_row(
            str(each["number"]), each["title"], state(each["state"]), str(each["tries"] or ""), hints, Text(when)
        )
    out = console()
    out.print(table)
    left = next((each["number"] for each in rows if each["state"] != "passed"), None)
    more = "all of them" if left is None else f"next: `cutaway learn start {left}`"
    if left is not None and rows[left - 1]["state"] != "not begun":
        more = f"next: `cutaway learn check {left}`"
    out.print(f"[dim]{passed} of {len(rows)} passed; {more}[/dim]")


def begun(exercise: Exercise, path: Path, old: Path | None) -> None:
    out = console()
    out.print(Text.assemble((f"{exercise.number} · {exercise.title}", "bold"), f"  about {exercise.minutes} minutes"))
    if old is not None:
        out.print(f"Your old file is now '{escape(str(old))}'.", soft_wrap=True)
    out.print(
        f"Written to '{escape(str(path))}'. Replace each line that raises NotImplementedError, then ask:",
        soft_wrap=True,
    )
    out.print(f"  cutaway learn check {exercise.number}")
    out.print(f"  cutaway learn hint {exercise.number}")


def hints(exercise: Exercise, given: int, *, new: bool) -> None:
    out = console()
    count = len(exercise.hints)
    for n, text in enumerate(exercise.hints[:given], 1):
        fresh = new and n == given
        out.print(Text(f"hint {n} of {count}", "bold" if fresh else "dim"))
        out.print(under(Text(text, "" if fresh else "dim")))
    if not new:
        out.print(f"[dim]These are all. `cutaway learn solution {exercise.number}` shows the solution.[/dim]")


def code(text: str) -> None:
    from rich.syntax import Syntax

    out = console()
    if out.is_terminal:
        out.print(Syntax(text, "python", background_color="default", word_wrap=True))
    else:
        sys.stdout.write(text)


def judged(exercise: Exercise, path: Path, result: Judged) -> None:
    """The verdict, what is behind it, and what to do next."""
    out = console()
    printed = result.printed.rstrip().splitlines()
    if printed:
        more = [] if len(printed) <= LINES else [f"… {len(printed) - LINES} lines more"]
        out.print(Text("your file printed", "dim"))
        out.print(under(Text(visible("\n".join([*printed[:LINES], *more])))))
    known: set[str] = set()
    for each in result.verdicts:
        verdict(each, known)
    for note in result.notes:
        out.print(Text(f"· {visible(note['at'] or path.name)} {note['said']}", "dim"))
    number = exercise.number
    if result.passed:
        out.print(Text.assemble((f"✓ {number} · {exercise.title}: passed", "bold green"), f"  {path}"), soft_wrap=True)
    elif result.state == "stopped":
        out.print(Text(f"✗ {path.name} {visible(result.said)}", "red"))
        if result.at:
            out.print(under(Text(visible(result.at))))
    elif result.state == "not written yet":
        out.print(
            f"{escape(str(path))} is not written yet: replace the lines that raise NotImplementedError.", soft_wrap=True
        )
    elif result.state == "partly":
        out.print(Text(f"Right so far; {number} · {exercise.title} is not all written yet.", "yellow"))
    else:
        out.print(Text(f"That is {path}; `cutaway learn hint {number}` helps further.", "dim"), soft_wrap=True)


def verdict(found: dict[str, Any], known: set[str]) -> None:
    """One function. A mistake that shows in several is explained once."""
    out = console()
    sign, style = SIGNS.get(found["state"], ("·", "yellow"))
    said = f" {visible(found['said'])}" if found["said"] else " is right"
    out.print(Text.assemble((f"{sign} ", style), (found["name"], "bold"), said))
    if found["at"]:
        out.print(under(Text(visible(found["at"]), "dim")))
    for name, hint in zip(found["mistakes"], found["hints"], strict=False):
        out.print(under(Text.assemble("likely mistake: ", (name, "bold"), ", as above" if name in known else "")))
        if name not in known:
            out.print(under(under(Text(hint))))
        known.add(name)
    for hint in () if found["mistakes"] else found["hints"]:
        out.print(under(Text(hint)))
