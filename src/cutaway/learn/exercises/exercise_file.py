"""An exercise is one Python file of cells: its text, its stub and its solution are read from it without running it.

    # %% [markdown]        the task, as a notebook shows it
    # %%                   functions; what the learner writes stands between `# begin solution` and `# end solution`
    # %% checker           from here on what only the checker reads: metadata, cases, mistakes

The stub is the file up to the last marker with each solution replaced by a line that raises, or by the lines that stand
in it behind `# stub: `.
"""

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

NOT_WRITTEN = "not written yet"
"""What a function says that the learner has not written."""
SOLUTION_BEGIN, SOLUTION_END, STUB_LINE, CHECKER_CELL = "# begin solution", "# end solution", "# stub: ", "# %% checker"
METADATA_NAMES = ("MINUTES", "NOTEBOOK", "SITE", "HINTS")


@dataclass(frozen=True)
class Exercise:
    """One exercise. Nothing of it is run by being read."""

    path: Path
    text: str
    """The whole file."""

    @property
    def slug(self) -> str:
        """Its name in file names: `01-attention`."""
        return self.path.stem.removeprefix("e").replace("_", "-")

    @property
    def number(self) -> int:
        return int(self.slug[:2])

    @property
    def title(self) -> str:
        found = re.search(r"^# # \d+ · (.+)$", self.text, re.MULTILINE)
        assert found, f"{self.path} has no title"
        return found[1]

    @cached_property
    def visible_cells(self) -> str:
        """What a learner may see, solutions and their marks among it."""
        return self.text[: self.text.index(CHECKER_CELL)].rstrip() + "\n"

    @property
    def instructions(self) -> str:
        """The words of the exercise, as markdown."""
        parts = [cell for kind, cell in parse_cells(self.visible_cells) if kind == "markdown"]
        return "\n\n".join(parts)

    @property
    def stub(self) -> str:
        """What the learner begins with."""
        lines: list[str] = []
        inside, replaced = False, False
        for line in self.visible_cells.splitlines():
            bare = line.strip()
            margin = line[: len(line) - len(line.lstrip())]
            if bare == SOLUTION_BEGIN:
                inside, replaced = True, False
            elif bare == SOLUTION_END:
                lines += [] if replaced else [f'{margin}raise NotImplementedError("{NOT_WRITTEN}")']
                inside = False
            elif inside and bare.startswith(STUB_LINE.rstrip()):
                lines.append(margin + bare[len(STUB_LINE) :])
                replaced = True
            elif not inside:
                lines.append(line)
        return "\n".join(lines) + "\n"

    @property
    def solution(self) -> str:
        """The same cells, written out."""
        marks = (SOLUTION_BEGIN, SOLUTION_END, STUB_LINE.rstrip())
        return "".join(line for line in self.visible_cells.splitlines(True) if not line.strip().startswith(marks))

    @property
    def required_names(self) -> list[str]:
        """What the learner has to write: functions, and tables such as DIAGNOSIS."""
        begins = [n for n, line in enumerate(self.visible_cells.splitlines(), 1) if line.strip() == SOLUTION_BEGIN]
        names = []
        for node in ast.parse(self.visible_cells).body:
            if isinstance(node, ast.FunctionDef) and any(node.lineno <= n <= (node.end_lineno or 0) for n in begins):
                names.append(node.name)
            elif isinstance(node, ast.Assign) and node.lineno - 1 in begins and isinstance(node.targets[0], ast.Name):
                names.append(node.targets[0].id)
        return names

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The constants behind the marker that are written out as they are."""
        found = {}
        for node in ast.parse(self.text).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name in METADATA_NAMES:
                    found[name] = ast.literal_eval(node.value)
        return found

    @property
    def minutes(self) -> int:
        """About how long it takes."""
        return int(self.metadata["MINUTES"])

    @property
    def notebook(self) -> str:
        """The theory notebook that it belongs to."""
        return str(self.metadata["NOTEBOOK"])

    @property
    def site(self) -> str:
        """The place in the forward pass that it is about, by its site name."""
        return str(self.metadata["SITE"])

    @property
    def hints(self) -> tuple[str, ...]:
        """From the vaguest to the nearest."""
        return tuple(self.metadata["HINTS"])


def parse_cells(text: str) -> list[tuple[str, str]]:
    """The cells of a file: (`markdown` or `code`, its text)."""
    cells: list[tuple[str, str]] = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body.strip("\n")))
    return cells
