"""The exercises: solutions pass, stubs are not written, and the mistake behind each wrong answer is named."""

import json
import runpy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jupytext
import pytest
import torch
import torch.nn.functional as F

from cutaway.config import config
from cutaway.learn.exercises import Exercise, get_exercise, load_exercises
from cutaway.learn.exercises.learner_file import to_notebook, write_stub
from cutaway.learn.exercises.task import FunctionTask, MistakeSet
from cutaway.learn.runner.grader import LearnerSource, TaskGrade, grade_function, grade_table
from cutaway.learn.runner.worker import grade_file
from cutaway.size.parameters import count_parameters

pytestmark = pytest.mark.unchecked
ALL_EXERCISES = pytest.mark.parametrize("exercise", load_exercises(), ids=lambda exercise: exercise.slug)


@cache
def run_exercise(number: int) -> dict[str, Any]:
    return runpy.run_path(str(get_exercise(number).path))


def grade(exercise: Exercise, text: str, directory: Path) -> dict[str, Any]:
    path = directory / f"{exercise.slug}.py"
    path.write_text(text, encoding="utf-8")
    return asdict(grade_file(run_exercise(exercise.number)["TASKS"], path, 60))


def test_exercises_are_numbered_consecutively_from_1() -> None:
    exercises = load_exercises()
    assert [exercise.number for exercise in exercises] == list(range(1, len(exercises) + 1))
    assert len({exercise.title for exercise in exercises}) == len(exercises)


@ALL_EXERCISES
def test_solution_passes_and_stub_is_not_written(exercise: Exercise, tmp_path: Path) -> None:
    result = grade(exercise, exercise.solution, tmp_path)
    assert result["status"] == "passed", result
    assert not result["notes"]
    assert [task["name"] for task in result["tasks"]] == exercise.required_names
    stub_result = grade(exercise, exercise.stub, tmp_path)
    assert stub_result["status"] == "not_written", stub_result
    assert not stub_result["notes"]
    assert [task["message"] for task in stub_result["tasks"]] == ["is not written yet"] * len(exercise.required_names)


@ALL_EXERCISES
def test_every_simulated_mistake_is_named(exercise: Exercise) -> None:
    for task in run_exercise(exercise.number)["TASKS"]:
        if not isinstance(task, FunctionTask):
            continue
        assert len(task.mistakes) >= 3
        without_mistakes = {task.name: lambda *args, task=task: task.simulate_mistakes(MistakeSet(), *args)}
        assert grade_function(task, without_mistakes, LearnerSource()).status == "correct", (
            f"{task.name}: simulate_mistakes without mistakes must equal the solution"
        )
        for name, mistake in task.mistakes.items():
            assert all(text in task.exercise.solution_functions for text in mistake.replace), f"{task.name}: {name}"
            mistakes = MistakeSet([name])
            namespace = {task.name: lambda *args, task=task, mistakes=mistakes: task.simulate_mistakes(mistakes, *args)}
            result = grade_function(task, namespace, LearnerSource())
            assert result.status in ("incorrect", "error"), f"{task.name}: {name}"
            assert (result.mistakes, result.hints) == ((name,), (mistake.hint,)), f"{task.name}: {name}: {result}"
            assert result.message


@ALL_EXERCISES
def test_metadata_is_complete_and_stub_contains_no_solution(exercise: Exercise) -> None:
    assert 5 <= exercise.minutes <= 60
    assert len(exercise.hints) >= 3
    assert exercise.instructions.startswith(f"# {exercise.number} · {exercise.title}")
    assert "TASKS" not in exercise.stub
    assert "solution" not in exercise.stub
    for line in exercise.solution.splitlines():  # no line of a solution remains in the stub
        if line.strip().startswith("return ") and "rms" not in line and "square" not in line:
            assert line not in exercise.stub.splitlines()
    compile(exercise.stub, exercise.slug, "exec")


@ALL_EXERCISES
def test_notebook_stub_equals_jupytext_conversion(exercise: Exercise, tmp_path: Path) -> None:
    path, _ = write_stub(exercise, tmp_path, as_notebook=True)
    expected = jupytext.reads(exercise.stub, fmt="py:percent").cells
    actual = jupytext.read(path).cells
    assert [(cell.cell_type, cell.source) for cell in actual] == [
        (cell.cell_type, cell.source.strip("\n")) for cell in expected
    ]
    assert grade_file(run_exercise(exercise.number)["TASKS"], path, 60).status == "not_written"


DIAGONAL, CHANGED = "off by one: diagonal masked", "the changed position compared too"
TWO_MISTAKES = ["n−1 variance", "ε outside the root"]
GLOBAL_MAXIMUM, WRONG_AXIS = "one maximum for all", "softmax on the wrong axis"
QUERY_HEADS = "query heads instead of kv heads"
LEARNER_CODE = [
    (1, "attention_weights", "return torch.softmax(q @ k.transpose(1, 2), dim=-1)", ["no √d"]),
    (
        1,
        "attention_weights",
        "return torch.softmax(q @ k.mT / q.size(-1) ** 0.5, dim=1)",
        ["softmax on the wrong axis"],
    ),
    (1, "attention_weights", "return torch.softmax(q @ k.mT, dim=-2)", ["no √d", WRONG_AXIS]),
    (
        1,
        "attention_weights",
        "s = q @ k.mT / q.size(-1) ** 0.5; e = (s - s.max()).exp(); return e / e.sum(-1, True)",
        [GLOBAL_MAXIMUM],
    ),
    (2, "causal_mask", "return torch.ones(length, length).tril(-1).bool()", [DIAGONAL]),
    (2, "cached_mask", "return causal_mask(num_cached + num_new)[:num_new]", ["new tokens start at position 0"]),
    (2, "masked_weights", "return scores.softmax(-1) * mask", ["mask after softmax"]),
    (3, "split_heads", "b, t, d = x.shape; return x.reshape(b, n_heads, t, d // n_heads)", ["view without transpose"]),
    (3, "split_heads", "b, t, d = x.shape; return x.view(b, n_heads, t, -1)", ["view without transpose"]),
    (4, "qkvo_params", "return 2 * d_model * d_head * (n_heads + n_kv_heads)", ["biases forgotten"]),
    (4, "qkvo_params", "n = n_heads * d_head; return 4 * d_model * n + bias * (3 * n + d_model)", ["GQA forgotten"]),
    (5, "ffn_params", "return 2 * d_model * d_hidden + bias * (d_hidden + d_model)", ["third SwiGLU matrix"]),
    (6, "layer_norm", "return gamma * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + eps) + beta", TWO_MISTAKES),
    (
        7,
        "pre_norm",
        "x = norm1(x); x = x + attention(x); x = norm2(x); return x + ffn(x)",
        ["norm on the residual stream"],
    ),
    (8, "kv_cache_bytes", "return n_layers * n_kv_heads * d_head * tokens * batch * bytes_per_value", ["missing K+V"]),
    (8, "kv_cache_bytes", "return 2 * n_layers * n_heads * d_head * tokens * batch * bytes_per_value", [QUERY_HEADS]),
    (8, "bytes_to_gib", "return n_bytes / 1e9", ["GB and GiB"]),
    (
        9,
        "build_attention_mask",
        "return torch.ones(num_queries, not_padding.shape[1]).tril().bool() & not_padding[:, None]",
        ["always causal"],
    ),
    (
        10,
        "leaks_future",
        "a = torch.arange(9)[None]; return bool((model(a) - model(a + a // 6)).abs().max() > 1e-4)",
        [CHANGED],
    ),
    (11, "softmax_backward", "return grad * (p - p ** 2)", ["only the diagonal"]),
    (
        11,
        "rmsnorm_backward",
        "r = (x ** 2).mean(1, True).add(eps).sqrt(); return {'x': grad * gamma / r, 'gamma': (grad * x / r).sum(0)}",
        ["r treated as a constant"],
    ),
    (
        11,
        "linear_backward",
        "w = torch.einsum('to,ti->toi', grad, x).mean(0); return dict(x=grad @ weight, weight=w, bias=grad.mean(0))",
        ["mean over the tokens"],
    ),
    (
        11,
        "ffn_backward",
        "h = (w1 @ x + b1).clamp(0); g = w2.T @ grad;"
        " return dict(x=w1.T @ g, w1=g[:, None] * x, b1=g, w2=grad[:, None] * h, b2=grad)",
        ["slope forgotten"],
    ),
]


@pytest.mark.parametrize(
    ("number", "name", "line", "mistakes"), LEARNER_CODE, ids=[f"{n}-{name}-{m}" for n, name, _, m in LEARNER_CODE]
)
def test_mistake_in_learner_code_is_named(
    number: int, name: str, line: str, mistakes: list[str], tmp_path: Path
) -> None:
    exercise = get_exercise(number)
    head = next(cell for cell in exercise.solution.split("# %%") if f"def {name}(" in cell)
    signature = head[head.index("def ") : head.index('"""')].rstrip()
    text = f"{exercise.solution}\n# %%\n{signature}\n    {line}\n"
    result = {task["name"]: task for task in grade(exercise, text, tmp_path)["tasks"]}[name]
    assert result["status"] in ("incorrect", "error")
    assert list(result["mistakes"]) == mistakes


SWAPPED = "old = split_heads\ndef split_heads(x, n): return old(x, n).mT.clone() if x.shape[1] == 5 else old(x, n)"
ONE_VALUE = (
    "old = attention_weights\ndef attention_weights(q, k):\n"
    "    w = old(q, k)\n    if len(q) > 1: w[1, 0, 0] = 42\n    return w"
)
IN_PLACE = "old = layer_norm\ndef layer_norm(x, *rest):\n    y = old(x, *rest)\n    x += 1\n    return y"
HALVED = "def kv_cache_bytes(a, b, c, d, e, f, g): return 4 * a * c * d * e * f * g / 2"


@pytest.mark.parametrize(
    ("number", "body", "message"),
    [
        (1, ONE_VALUE, "returned 42 at batch 1, query 0, key 0; expected 0.19613"),
        (1, "def attention_weights(q, k): q @ k.mT", "returned None: is there a `return`?"),
        (1, "def attention_weights(q): return q", "cannot be called with the signature of the stub"),
        (2, "def causal_mask(n): return [[True] * n] * n", "returned a list; expected a tensor"),
        (2, "def causal_mask(n): return torch.ones(n, n).tril()", "returned float elements; expected bool elements"),
        (
            3,
            "def split_heads(x, n): return x",
            "returned shape (1, 2, 4); expected (1, 2, 2, 2) (batch, head, time, width)",
        ),
        (3, SWAPPED, "axes time and width seem to be swapped"),
        (6, IN_PLACE, "modified `x` in place"),
        (8, HALVED, "// of ints"),
    ],
)
def test_message_describes_first_difference(number: int, body: str, message: str, tmp_path: Path) -> None:
    exercise = get_exercise(number)
    assert message in grade(exercise, f"{exercise.solution}\n{body}", tmp_path)["tasks"][0]["message"]


def test_error_has_learner_line_as_location(tmp_path: Path) -> None:
    text = "\ndef split_heads(x, n_heads):\n    return x.transpose(1, 2).view(x.shape)\n"
    result = grade(get_exercise(3), text, tmp_path)["tasks"][0]
    assert result["location"] == "line 3 of 03-heads.py: `return x.transpose(1, 2).view(x.shape)`"
    assert "use reshape" in result["hints"][0]


def test_partially_written_file(tmp_path: Path) -> None:
    exercise = get_exercise(1)
    done = exercise.stub.replace('raise NotImplementedError("not written yet")', "return attention_weights(q, k) @ v")
    result = grade(
        exercise, exercise.stub + "\ndef attention(q, k, v):\n    return attention_weights(q, k) @ v\n", tmp_path
    )
    assert [task["message"] for task in result["tasks"]] == [
        "is not written yet",
        "calls attention_weights, which is not written yet",
    ]
    assert result["status"] == "partial"
    half = exercise.solution + '\ndef attention(q, k, v):\n    raise NotImplementedError("not written yet")\n'
    result = grade(exercise, half, tmp_path)
    assert result["status"] == "partial"
    assert [task["status"] for task in result["tasks"]] == ["correct", "not_written"]
    assert grade(exercise, done, tmp_path)["status"] == "failed"
    renamed = grade(exercise, exercise.solution.replace("def attention(", "def attend("), tmp_path)
    assert renamed["tasks"][1]["message"].startswith("is not defined")


def test_wrong_diagnosis_does_not_reveal_the_answer() -> None:
    table = run_exercise(10)["TASKS"][-1]
    correct = run_exercise(10)["DIAGNOSIS"]

    def grade_with(**changes: str) -> TaskGrade:
        return grade_table(table, {"DIAGNOSIS": {**correct, **changes}})

    assert grade_with().status == "correct"
    assert grade_with(A="no √d", B="no √d").message == "A does not have 'no √d'; B does not have 'no √d'"
    assert grade_with(A="no √d", B="no √d").hints == (f"no √d: {table.explanations['no √d']}",)
    assert grade_with(A="flu").message == f"has 'flu' for A; the valid names are {', '.join(table.explanations)}"
    assert grade_with(A="?", C="?").message == "is correct so far; A, C are still '?'"
    assert grade_with(**dict.fromkeys("ABCDEF", "?")).message == "is not written yet"
    assert grade_table(table, {}).status == "missing"
    assert grade_table(table, {"DIAGNOSIS": ["no √d"]}).message.startswith("is a list; expected a dict")


@pytest.mark.parametrize("name", ["torch.softmax", "torch.nn.functional.softmax", "torch.Tensor.sum"])
def test_replaced_torch_function_is_an_error(name: str, tmp_path: Path) -> None:
    exercise = get_exercise(1)
    namespace, key = resolve_name(name.rpartition(".")[0]), name.rpartition(".")[2]
    original = vars(namespace).get(key)
    try:
        result = grade(exercise, f"{exercise.solution}\n{name} = lambda *a, **k: a[0]\n", tmp_path)
    finally:
        delattr(namespace, key) if original is None else setattr(namespace, key, original)
    assert result["message"].startswith(f"replaces {name}, so that results are unreliable")
    assert grade(exercise, exercise.solution, tmp_path)["status"] == "passed"


def test_notebook_error_location_names_the_cell(tmp_path: Path) -> None:
    text = get_exercise(1).solution.replace("return attention_weights(q, k) @ v", "return 1 / 0")
    notebook = to_notebook(text.replace("import math", "%matplotlib inline\nimport math"))
    (tmp_path / "mine.ipynb").write_text(json.dumps(notebook))
    result = asdict(grade_file(run_exercise(1)["TASKS"], tmp_path / "mine.ipynb", 60))
    assert result["tasks"][0]["status"] == "correct"
    assert result["tasks"][1]["location"] == "line 3 of cell 4: `return 1 / 0`"


@pytest.mark.parametrize("name", ["softmax_backward", "rmsnorm_backward", "linear_backward", "ffn_backward"])
def test_backward_solutions_equal_autograd(name: str) -> None:
    """The expected values of exercise 11 are gradients, and those of its text are right."""
    forward = {
        "softmax_backward": lambda s: s.softmax(-1),
        "rmsnorm_backward": lambda x, gamma, eps: F.rms_norm(x, x.shape[-1:], gamma, eps),
        "linear_backward": lambda x, weight, bias: F.linear(x, weight, bias),
        "ffn_backward": lambda x, w1, b1, w2, b2: w2 @ (w1 @ x + b1).relu() + b2,
    }[name]
    exercise = run_exercise(11)
    [cases] = [task.cases for task in exercise["TASKS"] if task.name == name]
    for case in cases:
        grad, *args = case.args
        inputs = [arg.log().clamp(min=-1e3) if name == "softmax_backward" else arg for arg in args]
        inputs += [torch.zeros_like(grad if grad.ndim == 1 else grad[0])] * name.startswith(("linear", "ffn"))
        tensors = [arg.clone().requires_grad_() for arg in inputs if isinstance(arg, torch.Tensor)]
        expected = torch.autograd.grad(
            forward(*tensors, *(arg for arg in inputs if isinstance(arg, float))), tensors, grad
        )
        result = exercise[name](*case.args)
        values = [result] if isinstance(result, torch.Tensor) else list(result.values())
        assert [value.shape for value in values] == [value.shape for value in expected]
        assert max((one - other).abs().max() for one, other in zip(values, expected, strict=True)) < 1e-12


def test_worked_examples_of_the_backward_exercise() -> None:
    exercise = run_exercise(11)
    softmax, rmsnorm, _, ffn = (exercise[task.name](*task.cases[0].args) for task in exercise["TASKS"])
    assert softmax.tolist() == pytest.approx([0.25, -0.15, -0.10])
    assert rmsnorm["x"][0].tolist() == pytest.approx([0.181, -0.136], abs=5e-4)
    assert ffn["x"].tolist() == [4, 0]


def test_worked_examples_equal_count_parameters() -> None:
    qkvo, ffn = run_exercise(4)["qkvo_params"], run_exercise(5)["ffn_params"]
    gpt2, llama = (count_parameters(config(name)).per_layer[0] for name in ("gpt2", "llama-3-8b"))
    assert qkvo(768, 12, 12, 64, True) == gpt2.attention == 2_362_368
    assert qkvo(4096, 32, 8, 128, False) == llama.attention
    assert ffn(4096, 14336, True, False) == llama.ffn == 176_160_768
    assert ffn(768, 3072, False, True) == gpt2.ffn
    assert ffn(4096, 16384, False, False) == 134_217_728
    assert run_exercise(8)["kv_cache_bytes"](32, 32, 8, 128, 8192, 1, 2) == 2**30
