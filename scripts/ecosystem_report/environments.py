"""One virtual environment per library, with the pinned versions, PyTorch and what `ct.check` imports."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from ecosystem_report.libraries import ROOT, TORCH_REQUIREMENT, Library


def prepare_environment(library: Library, folder: Path) -> Path:
    """Create or update the environment of a library, and return its Python.

    cutaway itself is not installed: building its wheel would build the web page, which no check uses. The worker
    imports it from this checkout. Its dependencies are installed without versions: those of the library are kept.
    """
    directory = folder / library.path.stem
    python, installed = directory / "bin" / "python", directory / "installed.txt"
    wanted = "\n".join((TORCH_REQUIREMENT, *library.requirements))
    if installed.is_file() and installed.read_text() == wanted:
        return python
    run([sys.executable, "-m", "venv", directory])
    run([python, "-m", "pip", "install", "--quiet", TORCH_REQUIREMENT, *library.requirements])
    run([python, "-m", "pip", "install", "--quiet", *find_runtime_dependencies()])
    installed.write_text(wanted)
    return python


def find_runtime_dependencies() -> list[str]:
    """Names of this project's dependencies, without versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[<>=~!\[; ]", line, maxsplit=1)[0] for line in project["dependencies"]]


def prepare_source(library: Library, folder: Path, given: Path | None) -> Path | None:
    """The folder of a library's repository at its commit: cloned from `given` or GitHub; None if it has none."""
    if library.repository is None:
        return None
    name, commit = library.repository
    directory = folder / f"{library.path.stem}_source"
    if not directory.is_dir():
        run(["git", "clone", "--quiet", str(given or f"https://github.com/{name}"), directory])
    run(["git", "-C", directory, "checkout", "--quiet", commit])
    return directory


def run(command: list[str | Path]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise RuntimeError(f"{' '.join(map(str, command))} failed: {lines[-1] if lines else 'no output'}")
