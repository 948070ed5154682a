"""`cutaway eval --tasks`, with a stub of lm-evaluation-harness, which is a large dependency."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.cli_runner import CliRunner

import cutaway as ct

TASKS = ("arc_easy", "hellaswag")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Install the stub, and return the arguments of each call of `simple_evaluate`."""
    recorded: list[dict[str, Any]] = []
    names = ("lm_eval", "lm_eval.models", "lm_eval.tasks", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    stubs: dict[str, Any] = {name: ModuleType(name) for name in names}

    class TaskManager:
        def __init__(self, include_path: str | None = None) -> None:
            self.all_tasks = [*TASKS, *([] if include_path is None else ["my_task"])]

    class LM:
        pass

    def simple_evaluate(model: Any, *, tasks: list[str], limit: int | None, **options: Any) -> dict[str, Any]:
        if tasks == ["hellaswag"]:
            raise ConnectionError("Couldn't reach the Hub\nmore")
        score = model.loglikelihood([type("Request", (), {"args": ("The cat sat", " down")})()])[0][0]
        recorded.append({"tasks": tasks, "limit": limit, "score": score} | options)
        return {
            "results": {task: {"alias": task, "acc,none": 0.25, "acc_stderr,none": 0.125} for task in tasks},
            "n-samples": {task: {"original": 100, "effective": limit or 100} for task in tasks},
        }

    stubs["lm_eval"].simple_evaluate = simple_evaluate
    stubs["lm_eval"].__spec__ = ModuleSpec("lm_eval", None)
    stubs["lm_eval.tasks"].TaskManager = TaskManager
    stubs["lm_eval.api.model"].LM = LM
    stubs["lm_eval.api.registry"].register_model = lambda name: lambda cls: cls
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.delitem(sys.modules, "cutaway.evaluate.lm_eval", raising=False)
    return recorded


def test_tasks_print_each_metric_with_its_standard_error(run_cli: CliRunner, calls: list[dict[str, Any]]) -> None:
    output = run_cli("eval", "tiny-english", "--tasks", "arc_easy", "--limit", "40", "--num-fewshot", "2")
    assert output.split() == ["arc_easy", "acc", "0.2500", "±", "0.1250", "over", "40", "samples"]
    [call] = calls
    assert call["tasks"] == ["arc_easy"]
    assert (call["limit"], call["num_fewshot"], call["apply_chat_template"]) == (40, 2, False)
    assert call["score"] < 0


def test_tasks_as_json(run_cli: CliRunner, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    """Names are separated by commas or given by several options."""
    options = ("--tasks", "arc_easy,my_task", "--include-path", tmp_path, "--json")
    result = json.loads(run_cli("eval", "tiny-english", *options))
    assert calls[0]["tasks"] == ["arc_easy", "my_task"]
    assert result["tasks"]["my_task"]["acc,none"] == 0.25
    assert result["num_samples"]["arc_easy"]["effective"] == 100


def test_tasks_apply_the_adapter(run_cli: CliRunner, calls: list[dict[str, Any]], tmp_path: Path) -> None:
    checkpoint = ct.load("tiny-english")
    checkpoint.model.add_adapter({"rank": 2}, seed=0)
    for name, parameter in checkpoint.model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    ct.save_adapter(checkpoint, tmp_path)
    for options in ((), ("--adapter", tmp_path)):
        run_cli("eval", "tiny-english", "--tasks", "arc_easy", *options)
    assert abs(calls[0]["score"] - calls[1]["score"]) > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "arc_eazy"], "no task 'arc_eazy'; did you mean arc_easy?"),
        (["--tasks", "hellaswag"], "Couldn't reach the Hub; check the network"),
        (["--tasks", "arc_easy", "--text", "a.txt"], "leave out --text and --data"),
        (["--text", "a.txt", "--limit", "3"], "apply to --tasks only"),
    ],
)
def test_errors(run_cli: CliRunner, calls: list[dict[str, Any]], options: list[str], message: str) -> None:
    assert message in run_cli("eval", "tiny-english", *options, code=2)
    assert not calls


def test_error_without_the_harness(run_cli: CliRunner) -> None:
    assert "pip install 'cutaway[eval]'" in run_cli("eval", "tiny-english", "--tasks", "arc_easy", code=2)
