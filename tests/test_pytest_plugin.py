"""The pytest plugin: `pytest --cutaway module:factory` runs each check as a test."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol
from xml.etree import ElementTree as Tree

import pytest
import support.seeded_bugs.causality  # noqa: F401  imported here so that a nested run does not register its bugs twice

from cutaway.check import get_checks

pytestmark = pytest.mark.unchecked

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
CHECK_NAMES = list(get_checks())  # imported here so that a nested run does not register the checks twice
FIRST_MESSAGE = "the logits at position # change with token #, which comes later"
SECOND_MESSAGE = "the logits of the first # tokens alone differ from those within # tokens"
MODULE = """
import support.seeded_bugs.causality
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import SEEDED_BUGS


def correct():
    model = ReferenceGPT()
    return model, check_kwargs(model)


def leaky():
    return SEEDED_BUGS["causality/mask off by one"].build()


def forward_only():
    model = ReferenceGPT()
    return lambda tokens: model(tokens)[0]


def failing_factory():
    raise RuntimeError("the weights are missing")


def failing_cache():
    return ReferenceGPT(), {"generate": lambda tokens, n: tokens, "logits_with_cache": lambda tokens, state: 1 / 0}
"""


class Run(Protocol):
    """Run pytest with these arguments, optionally in a subprocess; return its output."""

    def __call__(self, *arguments: str, code: int, in_subprocess: bool = False) -> str: ...


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest in a project of two files without other plugins."""
    pytester.makepyfile(mine=MODULE, test_own="def test_of_the_project():\n    pass\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, code: int, in_subprocess: bool = False) -> str:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]))
        run_pytest = pytester.runpytest_subprocess if in_subprocess else pytester.runpytest_inprocess
        result = run_pytest("-p", "cutaway.pytest_plugin", "--cutaway-budget", "3600", "-v", *arguments)
        output = f"{result.stdout}\n{result.stderr}"
        assert result.ret == code, output
        return output

    return run


def test_correct_and_buggy_model(project: Run) -> None:
    arguments = ("--cutaway", "mine:forward_only", "--cutaway", "mine:leaky", "--cutaway-only", "causality*")
    output = project(*arguments, "--junit-xml", "r.xml", code=1, in_subprocess=True)
    assert "test_own.py::test_of_the_project PASSED" in output
    assert "cutaway[mine:forward_only]::causality PASSED" in output
    assert "cutaway[mine:forward_only]::causality-gradient SKIPPED (needs module)" in output
    assert "cutaway[mine:leaky]::causality FAILED" in output
    assert "the logits at position 0 change with token 1, which comes later" in output
    assert "fix: mask key j for query i" in output
    assert "Traceback" not in output
    cases = {case.get("name"): case for case in Tree.parse("r.xml").getroot().iter("testcase")}
    assert "causality-tile-edges" in cases


def test_one_model_has_short_test_ids(project: Run) -> None:
    collected = project("--cutaway", "mine:correct", "--collect-only", "-qq", code=0)
    assert [line for line in collected.splitlines() if line.startswith("cutaway::")] == [
        f"cutaway::{name}" for name in CHECK_NAMES
    ]
    output = project("--cutaway", "mine:correct", "-k", "edges", code=0)
    assert "cutaway::causality-tile-edges PASSED" in output
    assert f"1 passed, {len(CHECK_NAMES)} deselected" in output


def test_check_that_could_not_run_does_not_pass(project: Run) -> None:
    output = project("--cutaway", "mine:failing_cache", "--cutaway-only", "causality-paths", code=0)
    assert "cutaway::causality-paths SKIPPED" in output
    assert "causality-paths: could not run: the model raised ZeroDivisionError" in output


def test_accepted_findings_are_xfailed(project: Run) -> None:
    def write(model: str, message: str) -> None:
        entry = {"model": model, "check": "causality", "verdict": "fail", "message": message, "reason": "a known leak"}
        Path("b.json").write_text(json.dumps({"version": 1, "accepted": [entry, {**entry, "message": SECOND_MESSAGE}]}))

    arguments = ("--cutaway-only", "causality", "--cutaway-baseline", "b.json")
    write("mine:leaky", FIRST_MESSAGE)
    output = project("--cutaway", "mine:leaky", *arguments, "-rx", code=0)
    assert "cutaway::causality XFAIL (accepted (a known leak): the logits at position 0 change" in output
    project("--cutaway", "mine:leaky", *arguments, "--runxfail", code=1)
    write("mine:leaky", "another message")
    assert "cutaway::causality FAILED" in project("--cutaway", "mine:leaky", *arguments, code=1)
    write("mine:forward_only", FIRST_MESSAGE)
    output = project("--cutaway", "mine:forward_only", *arguments, code=0)
    assert "cutaway::causality PASSED" in output
    assert f"CutawayWarning: fixed  causality: {FIRST_MESSAGE}; remove it from the baseline" in output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["mine:correct", "--cutaway-baseline", "absent.json"], 4, "absent.json' does not exist; create it with"),
        (["mine:absent"], 4, "--cutaway: 'mine' has no 'absent'"),
        (["absent:make"], 4, "--cutaway: there is no module 'absent'"),
        (["mine:correct", "--cutaway-only", "causalty"], 4, "--cutaway: there is no check 'causalty'"),
        (
            ["mine:failing_factory", "--cutaway-only", "causality-tile-edges"],
            1,
            "raised RuntimeError: the weights are missing",
        ),
    ],
)
def test_usage_errors_are_one_line(project: Run, arguments: list[str], code: int, message: str) -> None:
    output = project("--cutaway", *arguments, code=code)
    assert message in output
    assert "Traceback" not in output


def test_plugin_is_inactive_without_its_option(project: Run) -> None:
    code = "import sys, cutaway.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "1 passed" in project(code=0)


def test_plugin_entry_point() -> None:
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert resolve_name(entries["cutaway.pytest_plugin"]).pytest_addoption
