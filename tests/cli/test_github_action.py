"""The composite GitHub Action (action.yml): its shell steps run in a project, with the variables of GitHub Actions."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
EXPRESSION = re.compile(r"\$\{\{ inputs\.([\w-]+) \}\}")
MODULE = """
import torch

weight = torch.randn(31, 31, generator=torch.Generator().manual_seed(0))


def leaks():
    return lambda tokens: weight[tokens].cumsum(1) + weight[tokens].sum(1, keepdim=True)
"""
PYTHON = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
ARGUMENT_PRINTER = """#!/bin/bash
printf '%s\\n' "$@"
echo "a report" > "${@: -3:1}"  # the value of --markdown
exit CODE
"""
"""In place of python: prints its arguments, one per line."""


@dataclass
class ActionRun:
    code: int
    output: str
    status: str
    summary: str


def run_action(directory: Path, python: str = PYTHON, **inputs: str) -> ActionRun:
    """Run the step that checks the model as GitHub runs `shell: bash`, with the defaults of the other inputs.

    `python` is the script that is run as `python`.
    """
    unknown = {name.replace("_", "-") for name in inputs} - ACTION["inputs"].keys()
    assert not unknown
    values = {name: entry.get("default", "") for name, entry in ACTION["inputs"].items()}
    values |= {name.replace("_", "-"): value for name, value in inputs.items()}
    [step] = [step for step in ACTION["runs"]["steps"] if step.get("id") == "check"]
    assert step["shell"] == "bash"
    variables = {name: EXPRESSION.sub(lambda match: values[match[1]], text) for name, text in step["env"].items()}
    (directory / "bin").mkdir(exist_ok=True)
    (directory / "bin" / "python").write_text(python)
    (directory / "bin" / "python").chmod(0o755)
    outputs = {"GITHUB_STEP_SUMMARY": directory / "summary.txt", "GITHUB_OUTPUT": directory / "output.txt"}
    for path in outputs.values():
        path.write_text("")
    outputs["GITHUB_STEP_SUMMARY"].write_text("earlier\n")
    path = os.pathsep.join([str(directory / "bin"), os.environ["PATH"]])
    variables |= {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", "TMPDIR": str(directory)}
    variables |= {name: str(path) for name, path in outputs.items()}
    (directory / "step.sh").write_text(step["run"])
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "step.sh"]
    environment = os.environ | variables
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    status = outputs["GITHUB_OUTPUT"].read_text().removeprefix("status=").strip()
    return ActionRun(
        result.returncode, result.stdout + result.stderr, status, outputs["GITHUB_STEP_SUMMARY"].read_text()
    )


@pytest.mark.nightly
def test_failed_model(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    run = run_action(tmp_path, model="mine:leaks", args="--only causality\n--skip causality-paths", sarif="r.sarif")
    assert (run.code, run.status) == (1, "failed"), run.output
    assert run.summary.startswith("earlier\n### cutaway check `mine:leaks`: ❌ failed")
    assert '"ruleId": "causality"' in (tmp_path / "r.sarif").read_text()


@pytest.mark.parametrize(("code", "status"), [(0, "passed"), (1, "failed"), (2, "error"), (3, "inconclusive")])
def test_status_and_exit_code(tmp_path: Path, code: int, status: str) -> None:
    run = run_action(tmp_path, ARGUMENT_PRINTER.replace("CODE", str(code)), model="mine:make")
    assert (run.code, run.status, run.summary) == (code, status, "earlier\na report\n"), run.output
    run = run_action(tmp_path, ARGUMENT_PRINTER.replace("CODE", str(code)), model="mine:make", summary="false")
    assert (run.code, run.summary) == (code, "earlier\n")


def test_inputs_are_arguments_and_not_shell_code(tmp_path: Path) -> None:
    inputs = {"model": "$(touch a):`touch b`", "args": "; touch c\n--only *", "baseline": "my b.json", "sarif": "$HOME"}
    run = run_action(tmp_path, ARGUMENT_PRINTER.replace("CODE", "0"), **inputs)
    arguments = run.output.splitlines()
    options = [";", "touch", "c", "--only", "*", "--baseline", "my b.json", "--sarif", "$HOME", "--markdown"]
    assert arguments[:3] == ["-m", "cutaway", "check"]
    assert arguments[3:-3] == options
    assert arguments[-2:] == ["--", "$(touch a):`touch b`"]
    assert not {"a", "b", "c"} & {path.name for path in tmp_path.iterdir()}


def test_metadata() -> None:
    assert ACTION["runs"]["using"] == "composite"
    for step in ACTION["runs"]["steps"]:
        assert ("uses" in step) != (step.get("shell") == "bash")
        assert "${{" not in step.get("run", ""), "pass inputs as variables"
    assert all(entry["description"] for entry in ACTION["inputs"].values())
