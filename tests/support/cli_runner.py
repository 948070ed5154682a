"""Type of the `run_cli` fixture of conftest.py, which runs cutaway verbs."""

from typing import Protocol


class CliRunner(Protocol):
    """Runs a verb and checks the exit code; returns standard output, or the error message for code 2."""

    def __call__(
        self, *arguments: object, code: int = 0, stdin: str | bytes | None = None, columns: int | str = 80
    ) -> str: ...
