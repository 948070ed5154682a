"""Terminal reports of `cutaway learn`: exercises, progress, hints, grades."""

import sys
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text

from cutaway.cli.views.terminal import borderless_table, build_console, escape_control_characters, indent
from cutaway.learn.exercises import Exercise
from cutaway.learn.runner.grader import GradeReport, TaskGrade

Row = dict[str, Any]
MAX_PRINTED_LINES = 20
"""Maximum number of lines of the learner's output that are printed."""
STATE_STYLES = {"passed": "green", "attempted": "yellow", "started": "cyan", "not started": "dim"}
VERDICT_SYMBOLS = {"correct": ("✓", "green"), "incorrect": ("✗", "red"), "error": ("✗", "red"), "missing": ("✗", "red")}


def _format_state(exercise_state: str) -> Text:
    return Text(exercise_state, STATE_STYLES[exercise_state])


def render_exercise_list(rows: list[Row]) -> None:
    table = borderless_table("rlrrll", ["", "exercise", "minutes", "notebook", "about", ""])
    for row in rows:
        status = Text() if row["status"] == "not started" else _format_state(row["status"])
        notebook = str(int(row["notebook"][:2]))
        table.add_row(str(row["number"]), row["title"], str(row["minutes"]), notebook, row["site"], status)
    out = build_console()
    out.print(table)
    next_number = next((row["number"] for row in rows if row["status"] == "not started"), None)
    if next_number is not None:
        out.print(f"[dim]Start with `cutaway learn start {next_number}`; the file has the instructions.[/dim]")


def render_progress(rows: list[Row], passed: int) -> None:
    table = borderless_table("rllrrl", ["", "exercise", "status", "attempts", "hints", "last"])
    for row in rows:
        date = (row["passed_at"] or row["last_attempt"] or "")[:10]
        hints = f"{row['num_hints']}/{row['num_available_hints']}" if row["num_hints"] else ""
        state, attempts = _format_state(row["status"]), str(row["attempts"] or "")
        table.add_row(str(row["number"]), row["title"], state, attempts, hints, Text(date))
    out = build_console()
    out.print(table)
    next_number = next((row["number"] for row in rows if row["status"] != "passed"), None)
    hint = "all done" if next_number is None else f"next: `cutaway learn start {next_number}`"
    if next_number is not None and rows[next_number - 1]["status"] != "not started":
        hint = f"next: `cutaway learn check {next_number}`"
    out.print(f"[dim]{passed} of {len(rows)} passed; {hint}[/dim]")


def render_started(exercise: Exercise, path: Path, previous_file: Path | None) -> None:
    out = build_console()
    out.print(Text.assemble((f"{exercise.number} · {exercise.title}", "bold"), f"  about {exercise.minutes} minutes"))
    if previous_file is not None:
        out.print(f"The old file is renamed to '{escape(str(previous_file))}'.", soft_wrap=True)
    instruction = "Replace each line that raises NotImplementedError, then run:"
    out.print(f"Written to '{escape(str(path))}'. {instruction}", soft_wrap=True)
    out.print(f"  cutaway learn check {exercise.number}")
    out.print(f"If you are stuck: `cutaway learn hint {exercise.number}`.")
    out.print(f"The theory is in `cutaway learn notebook {int(exercise.notebook[:2])}`.")


def render_hints(exercise: Exercise, num_hints: int, *, is_new: bool) -> None:
    out = build_console()
    count = len(exercise.hints)
    for index, hint in enumerate(exercise.hints[:num_hints], 1):
        is_latest = is_new and index == num_hints
        out.print(Text(f"hint {index} of {count}", "bold" if is_latest else "dim"))
        out.print(indent(Text(hint, "" if is_latest else "dim")))
    if not is_new:
        out.print(f"[dim]There are no more hints. `cutaway learn solution {exercise.number}` shows the solution.[/dim]")


def render_code(text: str) -> None:
    from rich.syntax import Syntax

    out = build_console()
    if out.is_terminal:
        out.print(Syntax(text, "python", background_color="default", word_wrap=True))
    else:
        sys.stdout.write(text)


def render_grade(exercise: Exercise, path: Path, result: GradeReport) -> None:
    """Print the grade of each function, the notes about the learner's file at `path`, and what to do next."""
    out = build_console()
    output_lines = result.output.rstrip().splitlines()
    if output_lines:
        num_omitted = len(output_lines) - MAX_PRINTED_LINES
        shown = output_lines[:MAX_PRINTED_LINES] + ([f"… {num_omitted} more lines"] if num_omitted > 0 else [])
        out.print(Text("output of your file", "dim"))
        out.print(indent(Text(escape_control_characters("\n".join(shown)))))
    explained: set[str] = set()
    for task in result.tasks:
        _render_verdict(task, explained)
    for note in result.notes:
        location = escape_control_characters(note["location"] or path.name)
        out.print(Text(f"· outside the graded functions, {location} {note['message']}", "dim"))
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
        out.print(Text(f"Correct so far; {number} · {exercise.title} is not complete yet.", "yellow"))
    else:
        out.print(Text(f"Checked {path}; `cutaway learn hint {number}` shows a hint.", "dim"), soft_wrap=True)


def _render_verdict(result: TaskGrade, explained: set[str]) -> None:
    """Print the grade of one function. Mistakes in `explained` were found before and are not explained again."""
    out = build_console()
    symbol, style = VERDICT_SYMBOLS.get(result.status, ("·", "yellow"))
    message = f" {escape_control_characters(result.message)}" if result.message else " is correct"
    out.print(Text.assemble((f"{symbol} ", style), (result.name, "bold"), message))
    if result.location:
        out.print(indent(Text(escape_control_characters(result.location), "dim")))
    for name, hint in zip(result.mistakes, result.hints, strict=False):
        out.print(indent(Text.assemble("likely mistake: ", (name, "bold"), ", as above" if name in explained else "")))
        if name not in explained:
            out.print(indent(indent(Text(hint))))
        explained.add(name)
    for hint in result.hints[len(result.mistakes) :]:
        out.print(indent(Text(hint)))
