"""Exercise file format. Text, stub and solution are parsed from one Python file of cells, which is not run.

    # %% [markdown]        the task, as shown in a notebook
    # %%                   functions; the learner's part is between `# begin solution` and `# end solution`
    # %% checker           the rest is only for the checker: test cases

A TOML file of the same name has the metadata, the hints and the common mistakes.

The stub is the part of the file before `# %% checker`. In it, each solution is replaced by a line that raises
NotImplementedError, or by those lines of the solution that start with `# stub: `.
"""

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

NOT_WRITTEN = "not written yet"
"""Message of the NotImplementedError in a function that the learner has not written."""
_BEGIN, _END, _STUB, _CHECKER = "# begin solution", "# end solution", "# stub: ", "# %% checker"


@dataclass(frozen=True)
class Mistake:
    """A common mistake, which is simulated by replacing text in the source of the solution."""

    name: str
    tasks: tuple[str, ...]
    """Names of the functions in which the mistake can be made."""
    replace: dict[str, str]
    """Text in the source of the solution → text that makes the mistake."""
    hint: str


@dataclass(frozen=True)
class Exercise:
    """One exercise. Its code is parsed, not run."""

    path: Path
    text: str
    """The complete file."""

    @property
    def slug(self) -> str:
        """Name used in file names: `01-attention`."""
        return self.path.stem.removeprefix("e").replace("_", "-")

    @property
    def number(self) -> int:
        return int(self.slug[:2])

    @property
    def title(self) -> str:
        match = re.search(r"^# # \d+ · (.+)$", self.text, re.MULTILINE)
        assert match, f"{self.path} has no title"
        return match[1]

    @cached_property
    def visible_cells(self) -> str:
        """The cells before `# %% checker`, with the solutions and the markers around each solution."""
        return self.text[: self.text.index(_CHECKER)].rstrip() + "\n"

    @property
    def instructions(self) -> str:
        """Text of the exercise that the learner reads: its markdown cells."""
        parts = [cell for kind, cell in parse_cells(self.visible_cells) if kind == "markdown"]
        return "\n\n".join(parts)

    @property
    def stub(self) -> str:
        """Text of the file that the learner starts with: the cells before `# %% checker`, without the solutions."""
        lines: list[str] = []
        inside, replaced = False, False
        for line in self.visible_cells.splitlines():
            stripped = line.strip()
            indent = line[: len(line) - len(line.lstrip())]
            if stripped == _BEGIN:
                inside, replaced = True, False
            elif stripped == _END:
                lines += [] if replaced else [f'{indent}raise NotImplementedError("{NOT_WRITTEN}")']
                inside = False
            elif inside and stripped.startswith(_STUB.rstrip()):
                lines.append(indent + stripped[len(_STUB) :])
                replaced = True
            elif not inside:
                lines.append(line)
        return "\n".join(lines) + "\n"

    @property
    def solution(self) -> str:
        """The cells before `# %% checker` with the solutions, without the markers around each solution."""
        markers = (_BEGIN, _END, _STUB.rstrip())
        return "".join(line for line in self.visible_cells.splitlines(True) if not line.strip().startswith(markers))

    @property
    def required_names(self) -> list[str]:
        """Names that the learner has to define: functions, and tables such as DIAGNOSIS."""
        begin_lines = [n for n, line in enumerate(self.visible_cells.splitlines(), 1) if line.strip() == _BEGIN]
        names = []
        for node in ast.parse(self.visible_cells).body:
            target = node.targets[0] if isinstance(node, ast.Assign) and node.lineno - 1 in begin_lines else None
            lines = range(node.lineno, (node.end_lineno or 0) + 1)
            if isinstance(node, ast.FunctionDef) and any(n in lines for n in begin_lines):
                names.append(node.name)
            elif isinstance(target, ast.Name):
                names.append(target.id)
        return names

    @cached_property
    def solution_functions(self) -> str:
        """Source of all functions of the solution."""
        functions = [node for node in ast.parse(self.solution).body if isinstance(node, ast.FunctionDef)]
        return "\n\n".join(ast.get_source_segment(self.solution, function) or "" for function in functions)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Contents of the exercise's TOML file."""
        return tomllib.loads(self.path.with_suffix(".toml").read_text(encoding="utf-8"))

    @property
    def mistakes(self) -> list[Mistake]:
        return [Mistake(**table) for table in self.metadata["mistakes"]]

    @property
    def minutes(self) -> int:
        """Approximate number of minutes that the exercise takes."""
        return int(self.metadata["minutes"])

    @property
    def notebook(self) -> str:
        """Name of the notebook with the theory of the exercise, such as `02_attention`."""
        return str(self.metadata["notebook"])

    @property
    def site(self) -> str:
        """Name of the site in the forward pass that the exercise is about."""
        return str(self.metadata["site"])

    @property
    def hints(self) -> tuple[str, ...]:
        """Hints, from vague to specific."""
        return tuple(self.metadata["hints"])


def parse_cells(text: str) -> list[tuple[str, str]]:
    """Split a file into cells. Each is a pair of the kind (`markdown` or `code`) and the text."""
    cells: list[tuple[str, str]] = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body.strip("\n")))
    return cells
