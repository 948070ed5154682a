"""The library files in scripts/ecosystem: which libraries are checked, at which versions."""

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES_DIR = ROOT / "scripts" / "ecosystem"
TORCH_REQUIREMENT = "torch==2.13.0"


@dataclass(frozen=True)
class Library:
    """A library file, read without importing it, because the library is installed in its own environment only."""

    name: str
    path: Path
    homepage: str
    requirements: tuple[str, ...] = ()
    """Pinned requirements for pip; the first one names the version that the report shows."""
    repository: tuple[str, str] | None = None
    """(owner/name on GitHub, commit) of a project that is not on PyPI; its folder is put on sys.path."""

    @property
    def version(self) -> str:
        """The pinned version, the commit, or the version of PyTorch."""
        if self.repository is not None:
            return self.repository[1][:8]
        return (*self.requirements, TORCH_REQUIREMENT)[0].partition("==")[2]


def load_libraries() -> dict[str, Library]:
    return {path.stem: read_library(path) for path in sorted(LIBRARIES_DIR.glob("*.py"))}


def read_library(path: Path) -> Library:
    """Read the constants of a library file."""
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("NAME", "HOMEPAGE", "REQUIREMENTS", "REPOSITORY")
    }
    for requirement in constants.get("REQUIREMENTS", ()):
        if "==" not in requirement:
            raise ValueError(
                f"{path.name}: REQUIREMENTS has '{requirement}' without a version, but results must be reproducible; "
                "write NAME==VERSION"
            )
    if "HOMEPAGE" not in constants:
        raise ValueError(f"{path.name}: HOMEPAGE is missing, but the report links to it; add the constant")
    return Library(
        constants.get("NAME", path.stem),
        path,
        constants["HOMEPAGE"],
        constants.get("REQUIREMENTS", ()),
        constants.get("REPOSITORY"),
    )
