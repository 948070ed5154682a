"""How tests call cutaway's verbs: the fixture `run_cli` of conftest.py is one of these."""

from typing import Protocol


class CliRunner(Protocol):
    """With these arguments, this standard input and so wide a terminal: what was written, or (code 2) the complaint."""

    def __call__(
        self, *arguments: object, code: int = 0, stdin: str | bytes | None = None, columns: int = 80
    ) -> str: ...
