"""Terminal view of `cutaway learn study`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from rich.text import Text

from cutaway.cli.views.terminal import borderless_table, build_console, print_without_wrapping, progress_bar
from cutaway.errors import InputError
from cutaway.learn.claims import load_claims
from cutaway.learn.studies import Study, StudyResults, get_study, load_results
from cutaway.learn.studies.study import ProgressFn, load_measures


@contextmanager
def study_progress() -> Iterator[ProgressFn]:
    """Show a progress bar on a terminal, else one line on stderr per measurement: a study can take an hour."""

    def print_line(done: int, total: int, description: str) -> None:
        print(f"{done + 1}/{total} {description}", file=sys.stderr, flush=True)  # noqa: T201

    with progress_bar("measuring", quiet=False) as update:
        yield update if sys.stderr.isatty() else print_line


def summarize(study: Study) -> dict[str, Any]:
    """Return the name, the title, the number of stored results and the seconds that they took."""
    row: dict[str, Any] = {"name": study.name, "title": study.title, "results": 0, "seconds": None}
    if study.results_file.exists():
        results = load_results(study.name)
        row |= {"results": len(results.estimates), "seconds": results.seconds}
    return row


def render_studies(rows: list[dict[str, Any]]) -> None:
    table = borderless_table("lLrr", ["study", "about", "results", "minutes"])
    for row in rows:
        minutes = "" if row["seconds"] is None else f"{row['seconds'] / 60:.1f}"
        table.add_row(row["name"], row["title"], str(row["results"] or "none"), minutes)
    out = build_console()
    out.print(table)
    out.print("[dim]Show one with `cutaway learn study NAME`; repeat its measurements with --run.[/dim]")


def select_results(results: StudyResults, text: str) -> StudyResults:
    """Return the result with this key, else the results whose key contains all words, in upper or lower case."""
    words = text.casefold().split()
    selected = {key: value for key, value in results.estimates.items() if all(word in key.casefold() for word in words)}
    if text in results.estimates:
        selected = {text: results.estimates[text]}
    if not selected:
        names = ", ".join(measure.name for measure in load_measures(results.name))
        raise InputError(f"no result of study '{results.name}' contains '{text}'; its measures are {names}")
    return replace(results, estimates=selected)


def results_to_dict(results: StudyResults) -> dict[str, Any]:
    data = {name: getattr(results, name) for name in ("name", "command", "settings", "environment", "seconds")}
    measures = [asdict(measure) for measure in load_measures(results.name)]
    return data | {"measures": measures, "estimates": {key: asdict(v) for key, v in results.estimates.items()}}


def render_measures(results: StudyResults) -> None:
    """Print what the study measures, the parts of the keys, and how to show results."""
    table = borderless_table("lLr", ["measure", "about", "results"])
    for measure in load_measures(results.name):
        keys = [key for key in results.estimates if measure.includes(key)]
        about = Text.assemble(measure.about, " · ", (f"{measure.name}/{measure.key}", "dim"))
        table.add_row(measure.name, about, str(len(keys)))
    out = build_console()
    out.print(table)
    first = next(iter(results.estimates))
    out.print(Text(f"Show results with `cutaway learn study {results.name} --search {first}`, or --all.", "dim"))
    out.print(_describe_run(results))


def render_results(results: StudyResults) -> None:
    table = borderless_table("lrlr", ["result", "mean", "95 % interval", "n"])
    for key, value in results.estimates.items():
        mean, _, interval = str(value).partition(" ")
        table.add_row(key, mean, interval.strip("()"), str(value.count))
    print_without_wrapping(table)
    build_console().print(_describe_run(results))


def _describe_run(results: StudyResults) -> Text:
    """Title and settings, one per line, then the claims of the study, the machine, the time and the command."""
    lines = [f"{get_study(results.name).title}; n: number of seeds, texts or rounds"]
    lines += [f"{name}: {_format_setting(value)}" for name, value in results.settings.items()]
    claims = [row.id for row in load_claims() if f"study: {results.name}" in row.evidence]
    if claims:
        lines.append(f"claims: {', '.join(claims)} (`cutaway learn claims {claims[0]}`)")
    lines.append(f"{results.environment}, {results.seconds / 60:.1f} minutes: {results.command}")
    return Text("\n".join(lines), "dim")


def _format_setting(value: Any) -> str:
    return "; ".join(f"{name} {part}" for name, part in value.items()) if isinstance(value, dict) else str(value)
