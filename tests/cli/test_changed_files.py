"""`cutaway check --changed`: which files a factory imports, and whether they differ from a commit."""

import os
import subprocess
from pathlib import Path

import pytest

from cutaway.cli.changed_files import UnknownChangesError, find_changed_imports, list_imported_files
from cutaway.errors import InputError

FILES = {
    "models/__init__.py": "",
    "models/gpt.py": "import torch\nfrom . import layers\nfrom .attention import rope\ndef make():\n import settings\n",
    "models/layers.py": "from models.attention.rope import rotate as turn\n",
    "models/attention/__init__.py": "",
    "models/attention/rope.py": "import os.path\nfrom ..shared import *\n",
    "models/shared.py": "import models.gpt\n",
    "models/unused.py": "import models.gpt\n",
    "src/settings.py": "import space.inner\n",
    "space/inner.py": "",
    "README.md": "",
}
IMPORTED = {
    "models/__init__.py", "models/gpt.py", "models/layers.py", "models/attention/__init__.py",
    "models/attention/rope.py", "models/shared.py", "src/settings.py", "space/inner.py",
}  # fmt: skip
SOURCE = "models.gpt:make"


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout.strip()


def commit_all(directory: Path) -> None:
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", "a change")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit on the branch main."""
    for name in ("CI", "GITHUB_BASE_REF", "CI_MERGE_REQUEST_TARGET_BRANCH_NAME", "CI_DEFAULT_BRANCH", "GIT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    directory = tmp_path / "project"
    for name, text in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    git(directory, "init", "--quiet", "--initial-branch", "main")
    commit_all(directory)
    monkeypatch.chdir(directory)
    return directory


def list_changes(directory: Path, since: str | None = None, also: tuple[str, ...] = ()) -> list[str]:
    return find_changed_imports(SOURCE, since, [directory / name for name in also], directory)[0]


def test_imports_are_followed(project: Path) -> None:
    files = list_imported_files("models.gpt", [project, project / "src"])
    assert {path.relative_to(project).as_posix() for path in files} == IMPORTED


@pytest.mark.parametrize("name", FILES)
def test_only_changes_of_imported_files_count(project: Path, name: str) -> None:
    assert list_changes(project) == []
    (project / name).write_text(f"{FILES[name]}\n# changed\n")
    assert list_changes(project) == ([name] if name in IMPORTED else [])


def test_new_deleted_and_other_files(project: Path) -> None:
    (project / "models" / "layers.py").write_text("import models.added\n")
    (project / "models" / "added.py").touch()  # not tracked
    (project / "models" / "unused.py").unlink()  # a module may still import it
    (project / "baseline.json").write_text("{}")
    assert list_changes(project) == ["models/added.py", "models/layers.py", "models/unused.py"]
    assert "baseline.json" in list_changes(project, also=("baseline.json",))


def test_since_is_the_merge_base(project: Path) -> None:
    git(project, "switch", "--quiet", "--create", "topic")
    (project / "models" / "layers.py").write_text("a = 1\n")
    commit_all(project)
    git(project, "switch", "--quiet", "main")
    (project / "models" / "shared.py").write_text("b = 1\n")
    commit_all(project)
    git(project, "switch", "--quiet", "topic")
    assert list_changes(project) == []
    assert list_changes(project, "main") == ["models/layers.py"]  # not shared.py, which only main has changed
    assert list_changes(project, "HEAD~1") == ["models/layers.py"]
    with pytest.raises(InputError, match="--changed-since is 'absent'"):
        list_changes(project, "absent")
    with pytest.raises(InputError, match="--changed-since is '--help'"):
        list_changes(project, "--help")


def test_ci_compares_with_the_target_branch(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(project), str(clone))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(UnknownChangesError, match="HEAD is a commit of origin/HEAD"):
        list_changes(clone)
    git(clone, "switch", "--quiet", "--create", "topic")
    (clone / "models" / "layers.py").write_text("a = 1\n")
    commit_all(clone)
    assert find_changed_imports(SOURCE, None, [], clone) == (["models/layers.py"], "origin/HEAD")
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    assert find_changed_imports(SOURCE, None, [], clone) == (["models/layers.py"], "origin/main")


def test_shallow_clone_is_unknown(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(project, "switch", "--quiet", "--create", "topic")
    commit = ("commit", "--quiet", "--allow-empty", "--message", "a change")
    git(project, *commit)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth", "1", "--branch", "topic", f"file://{project}", str(clone))
    assert list_changes(clone) == []
    with pytest.raises(UnknownChangesError, match=r"no commit 'origin/main' in this clone \(a shallow clone; fetch"):
        list_changes(clone, "origin/main")
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    with pytest.raises(UnknownChangesError, match="a shallow clone"):
        list_changes(clone)


def test_unknown_changes(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownChangesError, match="the module 'absent' is not in this directory"):
        find_changed_imports("absent:make", None, [], project)
    with pytest.raises(UnknownChangesError, match="not a git repository"):
        find_changed_imports(SOURCE, None, [], tmp_path)
    with pytest.raises(InputError, match=r"--changed follows the imports of module\.path:factory"):
        find_changed_imports("tiny-gpt", None, [], project)
    (project / "models" / "shared.py").write_text("def (")
    with pytest.raises(UnknownChangesError, match=r"the imports of 'shared\.py' cannot be read"):
        list_changes(project)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(UnknownChangesError, match="git is not installed"):
        list_changes(project)
