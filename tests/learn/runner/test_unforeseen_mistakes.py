"""Hints for mistakes that an exercise does not list: they name the mistake of at least eight of ten wrong functions."""

import runpy
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutaway.learn.exercises import get_exercise
from cutaway.learn.runner.grader import TaskGrade
from cutaway.learn.runner.value_relations import NamedArray, describe_relation
from cutaway.learn.runner.worker import grade_file

pytestmark = pytest.mark.unchecked


@dataclass(frozen=True)
class Wrong:
    """A wrong function: the exercise, what is wrong, the body, and texts of which all must be in the hints."""

    exercise: int
    mistake: str
    function: str
    body: str
    named_by: list[str]


TABLES = tomllib.loads(Path(__file__).with_name("unforeseen_mistakes.toml").read_text(encoding="utf-8"))["wrong"]
WRONG_FUNCTIONS = [Wrong(**table) for table in TABLES]


@cache
def load_tasks(number: int) -> Any:
    return runpy.run_path(str(get_exercise(number).path))["TASKS"]


def grade(number: int, function: str, body: str, directory: Path) -> TaskGrade:
    """Grade the solution of an exercise with one function replaced."""
    exercise = get_exercise(number)
    cell = next(cell for cell in exercise.solution.split("# %%") if f"def {function}(" in cell)
    signature = cell[cell.index("def ") : cell.index('"""')].rstrip()
    path = directory / "mine.py"
    lines = [exercise.solution, "# %%", signature, body.removeprefix("\n"), ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    report = grade_file(load_tasks(number), path, 60)
    return {task.name: task for task in report.tasks}[function]


@pytest.mark.parametrize("part", ["first ten", pytest.param("last ten", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("exercise", [1, 3, 6])
def test_hints_name_eight_of_ten_unforeseen_mistakes(exercise: int, part: str, tmp_path: Path) -> None:
    of_exercise = [wrong for wrong in WRONG_FUNCTIONS if wrong.exercise == exercise]
    wrong_functions = of_exercise[:10] if part == "first ten" else of_exercise[10:]
    assert len(wrong_functions) == 10
    returned = [line.strip() for line in get_exercise(exercise).solution_functions.splitlines() if "return " in line]
    solution_lines = [line.removeprefix("return ") for line in returned if len(line) > 20]
    unnamed = {}
    for wrong in wrong_functions:
        result = grade(wrong.exercise, wrong.function, wrong.body, tmp_path)
        assert result.status in ("incorrect", "error"), wrong.mistake
        assert not result.mistakes, f"{wrong.mistake} is a listed mistake"
        hints = "\n".join(result.hints)
        assert not any(line in hints for line in solution_lines), hints  # the solution is not shown
        if not all(text in hints for text in wrong.named_by):
            unnamed[wrong.mistake] = hints
    assert len(unnamed) <= 2, unnamed


PARAMS = """
    q, kv = d_model * n_heads * d_head, d_model * n_kv_heads * d_head
    return 3 * q + 2 * kv + bias * ((n_heads + 2 * n_kv_heads) * d_head + d_model)"""
PRE_NORM = """
    x = x + attention(norm2(x))
    return x + ffn(norm2(x))"""
CACHE = """
    return 2 * n_layers * n_kv_heads * d_head ** 2 * tokens * batch * bytes_per_value"""
LATE_SCALE = """
    scores = q @ k.transpose(-2, -1)
    return scores.softmax(-1) / math.sqrt(q.shape[-1])"""
RESHAPED_KEYS = """
    scores = q @ k.reshape(k.shape[0], k.shape[2], k.shape[1]) / math.sqrt(q.shape[-1])
    return scores.softmax(-1)"""
SCALED_TWICE = """
    return attention_weights(q / math.sqrt(q.shape[-1]), k) @ v"""
CONCATENATED = """
    past = torch.ones(num_new, num_cached, dtype=torch.bool)
    return torch.cat([causal_mask(num_new), past], dim=1)"""
UNGROUPED_VALUES = """
    q = d_model * n_heads * d_head
    kv = d_model * n_kv_heads * d_head + d_model * n_heads * d_head
    b = (n_heads + 2 * n_kv_heads) * d_head + d_model
    return 2 * q + kv + (b if bias else 0)"""
CONDITION = """
    q, kv = d_model * n_heads * d_head, d_model * n_kv_heads * d_head
    b = (n_heads + 2 * n_kv_heads) * d_head + d_model
    return 2 * q + 2 * kv + b if bias else 0"""
SQUARE_OUTPUT = """
    q, kv, o = d_model * n_heads * d_head, d_model * n_kv_heads * d_head, d_model * d_model
    b = (n_heads + 2 * n_kv_heads) * d_head + d_model
    return q + 2 * kv + o + (b if bias else 0)"""
WITH_BIASES = """
    full = qkvo_params(d_model, n_heads, n_heads, d_head, True)
    return 1 - qkvo_params(d_model, n_heads, n_kv_heads, d_head, True) / full"""
FIXED_AXIS = """
    mu = x.mean(dim=1, keepdim=True)
    var = ((x - mu) ** 2).mean(dim=1, keepdim=True)
    return gamma * (x - mu) / torch.sqrt(var + eps) + beta"""
OVERWRITTEN = """
    x = norm1(x)
    x = x + attention(x)
    return x + ffn(norm2(x))"""
EXCHANGED = """
    x = norm2(x + attention(x))
    return norm1(x + ffn(x))"""

FIRST_FACTOR = """
    n = 3 if gated else 2 * d_model * d_hidden
    return n + ((2 if gated else 1) * d_hidden + d_model if bias else 0)"""
BIAS_SIZES = """
    n = (3 if gated else 2) * d_model * d_hidden
    return n + ((2 if gated else 1) * d_model + d_hidden if bias else 0)"""
HEAD_DIM = """
    d_head = d_model // n_kv_heads
    kv = n_kv_heads * d_head
    return ffn_params(d_model, d_hidden, gated, False) / (2 * d_model * d_model + 2 * d_model * kv)"""
ONE_SEQUENCE = """
    per_token = kv_cache_bytes(n_layers, n_heads, n_kv_heads, d_head, 1, 1, bytes_per_value)
    return int(gib * 2**30 // per_token)"""


@pytest.mark.parametrize(
    ("number", "function", "body", "hint"),
    [
        (4, "qkvo_params", PARAMS, "`3` in `3 * q`: the result is correct with 2"),
        (7, "pre_norm", PRE_NORM, "with `norm1` in place of `norm2`"),
        (8, "kv_cache_bytes", CACHE, "`d_head ** 2`: the result is correct without"),
        (1, "attention_weights", LATE_SCALE, "division by `math.sqrt(q.shape[-1])` moved to line"),
        (1, "attention_weights", RESHAPED_KEYS, "with transpose(-2, -1) in place of reshape"),
        (1, "attention", SCALED_TWICE, "without this operation: `q` alone"),
        (2, "cached_mask", CONCATENATED, "with its parts in reversed order"),
        (
            4,
            "qkvo_params",
            UNGROUPED_VALUES,
            "`n_heads` in `d_model * n_heads`: the result is correct with `n_kv_heads`",
        ),
        (4, "qkvo_params", CONDITION, "with parentheses: `(b if bias else 0)`"),
        (4, "qkvo_params", SQUARE_OUTPUT, "the right value depends on `d_head` and `n_heads` too"),
        (4, "gqa_savings", WITH_BIASES, "with False in place of True, here and in line"),
        (5, "ffn_params", FIRST_FACTOR, "with parentheses: `(3 if gated else 2)`"),
        (
            5,
            "ffn_params",
            BIAS_SIZES,
            "`(2 if gated else 1) * d_model`: the result is correct with `d_model` and `d_hid",
        ),
        (5, "ffn_attention_ratio", HEAD_DIM, "n_kv_heads heads of d_model / n_heads dimensions"),
        (8, "bytes_to_gib", "\n    return n_bytes / 1024 * 1024 * 1024", "`n_bytes / (1024 * 1024 * 1024)`"),
        (8, "max_cached_tokens", ONE_SEQUENCE, "with `batch` in place of 1"),
        (6, "layer_norm", FIXED_AXIS, "with axis -1 in place of 1, here and in line"),
        (7, "pre_norm", OVERWRITTEN, "with the argument `x`, which has been assigned another value"),
        (7, "post_norm", EXCHANGED, "with `norm1` and `norm2` exchanged in lines"),
    ],
)
def test_hints_of_other_exercises(number: int, function: str, body: str, hint: str, tmp_path: Path) -> None:
    assert hint in "\n".join(grade(number, function, body, tmp_path).hints)


@pytest.mark.parametrize(
    ("number", "function", "body", "line"),
    [
        (
            1,
            "attention_weights",
            "\n    q /= math.sqrt(q.shape[-1])\n    return (q @ k.mT).softmax(-1)",
            "q /= math.sqrt",
        ),
        (2, "masked_weights", "\n    return scores.masked_fill_(~mask, float('-inf')).softmax(-1)", "return scores"),
        (7, "pre_norm", "\n    x += attention(norm1(x))\n    return x + ffn(norm2(x))", "x += attention(norm1(x))"),
    ],
)
def test_modified_argument_has_its_line(number: int, function: str, body: str, line: str, tmp_path: Path) -> None:
    result = grade(number, function, body, tmp_path)
    assert "returned the correct value, but modified `" in result.message
    [hint] = result.hints
    assert f": `{line}" in hint
    assert " modifies `" in hint


def test_location_is_the_line_of_the_learner(tmp_path: Path) -> None:
    result = grade(
        6, "rms_norm", "\n    ms = (x ** 3).mean(-1, keepdim=True)\n    return gamma * x / (ms + eps).sqrt()", tmp_path
    )
    [line] = [n for n, text in enumerate((tmp_path / "mine.py").read_text().splitlines(), 1) if "x ** 3" in text]
    assert f"line {line} of mine.py: `3` in `x ** 3`" in result.hints[-1]


def test_search_does_not_print_and_does_not_change_the_grade(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = '\n    print("once per case")\n    return gamma * x * (x.square().mean(-1, keepdim=True) + eps).sqrt()'
    result = grade(6, "rms_norm", body, tmp_path)
    assert capfd.readouterr().out.count("once per case") == 6
    assert result.status == "incorrect"
    assert "with a division in place of the multiplication" in result.hints[-1]


def test_caller_of_a_wrong_function_gets_no_other_hint(tmp_path: Path) -> None:
    exercise = get_exercise(1)
    path = tmp_path / "mine.py"
    path.write_text(exercise.solution.replace("/ math.sqrt(q.shape[-1])", "* math.sqrt(q.shape[-1])"))
    weights, output = grade_file(load_tasks(1), path, 60).tasks
    assert "with a division in place of the multiplication" in weights.hints[-1]
    assert output.hints == ("it calls attention_weights, which is wrong: correct that first",)


def test_incomplete_function_gets_the_next_step(tmp_path: Path) -> None:
    [hint] = grade(6, "rms_norm", "\n    return x", tmp_path).hints
    assert hint == "the steps are right, but not complete: a correct solution multiplies `gamma` by `x`"


def test_endless_changed_code_is_stopped(tmp_path: Path) -> None:
    body = "\n    n = 0\n    while n < 3:\n        n = n + 1\n    return gamma * x / x.square().mean(-1, True) * n / 3"
    assert grade(6, "rms_norm", body, tmp_path).status == "incorrect"


EXPECTED = np.random.default_rng(0).normal(size=(2, 3, 4))
GAIN = NamedArray("gamma", np.array([0.5, 2.0, 3.0, -1.0]))


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        (-EXPECTED, "has the opposite sign everywhere"),
        (2.5 * EXPECTED, "is 2.5 times the expected value everywhere"),
        (EXPECTED + 3, "differs from the expected value by 3 everywhere"),
        (EXPECTED * GAIN.value, "is the expected value multiplied by `gamma` once too often"),
        (EXPECTED / GAIN.value, "is the expected value without the multiplication by `gamma`"),
        (EXPECTED - GAIN.value, "`gamma` is not added"),
        (EXPECTED.swapaxes(1, 2), "is transposed: its axes are axis 0, axis 2, axis 1"),
        (EXPECTED[:, :, ::-1], "in reversed order along axis 2"),
        (EXPECTED[:, [2, 0, 1]], "has the right numbers in another order along axis 1: 2, 0, 1"),
        (np.pad(EXPECTED[..., :-1], ((0, 0), (0, 0), (1, 0))), "is shifted by one along axis 2: the value of axis 2 n"),
        (EXPECTED[:, :-1], "lacks the last 1 of 3 along axis 1"),
        (EXPECTED[:, 1:], "lacks the first 1 of 3 along axis 1"),
        (EXPECTED.reshape(6, 4), "has the right numbers in the right order, in another shape"),
        (np.repeat(EXPECTED, 2, 1), "has 6 along axis 1 in place of 3: each is repeated 2 times"),
        (EXPECTED.mean(1), "is averaged over axis 1"),
        (np.exp(EXPECTED), "is the exponential of the expected value"),
        (np.where(EXPECTED > 0, np.nan, EXPECTED), "NaN values of 24"),
        (EXPECTED * np.array([1.0, 2.0, 3.0])[:, None], "each row is scaled by a factor of 1 to 3"),
        (EXPECTED + np.array([1.0, 2.0, 3.0])[:, None], "each row is shifted by 1 to 3"),
        (np.where(np.arange(3)[:, None] == 1, 9.0, EXPECTED), "is right except at axis 1 1"),
        (EXPECTED, None),
    ],
)  # fmt: skip
def test_relations_of_a_wrong_value_are_described(actual: np.ndarray, text: str | None) -> None:
    relation = describe_relation(actual, EXPECTED, known=[GAIN])
    assert relation is None if text is None else text in str(relation)


def test_sums_and_masks_are_described() -> None:
    weights = np.exp(EXPECTED[..., :3]) / np.exp(EXPECTED[..., :3]).sum(-1, keepdims=True)
    columns = np.exp(EXPECTED[..., :3]) / np.exp(EXPECTED[..., :3]).sum(-2, keepdims=True)
    axes = ("batch", "query", "key")
    assert describe_relation(columns, weights, axes) == "sums to 1 along query; expected along key"
    masked = np.tril(weights)
    assert "is zero where key is later than query" in str(describe_relation(masked * 1.1, weights, axes))
    assert "a mask is missing" in str(describe_relation(weights, masked / masked.sum(-1, keepdims=True), axes))
