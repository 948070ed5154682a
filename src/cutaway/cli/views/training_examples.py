"""Examples of training records, with their target tokens marked."""

from typing import Any

from rich.console import Console
from rich.text import Text

from cutaway.cli.views.terminal import escape_control_characters

MAX_SEGMENT_CHARS = 600
"""Number of characters above which a segment is shortened in the middle."""
TARGET_STYLE = "bold green"
BRACKETS = ("⟦", "⟧")
"""Characters around targets, which also mark them where there are no colors."""


def print_examples(console: Console, row: dict[str, Any]) -> None:
    """Print the examples of a row of `Callback.on_data`. Targets are green and in brackets.

    An example has one text, 'segments', or several texts by name, e.g. 'chosen' and 'rejected'.
    """
    examples = row.get("examples", [])
    for number, example in enumerate(examples, 1):
        for name, segments in example.items():
            title = "" if name == "segments" else f", {name}"
            has_targets = any(segment["target"] for segment in segments)
            note = f"; targets are in {BRACKETS[0]} {BRACKETS[1]}" if has_targets else ""
            console.print(
                f"example {number} of {len(examples)}{title}{note}:",
                style="bold",
                highlight=False,
            )
            text = Text()
            for segment in segments:
                content = escape_control_characters(_shorten(segment["text"]))
                if segment["target"]:
                    text.append(f"{BRACKETS[0]}{content}{BRACKETS[1]}", style=TARGET_STYLE)
                else:
                    text.append(content)
            console.print(text, highlight=False, soft_wrap=not console.is_terminal)


def _shorten(text: str) -> str:
    half = MAX_SEGMENT_CHARS // 2
    return text if len(text) <= MAX_SEGMENT_CHARS else f"{text[:half]} … {text[-half:]}"
