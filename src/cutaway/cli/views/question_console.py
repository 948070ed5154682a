"""Terminal input and output of questions: wrapped text and typed lines."""

import sys

from rich.console import Console
from rich.text import Text

from cutaway.cli.views.terminal import wrap_text


class QuestionConsole:
    """Prints text, at most 100 columns wide, and reads lines."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.width = min(self.console.width, 100)
        self.prompt = "> "

    def print_text(self, text: str, style: str = "", indent: int = 0, hanging: int = 0) -> None:
        """Print a wrapped text. Lines after the first are indented by `hanging` more columns."""
        self.console.print(Text(wrap_text(text, self.width, indent, hanging), style), soft_wrap=True)

    def print_note(self, text: str) -> None:
        if text:
            self.print_text(text, "yellow")

    def print_blank_line(self) -> None:
        self.console.print()

    def read_answer(self, max_bytes: int) -> str | None:
        """Read a line, or return None at the end of input. The line is truncated to `max_bytes`."""
        self.console.print(Text(self.prompt, "dim"), end="")
        sys.stdout.flush()
        line = rest = b"" if sys.stdin is None else sys.stdin.buffer.readline(max_bytes)
        while len(rest) == max_bytes and not rest.endswith(b"\n"):
            rest = sys.stdin.buffer.readline(max_bytes)
        answer = line.decode("utf-8", "replace").rstrip("\r\n")
        if not line or not sys.stdin.isatty():  # echo the answer, as a terminal does
            self.console.print(Text(answer if answer.isprintable() else repr(answer)))
        return answer if line else None

    def print_references(
        self, notebooks: tuple[int, ...], docs_page: str | None, exercise: int | None = None, indent: int = 4
    ) -> None:
        """Print the commands that show the notebooks and the exercise of a question, and its documentation page."""
        parts = [f"`cutaway learn notebook {number}`" for number in notebooks]
        parts += [] if exercise is None else [f"`cutaway learn start {exercise}`"]
        parts += [] if docs_page is None else [f"docs/{docs_page}"]
        self.print_text(f"see {', '.join(parts)}", "dim", indent=indent)
