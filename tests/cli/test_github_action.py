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


def causal():
    return lambda tokens: weight[tokens].cumsum(1)


def leaks():
    return lambda tokens: weight[tokens].cumsum(1) + weight[tokens].sum(1, keepdim=True)
"""


@dataclass
class ActionRun:
    code: int
    output: str
    status: str
    summary: str


def run_action(directory: Path, **inputs: str) -> ActionRun:
    """Run the step that checks the model as GitHub runs `shell: bash`, with the defaults of the other inputs."""
    unknown = {name.replace("_", "-") for name in inputs} - ACTION["inputs"].keys()
    assert not unknown
    values = {name: entry.get("default", "") for name, entry in ACTION["inputs"].items()}
    values |= {name.replace("_", "-"): value for name, value in inputs.items()}
    [step] = [step for step in ACTION["runs"]["steps"] if step.get("id") == "check"]
    assert step["shell"] == "bash"
    variables = {name: EXPRESSION.sub(lambda match: values[match[1]], text) for name, text in step["env"].items()}
    (directory / "bin").mkdir(exist_ok=True)
    (directory / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


def test_passed_and_failed_model(project: Path) -> None:
    failed = run_action(project, model="mine:leaks", args="--only causality\n--skip causality-paths", sarif="r.sarif")
    assert (failed.code, failed.status) == (1, "failed"), failed.output
    assert failed.summary.startswith("earlier\n### cutaway check `mine:leaks`: ❌ failed")
    assert '"ruleId": "causality"' in (project / "r.sarif").read_text()
    passed = run_action(project, model="mine:causal", args="--only causality", summary="false")
    assert (passed.code, passed.status) == (0, "passed"), passed.output
    assert passed.summary == "earlier\n"


def test_inputs_are_not_run_as_shell_code(project: Path) -> None:
    result = run_action(project, model="$(touch a):`touch b`", args="; touch c", baseline="d; touch d")
    assert (result.code, result.status) == (2, "error")
    assert not {"a", "b", "c", "d"} & {path.name for path in project.iterdir()}
    option = run_action(project, model="--list")
    assert (option.code, option.status) == (2, "error"), option.output


def test_metadata() -> None:
    assert ACTION["runs"]["using"] == "composite"
    for step in ACTION["runs"]["steps"]:
        assert ("uses" in step) != (step.get("shell") == "bash")
        assert "${{" not in step.get("run", ""), "pass inputs as variables"
    assert all(entry["description"] for entry in ACTION["inputs"].values())
