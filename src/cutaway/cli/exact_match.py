"""Exact match of a model's answers to the records of data files, for `cutaway eval --data`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.cli.json_output import print_json
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.evaluate.exact_match import ExactMatchResult, Example
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.train.data.documents import SkippedDocuments

NUM_SHOWN = 3
"""Number of wrong answers in the table."""


def evaluate_answers(
    checkpoint: "Checkpoint",
    source: str,
    paths: Sequence[Path],
    max_new_tokens: int | None,
    batch_size: int | None,
    *,
    as_json: bool,
) -> None:
    """Generate answers to the records of the files, compare them with the references, and print the result."""
    from cutaway.train.data.documents import SkippedDocuments

    skipped = SkippedDocuments()
    examples = _read_examples(paths, skipped)
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.evaluate.exact_match import DEFAULT_MAX_NEW_TOKENS, evaluate_exact_match

    with progress_bar("answering", quiet=as_json) as progress:
        result = evaluate_exact_match(
            checkpoint,
            examples,
            max_new_tokens=max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            batch_size=batch_size,
            progress=progress,
        )
    if as_json:
        print_json({"source": source} | result.to_dict() | {"skipped_records": skipped.counts})
    else:
        _render(result, skipped)


def _read_examples(paths: Sequence[Path], skipped: "SkippedDocuments") -> "list[Example]":
    from cutaway.evaluate.exact_match import parse_example
    from cutaway.train.data.records import read_records
    from cutaway.train.recipe.schema import SourceConfig

    examples, has_pairs = [], False
    for path in paths:
        for record in read_records(SourceConfig(path=str(path)), skipped):
            example = parse_example(record.fields)
            has_pairs |= {"chosen", "rejected"} <= record.fields.keys()
            if isinstance(example, str):
                skipped.add(example, f"{record.location} has {', '.join(record.fields) or 'no keys'}")
            else:
                examples.append(example)
    if not examples:
        reason = str(skipped) or "it is empty"
        advice = "; pairs of answers evaluate a reward model (cutaway train reward)" if has_pairs else ""
        raise InputError(
            f"'{paths[0]}' has no records with answers: {reason}; a record has question and answer, prompt and"
            f" completion, or messages{advice}"
        )
    return examples


def _render(result: "ExactMatchResult", skipped: "SkippedDocuments") -> None:
    """Print both fractions with their intervals, and some answers that do not match exactly."""
    from rich.text import Text

    from cutaway.cli.views.terminal import borderless_table, escape_control_characters, print_without_wrapping
    from cutaway.evaluate.confidence_interval import proportion_confidence_interval

    count = len(result.answers)
    table = borderless_table("lrl")
    rows = (
        ("exact match", result.num_exact_matches, "equal a reference"),
        ("contains", result.num_contains, "contain a reference"),
    )
    for name, number, meaning in rows:
        low, high = proportion_confidence_interval(number, count)
        note = f"{number:,} of {count:,} answers {meaning}, 95 % interval {low:.1%} to {high:.1%}"
        table.add_row(name, Text(f"{number / count:.1%}", "bold"), note)
    print_without_wrapping(table)
    wrong = [answer for answer in result.answers if not answer.is_exact]
    for answer in wrong[:NUM_SHOWN]:
        prompt = (
            answer.example.prompt if isinstance(answer.example.prompt, str) else answer.example.prompt[-1]["content"]
        )
        shown = [" ".join(str(text).split())[:60] for text in (prompt, answer.output, answer.example.references[0])]
        line = f"  {shown[0]} → {shown[1] or '(nothing)'} (reference: {shown[2]})"
        sys.stdout.write(escape_control_characters(line) + "\n")
    if skipped.total:
        sys.stderr.write(f"skipped: {escape_control_characters(str(skipped))}\n")
