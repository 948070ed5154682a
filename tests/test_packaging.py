"""Packaging: public API list, version, issue templates, sdist and wheel."""

import subprocess
import sys
import tomllib
from pathlib import Path

import list_public_api
import pytest
import yaml

ROOT = Path(__file__).parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_public_api_matches_the_list() -> None:
    """To accept a change, run `python scripts/list_public_api.py --write` and add a line to CHANGELOG.md."""
    assert list_public_api.list_api().splitlines() == list_public_api.API_LIST.read_text().splitlines()


def test_version_is_in_changelog_and_citation() -> None:
    assert f"\n## {VERSION} " in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION


def test_issue_templates_and_workflows() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) >= 4
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        assert any(field.get("validations", {}).get("required") for field in form["body"]), path
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
        assert any(step.get("run") in (".ci/run", "make nightly", "make release") for step in steps), path


@pytest.mark.nightly
@pytest.mark.unchecked
def test_sdist_and_wheel(tmp_path: Path) -> None:
    build_release(tmp_path)


@pytest.mark.nightly
def test_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    build_release(tmp_path, "--fresh")


def build_release(directory: Path, *options: str) -> None:
    command = [sys.executable, ROOT / "scripts" / "build_release.py", "--out", directory, *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == f"cutaway-{VERSION}-py3-none-any.whl is ready"
