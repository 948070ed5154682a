"""Text of a model on a terminal: shown as it comes, and never able to command the terminal."""

import unicodedata
from typing import TextIO

SAFE = {"\n", "\t", "\u200c", "\u200d"}
"""Signs without a shape that text needs: line ends, and the joiners of scripts and emoji."""
HOSTILE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's categories of signs that command instead of showing something: escapes, turns of direction, tags."""


def visible(text: str) -> str:
    """The same with each sign that could command a terminal written out, as in \\x1b."""
    if text.isprintable():
        return text
    return "".join(
        sign if sign in SAFE or unicodedata.category(sign) not in HOSTILE else repr(sign)[1:-1] for sign in text
    )


class Screen:
    """One output. A terminal is shown only what is harmless; a file or a pipe gets what the model said, bit for bit."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        self.out = out
        self.is_terminal = out.isatty()
        self.styled = self.is_terminal and Console(file=out).color_system is not None
        self.line_begun = False

    def write(self, text: str) -> None:
        if text:
            self.out.write(visible(text) if self.is_terminal else text)
            self.out.flush()
            self.line_begun = not text.endswith("\n")

    def dim(self, text: str) -> None:
        """What is not the answer."""
        if not self.styled:
            self.write(text)
            return
        self.out.write(f"\x1b[2m{visible(text)}\x1b[22m")
        self.out.flush()
        self.line_begun = not text.endswith("\n")

    def end_line(self) -> None:
        if self.line_begun:
            self.write("\n")
