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
import zoo.causality  # noqa: F401  so that a run within this one does not enter its bugs again

from cutaway.check import checks

pytestmark = pytest.mark.unchecked

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
MODULE = """
import zoo.causality
from zoo.bug import ZOO
from zoo.home import Home, offers


def right():
    model = Home()
    return model, offers(model)


def leaks():
    return ZOO["causality/mask off by one"].make()


def function():
    model = Home()
    return lambda tokens: model(tokens)[0]


def breaks():
    raise RuntimeError("the weights are not there")


def dies():
    return Home(), {"generate": lambda tokens, n: tokens, "cached": lambda tokens, state: 1 / 0}
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
    assert "usual fix: hide key j from query i" in said
    assert "Traceback" not in said
    cases = {case.get("name"): case for case in Tree.parse("r.xml").getroot().iter("testcase")}
    assert "causality-edges" in cases


def test_one_model_has_short_names_and_can_be_chosen_from(project: Run) -> None:
    named = project("--cutaway", "mine:right", "--collect-only", "-qq", code=0)
    assert [line for line in named.splitlines() if line.startswith("cutaway::")] == [f"cutaway::{n}" for n in checks()]
    said = project("--cutaway", "mine:right", "-k", "edges", code=0)
    assert "cutaway::causality-edges PASSED" in said
    assert f"1 passed, {len(checks())} deselected" in said


def test_a_warning_passes_and_is_told(project: Run) -> None:
    said = project("--cutaway", "mine:dies", "--cutaway-only", "causality-paths", code=0)
    assert "cutaway::causality-paths PASSED" in said
    assert "CutawayWarning: warn  causality-paths: could not be tried: it raised ZeroDivisionError" in said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["mine:absent"], 4, "--cutaway: 'mine' has no 'absent'"),
        (["absent:make"], 4, "--cutaway: there is no module 'absent'"),
        (["mine:right", "--cutaway-only", "causalty"], 4, "--cutaway: there is no check 'causalty'"),
        (["mine:breaks", "--cutaway-only", "causality-edges"], 1, "raised RuntimeError: the weights are not there"),
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
