"""What is published is whole and works by itself; what others build on changes only on purpose."""

import subprocess
import sys
import tomllib
from pathlib import Path

import list_public_api
import pytest
import yaml

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_what_others_build_on_is_as_listed() -> None:
    """To accept a change: python scripts/list_public_api.py --write, and a line in CHANGELOG.md."""
    assert list_public_api.list_api().splitlines() == list_public_api.API_LIST.read_text().splitlines()


def test_the_version_has_its_changes_and_is_said_alike() -> None:
    assert f"\n## {VERSION} " in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION


def test_forms_for_issues_ask_for_what_is_needed() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) >= 4
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        assert any(field.get("validations", {}).get("required") for field in form["body"]), path
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
        assert any(step.get("run") in (".ci/run", "make nightly") for step in steps), path


@pytest.mark.unchecked
def test_sdist_and_wheel_are_whole_and_the_wheel_works(tmp_path: Path) -> None:
    release(tmp_path)


@pytest.mark.nightly
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    release(tmp_path, "--fresh")


def release(out: Path, *options: str) -> None:
    command = [sys.executable, ROOT / "scripts" / "build_release.py", "--out", out, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"cutaway-{VERSION}-py3-none-any.whl is ready"
