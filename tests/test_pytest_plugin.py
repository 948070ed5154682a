"""`pytest --cutaway module:factory`: each check is a test of somebody's project."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol
from xml.etree import ElementTree as Tree

import pytest
import support.seeded_bugs.causality  # noqa: F401  so that a run within this one does not enter its bugs again

from cutaway.check import get_checks

pytestmark = pytest.mark.unchecked

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
CHECK_NAMES = list(get_checks())  # imported here, so that a run within this one does not register the checks again
MODULE = """
import support.seeded_bugs.causality
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import SEEDED_BUGS


def right():
    model = ReferenceGPT()
    return model, check_kwargs(model)


def leaks():
    return SEEDED_BUGS["causality/mask off by one"].build()


def function():
    model = ReferenceGPT()
    return lambda tokens: model(tokens)[0]


def breaks():
    raise RuntimeError("the weights are not there")


def dies():
    return ReferenceGPT(), {"generate": lambda tokens, n: tokens, "logits_with_cache": lambda tokens, state: 1 / 0}
"""


class Run(Protocol):
    """pytest with these arguments (in a process of its own, if `apart`): what it said."""

    def __call__(self, *arguments: str, code: int, apart: bool = False) -> str: ...


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in a project of two files, which knows of no other plugin."""
    pytester.makepyfile(mine=MODULE, test_own="def test_of_their_own():\n    pass\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, code: int, apart: bool = False) -> str:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]))
        way = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
        done = way("-p", "cutaway.pytest_plugin", "-v", *arguments)
        said = f"{done.stdout}\n{done.stderr}"
        assert done.ret == code, said
        return said

    return run


def test_a_right_model_and_a_wrong_one(project: Run) -> None:
    asked = ("--cutaway", "mine:function", "--cutaway", "mine:leaks", "--cutaway-only", "causality*")
    said = project(*asked, "--junit-xml", "r.xml", code=1, apart=True)
    assert "test_own.py::test_of_their_own PASSED" in said
    assert "cutaway[mine:function]::causality PASSED" in said
    assert "cutaway[mine:function]::causality-gradient SKIPPED (needs module)" in said
    assert "cutaway[mine:leaks]::causality FAILED" in said
    assert "the logits at position 0 change with token 1, which comes later" in said
    assert "fix: hide key j from query i" in said
    assert "Traceback" not in said
    cases = {case.get("name"): case for case in Tree.parse("r.xml").getroot().iter("testcase")}
    assert "causality-tile-edges" in cases


def test_one_model_has_short_names_and_can_be_chosen_from(project: Run) -> None:
    named = project("--cutaway", "mine:right", "--collect-only", "-qq", code=0)
    assert [line for line in named.splitlines() if line.startswith("cutaway::")] == [
        f"cutaway::{name}" for name in CHECK_NAMES
    ]
    said = project("--cutaway", "mine:right", "-k", "edges", code=0)
    assert "cutaway::causality-tile-edges PASSED" in said
    assert f"1 passed, {len(CHECK_NAMES)} deselected" in said


def test_a_warning_passes_and_is_told(project: Run) -> None:
    said = project("--cutaway", "mine:dies", "--cutaway-only", "causality-paths", code=0)
    assert "cutaway::causality-paths PASSED" in said
    assert "CutawayWarning: warn  causality-paths: could not run: it raised ZeroDivisionError" in said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["mine:absent"], 4, "--cutaway: 'mine' has no 'absent'"),
        (["absent:make"], 4, "--cutaway: there is no module 'absent'"),
        (["mine:right", "--cutaway-only", "causalty"], 4, "--cutaway: there is no check 'causalty'"),
        (
            ["mine:breaks", "--cutaway-only", "causality-tile-edges"],
            1,
            "raised RuntimeError: the weights are not there",
        ),
    ],
)
def test_mistakes_get_one_sentence(project: Run, arguments: list[str], code: int, message: str) -> None:
    said = project("--cutaway", *arguments, code=code)
    assert message in said
    assert "Traceback" not in said


def test_without_its_option_it_does_nothing_and_imports_nothing(project: Run) -> None:
    probe = "import sys, cutaway.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
    assert "1 passed" in project(code=0)


def test_pytest_finds_it_by_itself() -> None:
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert resolve_name(entries["cutaway.pytest_plugin"]).pytest_addoption
