"""Reward functions: loading from files, arguments, and errors that name what is wrong."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cutaway.errors import CutawayError
from cutaway.train.recipe.grpo import GRPOConfig, RewardFunctionConfig
from cutaway.train.rollouts.rewards import RewardFunction, compute_rewards, load_reward_functions

CODE = """
import torch

def length(completions):
    return [len(completion) for completion in completions]

def everything(prompts, completions, completion_ids, **columns):
    assert completion_ids == [[1, 2], [3]]
    return torch.tensor([float(f"{p}{c}" == a) for p, c, a in zip(prompts, completions, columns["answer"])])

def partial(completions, answer, scale=2):
    return [scale if completion == a else None for completion, a in zip(completions, answer)]

def raises(completions):
    return [1 / len(completion) for completion in completions]

def short(completions):
    return [1.0]

def text(completions):
    return ["good" for _ in completions]

def nan(completions):
    return [float("nan") for _ in completions]

def one_number(completions):
    return 1.0

def needs_result(completions, result):
    return [0.0 for _ in completions]
"""
COMPLETIONS: dict[str, Any] = {"prompts": ["a", "b"], "completions": ["x", ""], "completion_ids": [[1, 2], [3]]}
COLUMNS = {"answer": ["ax", "?"], "level": [1, 2]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(CODE)
    return path


def load(file: Path, name: str) -> RewardFunction:
    [function] = load_reward_functions([RewardFunctionConfig(function=f"{file}:{name}")])
    return function


def test_arguments_are_those_that_the_function_has(file: Path) -> None:
    functions = [load(file, name) for name in ("length", "everything", "partial")]
    for function in functions:
        function.check_columns(COLUMNS)
    rewards = compute_rewards(functions, **COMPLETIONS, columns=COLUMNS | {"answer": ["ax", ""]})
    torch.testing.assert_close(rewards, torch.tensor([[1.0, 1.0, math.nan], [0.0, 0.0, 2.0]]).double(), equal_nan=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised ZeroDivisionError: division by zero \(.*rewards.py line 15\); it must return a number"),
        ("short", "returned 1 rewards for 2 completions; return one number per completion"),
        ("text", "returned 'good' for the completion 'x'; return a finite number, or None"),
        ("nan", "returned nan for the completion 'x'; return a finite number, or None"),
        ("one_number", "returned a float, but a list with one number per completion is needed"),
    ],
)
def test_invalid_results(file: Path, name: str, message: str) -> None:
    with pytest.raises(CutawayError, match=message):
        load(file, name)(**COMPLETIONS, columns=COLUMNS)


def test_missing_column(file: Path) -> None:
    with pytest.raises(CutawayError, match="parameter 'result', but the records have the columns answer, level"):
        load(file, "needs_result").check_columns(COLUMNS)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("{}:lenght", "has no function 'lenght' .did you mean 'length'"),
        ("{}", "names a file, but not a function in it; write"),
        ("other.py:length", "there is no file 'other.py'"),
        ("exact_mach", "is not a built-in reward .did you mean 'exact_match'"),
        ("model/rewards.py:length", "a model or run directory, and code is never loaded from these"),
        ("broken.py:length", "cannot be loaded, because it raised SyntaxError"),
    ],
)
def test_invalid_functions(file: Path, reward: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("def length(:")
    (file.parent / "model").mkdir()
    (file.parent / "model" / "run.json").write_text("{}")
    (file.parent / "model" / "rewards.py").write_text(CODE)
    with pytest.raises(CutawayError, match=message):
        load_reward_functions([RewardFunctionConfig(function=reward.format(file.name))])


def test_names_are_different(file: Path) -> None:
    twice = [RewardFunctionConfig(function=f"{file}:length")] * 2
    with pytest.raises(CutawayError, match="two functions named 'length'"):
        load_reward_functions(twice)


def test_builtin_rewards() -> None:
    functions = load_reward_functions(GRPOConfig.model_validate({"reward": ["exact_match", "last_number"]}).reward)
    completions = [" 46\n", "12 + 34 = 46.", "", "46 or 1,000"]
    rewards = compute_rewards(functions, [""] * 4, completions, [[]] * 4, {"answer": ["46", 46, "46", "#### 1000"]})
    assert rewards.T.tolist() == [[1, 0, 0, 0], [1, 1, 0, 1]]


def test_forms_of_the_recipe_key() -> None:
    rewards = [
        GRPOConfig.model_validate({"reward": value}).reward
        for value in ("r.py:f", ["r.py:f"], {"function": "r.py:f"}, [{"function": "r.py:f", "weight": 1.0}])
    ]
    assert rewards == [(RewardFunctionConfig(function="r.py:f"),)] * 4
    assert GRPOConfig.model_validate({"reward": ""}).reward == ()


def test_a_gguf_file_beside_the_rewards(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded .gguf file in the working directory does not make it a model directory; elsewhere it does."""
    (file.parent / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CutawayError, match="a model or run directory"):
        load(file, "length")
    monkeypatch.chdir(file.parent)
    load(file, "length")
    (file.parent / "model.safetensors").write_bytes(b"")
    with pytest.raises(CutawayError, match="a model or run directory"):
        load(file, "length")


def test_weights_in_a_directory_above_the_rewards(file: Path) -> None:
    """Weights in a home directory exclude no project below it; a model directory excludes its subdirectories."""
    (file.parent / "project").mkdir()
    rewards = file.rename(file.parent / "project" / "rewards.py")
    for name in ("model.gguf", "model.safetensors"):
        (file.parent / name).write_bytes(b"")
    load(rewards, "length")
    (file.parent / "config.json").write_text("{}")
    with pytest.raises(CutawayError, match="a model or run directory"):
        load(rewards, "length")
