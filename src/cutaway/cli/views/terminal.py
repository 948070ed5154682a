"""Terminal helpers: escaping of control characters, tables, headings, progress bars."""

import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cutaway.size.units import format_si

MAX_LINE_WIDTH = 1_000_000
"""Console width that disables wrapping."""
MIN_WIDTH, MAX_WIDTH = 76, 100
SAFE_CHARACTERS = {"\n", "\t", "\u200c", "\u200d"}
"""Control characters that are not escaped: line ends, tabs, and the joiners that some scripts and emoji need."""
CONTROL_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that are escaped. They contain escape codes, bidirectional overrides, tags and surrogates."""


def escape_control_characters(text: str) -> str:
    """Escape control characters, such as \\x1b, so that a model's output cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(
        character
        if character in SAFE_CHARACTERS or unicodedata.category(character) not in CONTROL_CATEGORIES
        else repr(character)[1:-1]
        for character in text
    )


class TerminalWriter:
    """Output stream that escapes control characters on a terminal, and writes them unchanged to a file or pipe."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.is_terminal = out.isatty()
        self.has_color = self.is_terminal and Console(file=out).color_system is not None
        self.is_line_open = False

    def write(self, text: str, style: str = "{}") -> None:
        if text:
            self.out.write(style.format(escape_control_characters(text) if self.is_terminal else text))
            self.out.flush()
            self.is_line_open = not text.endswith("\n")

    def write_dim(self, text: str) -> None:
        """Write text in dim color. It is used for text that is not model output."""
        self.write(text, "\x1b[2m{}\x1b[22m" if self.has_color else "{}")

    def end_line(self) -> None:
        if self.is_line_open:
            self.write("\n")


def print_without_wrapping(table: Table) -> None:
    """Print each row on one line. By default, rich would truncate columns to fit the terminal's width."""
    console = build_console()
    console.width = MAX_LINE_WIDTH
    console.print(indent(table), soft_wrap=True)


@contextmanager
def progress_bar(description: str, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Context manager: show a progress bar on a terminal after two seconds. Yield its update function.

    The update function has the arguments (completed, total), and optionally a new description.
    """
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), "{task.completed}/{task.total}", TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
    start_time = time.monotonic()
    task = progress.add_task(description, total=None, visible=False)

    def update(done: int, total: int, description: str = description) -> None:
        is_visible = time.monotonic() - start_time > 2
        progress.update(task, completed=done, total=total, description=description, visible=is_visible)

    with progress:
        yield update


def spinner(text: str, *, quiet: bool = False) -> AbstractContextManager[object]:
    """Context manager: show a spinner on a terminal, unless `quiet`."""
    console = Console(stderr=True)
    return console.status(text) if console.is_terminal and not quiet else nullcontext()


def format_number(value: float) -> str:
    """Format a number: below 100 with three digits, below 1e6 as an integer, else with SI prefix ("<0.01" if tiny)."""
    if value >= 1e6:
        return format_si(value, digits=3)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else "<0.01"


def build_console() -> Console:
    console = Console(highlight=False)
    # Below MIN_WIDTH, lines are wrapped by the terminal, which is better than truncated tables.
    console.width = max(MIN_WIDTH, min(console.width, MAX_WIDTH))
    return console


def borderless_table(alignments: str, headers: Sequence[str] = (), *, gap: int = 2, title: str | None = None) -> Table:
    """Build a table without borders.

    `alignments` has one letter per column: l (left) or r (right). Columns with capital letters wrap long texts.
    """
    table = Table(box=None, pad_edge=False, show_header=bool(headers), header_style="dim", padding=(0, gap, 0, 0))
    table.title, table.title_justify = title, "left"
    for letter, name in zip(alignments, headers or alignments, strict=True):
        justify: JustifyMethod = "right" if letter in "rR" else "left"
        overflow: OverflowMethod = "fold" if letter.isupper() else "ellipsis"
        table.add_column(Text(name), justify=justify, overflow=overflow, no_wrap=letter.islower())
    return table


def format_heading(name: str, *rest: str) -> Text:
    return Text.assemble((name, "bold"), *(f"  {text}" for text in rest if text))


def indent(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2), expand=False)


def wrap_text(text: str, width: int, indent: int = 0, hanging: int = 0) -> str:
    """Wrap a text to lines of at most `width` columns, indented by `indent`, and after the first by `hanging` more."""
    from textwrap import fill

    first, rest = " " * indent, " " * (indent + hanging)
    return fill(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def wrap_items(items: Iterable[Text], width: int, gap: str = "   ") -> Text:
    """Join items to lines of at most `width` columns. Lines are broken only between items."""
    lines = [Text()]
    for item in items:
        if lines[-1] and lines[-1].cell_len + len(gap) + item.cell_len > width:
            lines.append(Text())
        elif lines[-1]:
            lines[-1].append(gap)
        lines[-1].append(item)
    return Text("\n").join(lines)
