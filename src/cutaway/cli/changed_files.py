"""`cutaway check --changed`: whether the Python files that a model factory imports differ from a git commit.

Imports are read from the source code, without running it. This module does not import torch.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cutaway.errors import InputError

_BASE_BRANCH_VARIABLES = ("GITHUB_BASE_REF", "CI_MERGE_REQUEST_TARGET_BRANCH_NAME", "CI_DEFAULT_BRANCH")
"""Environment variables of GitHub Actions and GitLab CI with the name of the target branch."""
_DEFAULT_BRANCHES = ("origin/HEAD", "origin/main", "origin/master")


class UnknownChangesError(Exception):
    """The changed files cannot be determined; the message is the reason."""


def find_changed_imports(source: str, since: str | None, also: list[Path], directory: Path) -> tuple[list[str], str]:
    """Return the changed files that the factory `source` depends on, and the name of the commit they are compared with.

    The files are the factory's module, the modules that it imports directly or indirectly, and `also`. Changes are
    those since the merge base with `since`, including uncommitted and untracked files. Deleted Python files always
    count. Paths are relative to `directory`. Raise UnknownChangesError if git cannot tell which files have changed.
    """
    module = source.partition(":")[0]
    if ":" not in source or Path(source).exists():
        raise InputError(
            f"--changed follows the imports of module.path:factory, but SOURCE is '{source}'; leave it out"
        )
    root = Path(_run_git(directory, "rev-parse", "--show-toplevel"))
    base, name = _find_base(directory, since)
    changed = _list_paths(root, "diff", "--name-only", "--no-renames", base)
    changed |= _list_paths(root, "ls-files", "--others", "--exclude-standard")
    imported = list_imported_files(module, _list_search_path(directory, root))
    if not imported:
        raise UnknownChangesError(f"the module '{module}' is not in this directory")
    used = {path.resolve() for path in [*imported, *also]}
    found = {path for path in changed if path in used or (path.suffix == ".py" and not path.exists())}
    return sorted(os.path.relpath(path, directory) for path in found), name


def _find_base(directory: Path, since: str | None) -> tuple[str, str]:
    """Return the commit to compare with, and how messages name it.

    `since` defaults to HEAD. In continuous integration (the variable CI), it is the target or default branch.
    """
    if since is None and not os.environ.get("CI"):
        ref = "HEAD"
    else:
        ref = _find_default_branch(directory) if since is None else since
    try:
        _run_git(directory, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except UnknownChangesError:
        if since is None or _is_shallow(directory):
            raise UnknownChangesError(f"there is no commit '{ref}' in this clone{_hint(directory)}") from None
        raise InputError(f"--changed-since is '{since}', which is not a commit of this repository") from None
    try:
        base = _run_git(directory, "merge-base", ref, "HEAD")
    except UnknownChangesError:
        raise UnknownChangesError(f"'{ref}' and HEAD have no common commit in this clone{_hint(directory)}") from None
    if since is None and ref != "HEAD" and base == _run_git(directory, "rev-parse", "HEAD"):
        raise UnknownChangesError(f"HEAD is a commit of {ref}, so there is no branch to compare")
    return base, ref


def _find_default_branch(directory: Path) -> str:
    """Name of the remote branch that the checked-out branch will be merged into."""
    names = [f"origin/{os.environ[name]}" for name in _BASE_BRANCH_VARIABLES if os.environ.get(name)]
    if names:
        return names[0]
    known = _run_git(directory, "for-each-ref", "--format=%(refname:lstrip=2)", "refs/remotes/origin").split()
    branches = [name for name in _DEFAULT_BRANCHES if name in known]
    if not branches:
        raise UnknownChangesError(f"there is no branch {' or '.join(_DEFAULT_BRANCHES)}{_hint(directory)}")
    return branches[0]


def _is_shallow(directory: Path) -> bool:
    return _run_git(directory, "rev-parse", "--is-shallow-repository") == "true"


def _hint(directory: Path) -> str:
    return " (a shallow clone; fetch the history, such as with fetch-depth: 0)" if _is_shallow(directory) else ""


def _run_git(directory: Path, *arguments: str) -> str:
    """Run git and return its output. Raise UnknownChangesError if git is missing or fails."""
    command = ["git", *arguments]
    try:
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except OSError:
        raise UnknownChangesError("git is not installed") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"git {arguments[0]} failed"]
        raise UnknownChangesError(lines[0].removeprefix("fatal: "))
    return result.stdout.rstrip("\n")


def _list_paths(root: Path, *arguments: str) -> set[Path]:
    """Run a git command that lists files relative to `root`, and return their absolute paths."""
    return {(root / name).resolve() for name in _run_git(root, *arguments, "-z").split("\0") if name}


def _list_search_path(directory: Path, root: Path) -> list[Path]:
    """Directories that contain modules: `directory`, its folder src, and entries of sys.path within the repository."""
    own = [Path(entry).resolve() for entry in sys.path]
    own = [path for path in own if path.is_relative_to(root.resolve()) and "site-packages" not in path.parts]
    return list(dict.fromkeys([directory.resolve(), directory.resolve() / "src", *own]))


def list_imported_files(module: str, search_path: list[Path]) -> set[Path]:
    """The file of a module, and the files of all modules that it imports directly or indirectly, in `search_path`."""
    files: set[Path] = set()
    waiting, seen = [module], {module}
    while waiting:
        for name, path in _resolve_module(waiting.pop(), search_path):
            if path not in files:
                files.add(path)
                imported = set(_list_imports(path, name)) - seen
                seen |= imported
                waiting += sorted(imported)
    return files


def _resolve_module(name: str, search_path: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the name and file of a module and of the packages that contain it, as far as they are found.

    The name may also be a member of a module, as in `from package.module import name`.
    """
    folders, parts = search_path, name.split(".")
    for index, part in enumerate(parts):
        candidates = [path for folder in folders for path in (folder / part / "__init__.py", folder / f"{part}.py")]
        path = next((path for path in candidates if path.is_file()), None)
        if path is not None:
            yield ".".join(parts[: index + 1]), path
        if path is not None and path.name != "__init__.py":
            return
        # without an __init__.py, a directory is a namespace package
        folders = [folder / part for folder in folders if (folder / part).is_dir()] if path is None else [path.parent]


def _list_imports(path: Path, name: str) -> Iterator[str]:
    """Yield the names that a file imports, including imports inside functions. A name may be a module or a member."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UnknownChangesError(f"the imports of '{path.name}' cannot be read ({error})") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")
            num_parts = len(parts) - node.level + (path.name == "__init__.py")
            package = parts[: max(0, num_parts)] if node.level else []
            base = [*package, *([node.module] if node.module else [])]
            yield from (".".join([*base, alias.name]) for alias in node.names)
