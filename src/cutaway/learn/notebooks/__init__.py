"""The theory notebooks: Python files of cells in percent format. This module does not import torch.

A wheel contains them in this directory. An editable install reads them from the directory `notebooks` of the
repository.
"""

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from cutaway.errors import InputError
from cutaway.learn.exercises.exercise_file import parse_cells

__all__ = ["Notebook", "find_directory", "get_notebook", "load_notebooks"]

_FILE_PATTERN = "[0-9][0-9]_*.py"
_TITLE = re.compile(r"^# (\d+)\. (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_FORMULA = re.compile(r"\$([^$]+)\$")


@dataclass(frozen=True)
class Notebook:
    """One notebook. Its code is parsed, not run."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """Name of the file without suffix, such as `05_gradients`."""
        return self.path.stem

    @property
    def number(self) -> int:
        return int(self.name[:2])

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """The cells, each a pair of the kind (`markdown` or `code`) and the text."""
        return parse_cells(self.text)

    @property
    def title(self) -> str:
        """Title without the number."""
        match = _TITLE.search(self.cells[0][1])
        assert match, f"{self.path} has no title"
        return match[2]

    @property
    def about(self) -> str:
        """First paragraph after the title, as plain text in one line."""
        paragraph = _LINK.sub(r"\1", " ".join(self.cells[0][1].split("\n\n")[1].split()))
        return _FORMULA.sub(lambda match: _plain_formula(match[1]), paragraph)


def _plain_formula(tex: str) -> str:
    """Return a short formula without TeX commands, such as √d_head."""
    text = re.sub(r"\\(?:text|mathrm) ?", "", tex.replace("\\sqrt", "√").replace("\\cdot", "·"))
    return re.sub(r"[\\{}]", "", text)


def find_directory() -> Path:
    """Return the directory that contains the notebooks; raise if there is none."""
    package_directory = Path(__file__).parent
    for directory in (package_directory, package_directory.parents[3] / "notebooks"):
        if any(directory.glob(_FILE_PATTERN)):
            return directory
    raise InputError("this installation of cutaway has no notebooks; install the wheel, or clone the repository")


@cache
def load_notebooks() -> tuple[Notebook, ...]:
    """Load all notebooks, in the order of their numbers."""
    return tuple(
        Notebook(path, path.read_text(encoding="utf-8")) for path in sorted(find_directory().glob(_FILE_PATTERN))
    )


def get_notebook(number: int) -> Notebook:
    """Return the notebook with this number; raise if there is none."""
    notebooks = load_notebooks()
    for notebook in notebooks:
        if notebook.number == number:
            return notebook
    raise InputError(f"there is no notebook {number}; notebooks are numbered 1 to {notebooks[-1].number}")
