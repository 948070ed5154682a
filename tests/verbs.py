"""How tests call cutaway's verbs: the fixture `verb` of conftest.py is one of these."""

from typing import Protocol


class Run(Protocol):
    """With these arguments, this standard input and so wide a terminal: what was written, or (code 2) the complaint."""

    def __call__(
        self, *arguments: object, code: int = 0, typed: str | bytes | None = None, columns: int = 80
    ) -> str: ...
