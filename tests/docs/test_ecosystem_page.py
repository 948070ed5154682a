"""docs/ecosystem.md is what the results and conclusions render, and each defect has a short script without cutaway."""

import ast
import re
import sys
from pathlib import Path

import pytest
from ecosystem_report.libraries import load_libraries
from ecosystem_report.page import PAGE, render_page
from ecosystem_report.results import DEFECTS_DIR, Conclusion, Conclusions, load_conclusions, load_results
from ecosystem_report.worker_process import run_library

LIBRARY_FILE = """
import os
import time
from torch import nn

def make():
    arguments = {"has_positions": False, "only": ["causality", "token-ids"]}
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)), arguments

def configurations():
    yield "first", make
    yield "crash", lambda: os._exit(3)
    yield "hang", lambda: time.sleep(1000)
    yield "raises", lambda: 1 / 0
    yield "last", make
"""


def test_page_is_up_to_date() -> None:
    page = render_page(load_results(), load_conclusions(), load_libraries())
    assert PAGE.read_text(encoding="utf-8") == page, "run scripts/check_ecosystem.py --write-page"


def test_results_are_of_the_pinned_versions() -> None:
    versions = {library.name: library.version for library in load_libraries().values()}
    rows = load_results()
    assert {(row["library"], row["version"]) for row in rows} <= set(versions.items())
    keys = [(row["library"], row["configuration"]) for row in rows]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("path", sorted(DEFECTS_DIR.glob("*.py")), ids=lambda path: path.stem)
def test_defect_script_is_short_and_without_cutaway(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 25
    tree = ast.parse(text)
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in modules if name.partition(".")[0] == "cutaway"]


def test_defects_and_scripts_correspond() -> None:
    conclusions = load_conclusions()
    scripts = [defect.script for defect in conclusions.defects]
    assert sorted(scripts) == sorted(path.name for path in DEFECTS_DIR.glob("*.py"))
    assert {each.script for each in conclusions.findings if each.kind == "defect"} <= set(scripts)
    for defect in conclusions.defects:
        assert re.fullmatch(r"(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+)?", defect.issue)


def test_finding_without_a_conclusion_is_shown_as_not_examined() -> None:
    finding = {"check": "causality", "verdict": "fail", "message": "the logits at position 0 change"}
    row = {"library": "x", "version": "1", "configuration": "y", "counts": {"fail": 1}, "findings": [finding]}
    row["error"] = ""
    assert "causality (fail: not examined)" in render_page([row], Conclusions(), {})
    known = Conclusion("x", ("causality",), "by design", ("y*",), reason="an encoder")
    page = render_page([row], Conclusions(findings=[known]), {})
    assert "causality (fail: by design)" in page
    assert "| an encoder |" in page


def test_every_conclusion_has_a_finding() -> None:
    rows = load_results()
    for conclusion in load_conclusions().findings:
        found = [
            row
            for row in rows
            for finding in row["findings"] or [{"check": "error", "message": row["error"]}]
            if conclusion.matches(row["library"], row["configuration"], finding["check"], finding["message"])
        ]
        assert found, f"{conclusion} matches no finding; remove it from docs/ecosystem.toml"


@pytest.mark.nightly
def test_runner_continues_after_crashes(tmp_path: Path) -> None:
    library_file, log = tmp_path / "library.py", tmp_path / "log"
    library_file.write_text(LIBRARY_FILE)
    messages = list(run_library(Path(sys.executable), library_file, None, {"first"}, 20, log))
    assert messages[0] == {"configurations": ["first", "crash", "hang", "raises", "last"]}
    finished = {message["finished"]: message for message in messages if "finished" in message}
    errors = {name: message["error"] for name, message in finished.items()}
    assert errors == {
        "crash": "exit code 3",
        "hang": "ran longer than 20 s",
        "raises": "ZeroDivisionError: division by zero",
        "last": "",
    }
    assert finished["last"]["counts"]["pass"] == 2
