"""The terminal: text of a model, which can never command it; tables, headings and progress bars; JSON without NaN."""

import math
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cutaway.size.units import format_si

MAX_LINE_WIDTH = 1_000_000
"""Letters of a line; no text that an encoder reads has as many."""
MIN_WIDTH, MAX_WIDTH = 76, 100
SAFE_CHARACTERS = {"\n", "\t", "\u200c", "\u200d"}
"""Signs without a shape that text needs: line ends, and the joiners of scripts and emoji."""
CONTROL_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's categories of signs that command instead of showing something: escapes, turns of direction, tags."""


def escape_control_characters(text: str) -> str:
    """The same with each sign that could command a terminal written out, as in \\x1b."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign in SAFE_CHARACTERS or unicodedata.category(sign) not in CONTROL_CATEGORIES else repr(sign)[1:-1]
        for sign in text
    )


class TerminalWriter:
    """One output. A terminal is shown only what is harmless; a file or a pipe gets what the model said, bit for bit."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.is_terminal = out.isatty()
        self.has_color = self.is_terminal and Console(file=out).color_system is not None
        self.is_line_open = False

    def write(self, text: str) -> None:
        if text:
            self.out.write(escape_control_characters(text) if self.is_terminal else text)
            self.out.flush()
            self.is_line_open = not text.endswith("\n")

    def write_dim(self, text: str) -> None:
        """What is not the answer."""
        if not self.has_color:
            self.write(text)
            return
        self.out.write(f"\x1b[2m{escape_control_characters(text)}\x1b[22m")
        self.out.flush()
        self.is_line_open = not text.endswith("\n")

    def end_line(self) -> None:
        if self.is_line_open:
            self.write("\n")


def print_without_wrapping(table: Table) -> None:
    """Each row on one line, which the terminal breaks if it must: cut to its width, the first columns would go."""
    whole = build_console()
    whole.width = MAX_LINE_WIDTH
    whole.print(indent(table), soft_wrap=True)


def json_safe(value: Any) -> Any:
    """JSON has no word for NaN and infinity: they are told as text."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


@contextmanager
def progress_bar(description: str, *, quiet: bool) -> Iterator[Any]:
    """A progress bar on the terminal, for work that takes more than two seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(description), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    shown = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
    began = time.monotonic()
    task = shown.add_task(description, total=None, visible=False)
    with shown:
        yield lambda done, total: shown.update(task, completed=done, total=total, visible=time.monotonic() - began > 2)


def format_number(value: float) -> str:
    """As people read it: three digits at least, no decimals that mean nothing."""
    if value >= 1e6:
        return format_si(value, digits=3)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else "<0.01"


def build_console() -> Console:
    found = Console(highlight=False)
    found.width = max(MIN_WIDTH, min(found.width, MAX_WIDTH))  # rather wrapped by the terminal than cut short
    return found


def borderless_table(alignments: str, headers: Sequence[str] = (), *, gap: int = 2) -> Table:
    """A table without lines; `alignments` says of each column whether it leans left (l) or right (r)."""
    table = Table(box=None, pad_edge=False, show_header=bool(headers), header_style="dim", padding=(0, gap, 0, 0))
    for side, name in zip(alignments, headers or alignments, strict=True):
        table.add_column(Text(name), justify="right" if side == "r" else "left", no_wrap=True)
    return table


def format_heading(name: str, *rest: str) -> Text:
    return Text.assemble((name, "bold"), *(f"  {each}" for each in rest if each))


def indent(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2), expand=False)


def wrap_items(items: Iterable[Text], width: int) -> Text:
    """Items one after another, broken between them and never inside."""
    lines = [Text()]
    for item in items:
        if lines[-1] and lines[-1].cell_len + 3 + item.cell_len > width:
            lines.append(Text())
        elif lines[-1]:
            lines[-1].append("   ")
        lines[-1].append(item)
    return Text("\n").join(lines)
