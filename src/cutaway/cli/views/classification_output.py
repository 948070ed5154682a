"""Output of `cutaway generate` for models with a task head: labels with their probabilities, or entities."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from cutaway.cli.json_output import print_json
from cutaway.cli.prompts import PromptInput
from cutaway.cli.views.generation_output import OutputWriter
from cutaway.cli.views.terminal import borderless_table, escape_control_characters, print_without_wrapping
from cutaway.errors import InputError
from cutaway.generate.classify import Classification, TaggedSpan, classify

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint

MAX_LABELS_SHOWN = 5
OTHER_TASKS = {
    "multiple-choice": "chooses between answers; use `cutaway eval SOURCE --data FILE`, or ct.classify",
    "embedding": "computes embeddings; use `cutaway serve SOURCE` and /v1/embeddings, or ct.embed",
    "none": "has no head; use `cutaway serve SOURCE` and /v1/embeddings for embeddings, or train a head with `cutaway"
    " train classify --base SOURCE --data FILE`",
}
"""Kinds of heads that compute neither text nor labels, and what to use instead."""


def print_labels(
    checkpoint: "Checkpoint", inputs: Sequence[PromptInput], unsupported_options: Sequence[str], output: OutputWriter
) -> None:
    """Print the labels of the texts, or their entities."""
    kind = checkpoint.config.head.kind
    if kind in OTHER_TASKS:
        raise InputError(f"this model generates no text: it {OTHER_TASKS[kind]}")
    if unsupported_options:
        option = f"--{unsupported_options[0].replace('_', '-')}".replace("compile-model", "compile")
        raise InputError(f"this model classifies texts, so {option} does not apply; leave it out")
    texts = [prompt for prompt in inputs if isinstance(prompt, str)]
    if len(texts) < len(inputs) or not texts:
        raise InputError("this model classifies texts; pass texts instead of token ids")
    results: Sequence[Classification | list[TaggedSpan]] = classify(checkpoint, texts)
    for text, result in zip(texts, results, strict=True):
        if output.as_json:
            print_json({"text": text} | _to_dict(result), indent=None)
            continue
        if output.echo or len(texts) > 1:
            output.stdout.write_dim(f"{text}\n")
        _render(result)
        if not result:
            output.write_note("no entities found")


def _to_dict(result: Classification | list[TaggedSpan]) -> dict[str, object]:
    if isinstance(result, list):
        return {"entities": [asdict(span) for span in result]}
    if result.problem_type == "regression":
        return {"values": list(result.probabilities.values())}
    return {"labels": list(result.labels), "probabilities": result.probabilities}


def _render(result: Classification | list[TaggedSpan]) -> None:
    table = borderless_table("rl")
    if isinstance(result, list):
        for span in result:
            text, label = map(escape_control_characters, (span.text, span.label))
            table.add_row(f"{span.score:.1%}", Text.assemble((label, "bold"), f"  {text}"))
    elif result.problem_type == "regression":
        for value in result.probabilities.values():
            table.add_row("", Text(f"{value:.4g}", "bold"))
    else:
        best = sorted(result.probabilities.items(), key=lambda item: -item[1])[:MAX_LABELS_SHOWN]
        for label, probability in best:
            style = "bold" if label in result.labels else ""
            table.add_row(f"{probability:.1%}", Text(escape_control_characters(label), style))
    if table.rows:
        print_without_wrapping(table)
