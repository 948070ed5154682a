"""What `cutaway learn` shows in a terminal."""

import sys
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text

from cutaway.cli.views.terminal import borderless_table, build_console, escape_control_characters, indent
from cutaway.learn.exercises import Exercise
from cutaway.learn.runner.launcher import GradeReport

MAX_PRINTED_LINES = 20
"""Of what a learner prints, as many are shown."""
STATE_STYLES = {"passed": "green", "attempted": "yellow", "started": "cyan", "not started": "dim"}
VERDICT_SYMBOLS = {"correct": ("✓", "green"), "incorrect": ("✗", "red"), "error": ("✗", "red"), "missing": ("✗", "red")}


def _format_state(exercise_state: str) -> Text:
    return Text(exercise_state, STATE_STYLES[exercise_state])


def render_exercise_list(rows: list[dict[str, Any]]) -> None:
    table = borderless_table("rlrrll", ["", "exercise", "minutes", "notebook", "about", ""])
    for each in rows:
        done = Text() if each["status"] == "not started" else _format_state(each["status"])
        notebook = str(int(each["notebook"][:2]))
        table.add_row(str(each["number"]), each["title"], str(each["minutes"]), notebook, each["site"], done)
    out = build_console()
    out.print(table)
    out.print("[dim]Begin with `cutaway learn start 1`; the file says what to do.[/dim]")


def render_progress(rows: list[dict[str, Any]], passed: int) -> None:
    table = borderless_table("rllrrl", ["", "exercise", "state", "tries", "hints", "last"])
    for each in rows:
        when = (each["passed_at"] or each["last_attempt"] or "")[:10]
        hints = f"{each['num_hints']}/{each['num_available_hints']}" if each["num_hints"] else ""
        table.add_row(
            str(each["number"]),
            each["title"],
            _format_state(each["status"]),
            str(each["attempts"] or ""),
            hints,
            Text(when),
        )
    out = build_console()
    out.print(table)
    left = next((each["number"] for each in rows if each["status"] != "passed"), None)
    more = "all of them" if left is None else f"next: `cutaway learn start {left}`"
    if left is not None and rows[left - 1]["status"] != "not started":
        more = f"next: `cutaway learn check {left}`"
    out.print(f"[dim]{passed} of {len(rows)} passed; {more}[/dim]")


def render_started(exercise: Exercise, path: Path, previous_file: Path | None) -> None:
    out = build_console()
    out.print(Text.assemble((f"{exercise.number} · {exercise.title}", "bold"), f"  about {exercise.minutes} minutes"))
    if previous_file is not None:
        out.print(f"Your old file is now '{escape(str(previous_file))}'.", soft_wrap=True)
    out.print(
        f"Written to '{escape(str(path))}'. Replace each line that raises NotImplementedError, then ask:",
        soft_wrap=True,
    )
    out.print(f"  cutaway learn check {exercise.number}")
    out.print(f"  cutaway learn hint {exercise.number}")


def render_hints(exercise: Exercise, num_hints: int, *, is_new: bool) -> None:
    out = build_console()
    count = len(exercise.hints)
    for n, text in enumerate(exercise.hints[:num_hints], 1):
        fresh = is_new and n == num_hints
        out.print(Text(f"hint {n} of {count}", "bold" if fresh else "dim"))
        out.print(indent(Text(text, "" if fresh else "dim")))
    if not is_new:
        out.print(f"[dim]These are all. `cutaway learn solution {exercise.number}` shows the solution.[/dim]")


def render_code(text: str) -> None:
    from rich.syntax import Syntax

    out = build_console()
    if out.is_terminal:
        out.print(Syntax(text, "python", background_color="default", word_wrap=True))
    else:
        sys.stdout.write(text)


def render_grade(exercise: Exercise, path: Path, result: GradeReport) -> None:
    """The verdict, what is behind it, and what to do next."""
    out = build_console()
    printed = result.output.rstrip().splitlines()
    if printed:
        more = [] if len(printed) <= MAX_PRINTED_LINES else [f"… {len(printed) - MAX_PRINTED_LINES} lines more"]
        out.print(Text("your file printed", "dim"))
        out.print(indent(Text(escape_control_characters("\n".join([*printed[:MAX_PRINTED_LINES], *more])))))
    known: set[str] = set()
    for each in result.tasks:
        _render_verdict(each, known)
    for note in result.notes:
        out.print(Text(f"· {escape_control_characters(note['location'] or path.name)} {note['message']}", "dim"))
    number = exercise.number
    if result.passed:
        out.print(Text.assemble((f"✓ {number} · {exercise.title}: passed", "bold green"), f"  {path}"), soft_wrap=True)
    elif result.status == "error":
        out.print(Text(f"✗ {path.name} {escape_control_characters(result.message)}", "red"))
        if result.location:
            out.print(indent(Text(escape_control_characters(result.location))))
    elif result.status == "not_written":
        out.print(
            f"{escape(str(path))} is not written yet: replace the lines that raise NotImplementedError.", soft_wrap=True
        )
    elif result.status == "partial":
        out.print(Text(f"Right so far; {number} · {exercise.title} is not all written yet.", "yellow"))
    else:
        out.print(Text(f"That is {path}; `cutaway learn hint {number}` helps further.", "dim"), soft_wrap=True)


def _render_verdict(result: dict[str, Any], explained: set[str]) -> None:
    """One function. A mistake that shows in several is explained once."""
    out = build_console()
    sign, style = VERDICT_SYMBOLS.get(result["status"], ("·", "yellow"))
    said = f" {escape_control_characters(result['message'])}" if result["message"] else " is right"
    out.print(Text.assemble((f"{sign} ", style), (result["name"], "bold"), said))
    if result["location"]:
        out.print(indent(Text(escape_control_characters(result["location"]), "dim")))
    for name, hint in zip(result["mistakes"], result["hints"], strict=False):
        out.print(indent(Text.assemble("likely mistake: ", (name, "bold"), ", as above" if name in explained else "")))
        if name not in explained:
            out.print(indent(indent(Text(hint))))
        explained.add(name)
    for hint in () if result["mistakes"] else result["hints"]:
        out.print(indent(Text(hint)))
