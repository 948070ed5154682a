"""The exercises: solutions pass, stubs are not written yet, and each wrong answer is told its own mistake by name."""

import json
import runpy
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jupytext
import pytest

from cutaway.config import config
from cutaway.learn.exercises import Exercise, get_exercise, load_exercises
from cutaway.learn.exercises.learner_file import to_notebook, write_stub
from cutaway.learn.exercises.task import FunctionTask, MistakeSet
from cutaway.learn.runner.grader import LearnerSource, TaskGrade, grade_function, grade_table
from cutaway.learn.runner.worker import grade_file
from cutaway.size.parameters import count_parameters

pytestmark = pytest.mark.unchecked
EACH = pytest.mark.parametrize("one", load_exercises(), ids=lambda one: one.slug)


@cache
def run_exercise(number: int) -> dict[str, Any]:
    return runpy.run_path(str(get_exercise(number).path))


def grade(one: Exercise, text: str, folder: Path) -> dict[str, Any]:
    path = folder / f"{one.slug}.py"
    path.write_text(text, encoding="utf-8")
    return grade_file(run_exercise(one.number)["TASKS"], path, 60)


def test_there_are_ten() -> None:
    assert [one.number for one in load_exercises()] == list(range(1, 11))
    assert len({one.title for one in load_exercises()}) == 10


@EACH
def test_the_solution_passes_and_the_stub_is_not_written_yet(one: Exercise, tmp_path: Path) -> None:
    found = grade(one, one.solution, tmp_path)
    assert found["status"] == "passed", found
    assert not found["notes"]
    assert [each["name"] for each in found["tasks"]] == one.required_names
    blank = grade(one, one.stub, tmp_path)
    assert blank["status"] == "not_written", blank
    assert not blank["notes"]
    assert [each["message"] for each in blank["tasks"]] == ["is not written yet"] * len(one.required_names)


@EACH
def test_every_wrong_answer_is_told_its_own_mistake(one: Exercise) -> None:
    for task in run_exercise(one.number)["TASKS"]:
        if not isinstance(task, FunctionTask):
            continue
        assert len(task.mistakes) >= 3
        none = {task.name: lambda *args, task=task: task.simulate_mistakes(MistakeSet(), *args)}
        assert grade_function(task, none, LearnerSource()).status == "correct", (
            f"{task.name}: with no mistake made it is the solution"
        )
        for name, hint in task.mistakes.items():
            made = MistakeSet([name])
            crooked = {task.name: lambda *args, task=task, made=made: task.simulate_mistakes(made, *args)}
            verdict = grade_function(task, crooked, LearnerSource())
            assert verdict.status in ("incorrect", "error"), f"{task.name}: {name}"
            assert (verdict.mistakes, verdict.hints) == ((name,), (hint,)), f"{task.name}: {name}: {verdict}"
            assert verdict.message


@EACH
def test_an_exercise_says_what_it_is_about_and_gives_nothing_away(one: Exercise) -> None:
    assert 5 <= one.minutes <= 60
    assert len(one.hints) >= 3
    assert one.instructions.startswith(f"# {one.number} · {one.title}")
    assert "TASKS" not in one.stub
    assert "solution" not in one.stub
    for line in one.solution.splitlines():  # no line of a solution is left in the stub, but the cells around it
        if line.strip().startswith("return ") and "rms" not in line and "square" not in line:
            assert line not in one.stub.splitlines()
    compile(one.stub, one.slug, "exec")


@EACH
def test_a_stub_opens_in_jupyter_as_it_is(one: Exercise, tmp_path: Path) -> None:
    path, _ = write_stub(one, tmp_path, as_notebook=True)
    theirs = jupytext.reads(one.stub, fmt="py:percent").cells
    ours = jupytext.read(path).cells
    assert [(cell.cell_type, cell.source) for cell in ours] == [
        (cell.cell_type, cell.source.strip("\n")) for cell in theirs
    ]
    assert grade_file(run_exercise(one.number)["TASKS"], path, 60)["status"] == "not_written"


NOT_ITSELF, CHANGED = "off by one: a token does not see itself", "the changed position compared too"
BOTH = ["n−1 variance", "ε outside the root"]
HIGHEST, WRONG_AXIS = "one maximum for all", "softmax on the wrong axis"
QUERY_HEADS = "query heads instead of kv heads"
WRITTEN = [
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
        [HIGHEST],
    ),
    (2, "causal_mask", "return torch.ones(length, length).tril(-1).bool()", [NOT_ITSELF]),
    (2, "cached_mask", "return causal_mask(num_cached + num_new)[:num_new]", ["the new tokens begin at position 0"]),
    (2, "masked_weights", "return scores.softmax(-1) * mask", ["mask after softmax"]),
    (3, "split_heads", "b, t, d = x.shape; return x.reshape(b, n_heads, t, d // n_heads)", ["view without transpose"]),
    (3, "split_heads", "b, t, d = x.shape; return x.view(b, n_heads, t, -1)", ["view without transpose"]),
    (4, "qkvo_params", "return 2 * d_model * d_head * (n_heads + n_kv_heads)", ["biases forgotten"]),
    (4, "qkvo_params", "n = n_heads * d_head; return 4 * d_model * n + bias * (3 * n + d_model)", ["GQA forgotten"]),
    (5, "ffn_params", "return 2 * d_model * d_hidden + bias * (d_hidden + d_model)", ["third SwiGLU matrix"]),
    (6, "layer_norm", "return gamma * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + eps) + beta", BOTH),
    (7, "pre_norm", "x = norm1(x); x = x + attention(x); x = norm2(x); return x + ffn(x)", ["norm on the stream"]),
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
]


@pytest.mark.parametrize(
    ("number", "name", "line", "mistakes"), WRITTEN, ids=[f"{n}-{name}-{m}" for n, name, _, m in WRITTEN]
)
def test_what_learners_write_is_told_by_name(
    number: int, name: str, line: str, mistakes: list[str], tmp_path: Path
) -> None:
    one = get_exercise(number)
    head = next(each for each in one.solution.split("# %%") if f"def {name}(" in each)
    signature = head[head.index("def ") : head.index('"""')].rstrip()
    text = f"{one.solution}\n# %%\n{signature}\n    {line}\n"
    found = {each["name"]: each for each in grade(one, text, tmp_path)["tasks"]}[name]
    assert found["status"] in ("incorrect", "error")
    assert list(found["mistakes"]) == mistakes


SWAPPED = "old = split_heads\ndef split_heads(x, n): return old(x, n).mT.clone() if x.shape[1] == 5 else old(x, n)"
ONE_VALUE = (
    "old = attention_weights\ndef attention_weights(q, k):\n"
    "    w = old(q, k)\n    if len(q) > 1: w[1, 0, 0] = 42\n    return w"
)
IN_PLACE = "old = layer_norm\ndef layer_norm(x, *rest):\n    y = old(x, *rest)\n    x += 1\n    return y"
HALVED = "def kv_cache_bytes(a, b, c, d, e, f, g): return 4 * a * c * d * e * f * g / 2"


@pytest.mark.parametrize(
    ("number", "body", "said"),
    [
        (1, ONE_VALUE, "gave 42 at batch 1, query 0, key 0, and 0.19613 is right"),
        (1, "def attention_weights(q, k): q @ k.mT", "gave nothing (None): is there a `return`?"),
        (1, "def attention_weights(q): return q", "cannot be called as the stub has it"),
        (2, "def causal_mask(n): return [[True] * n] * n", "gave a list where a tensor was asked"),
        (2, "def causal_mask(n): return torch.ones(n, n).tril()", "where True and False were asked"),
        (
            3,
            "def split_heads(x, n): return x",
            "gave shape (1, 2, 4), and (1, 2, 2, 2) (batch, head, time, width) is right",
        ),
        (3, SWAPPED, "it looks as if time and width had changed places"),
        (6, IN_PLACE, "changed its argument on the way"),
        (8, HALVED, "// of whole numbers"),
    ],
)
def test_the_first_difference_is_told_in_words(number: int, body: str, said: str, tmp_path: Path) -> None:
    one = get_exercise(number)
    assert said in grade(one, f"{one.solution}\n{body}", tmp_path)["tasks"][0]["message"]


def test_an_error_is_told_by_the_learners_own_line(tmp_path: Path) -> None:
    text = "\ndef split_heads(x, n_heads):\n    return x.transpose(1, 2).view(x.shape)\n"
    found = grade(get_exercise(3), text, tmp_path)["tasks"][0]
    assert found["location"] == "line 3 of 03-heads.py: return x.transpose(1, 2).view(x.shape)"
    assert "use reshape" in found["hints"][0]


def test_what_is_partly_written_is_judged_so_far(tmp_path: Path) -> None:
    one = get_exercise(1)
    done = one.stub.replace('raise NotImplementedError("not written yet")', "return attention_weights(q, k) @ v")
    found = grade(one, one.stub + "\ndef attention(q, k, v):\n    return attention_weights(q, k) @ v\n", tmp_path)
    assert [each["message"] for each in found["tasks"]] == [
        "is not written yet",
        "calls attention_weights, which is not written yet",
    ]
    assert found["status"] == "partial"
    half = one.solution + '\ndef attention(q, k, v):\n    raise NotImplementedError("not written yet")\n'
    found = grade(one, half, tmp_path)
    assert found["status"] == "partial"
    assert [each["status"] for each in found["tasks"]] == ["correct", "not_written"]
    assert grade(one, done, tmp_path)["status"] == "failed"
    renamed = grade(one, one.solution.replace("def attention(", "def attend("), tmp_path)
    assert renamed["tasks"][1]["message"].startswith("is not there")


def test_a_diagnosis_is_told_what_is_wrong_and_not_what_is_right() -> None:
    table = run_exercise(10)["TASKS"][-1]
    right = run_exercise(10)["DIAGNOSIS"]

    def verdict(**changed: str) -> TaskGrade:
        return grade_table(table, {"DIAGNOSIS": {**right, **changed}})

    assert verdict().status == "correct"
    assert verdict(A="no √d", B="no √d").message == "A does not have 'no √d'; B does not have 'no √d'"
    assert verdict(A="no √d", B="no √d").hints == (f"no √d: {table.explanations['no √d']}",)
    assert verdict(A="flu").message == f"says 'flu' of A; the names are {', '.join(table.explanations)}"
    assert verdict(A="?", C="?").message == "is right so far; A, C still stand at '?'"
    assert verdict(**dict.fromkeys("ABCDEF", "?")).message == "is not written yet"
    assert grade_table(table, {}).status == "missing"
    assert grade_table(table, {"DIAGNOSIS": ["no √d"]}).message.startswith("is a list where a dict was asked")


@pytest.mark.parametrize("name", ["torch.softmax", "torch.nn.functional.softmax", "torch.Tensor.sum"])
def test_torch_replaced_is_noticed(name: str, tmp_path: Path) -> None:
    one = get_exercise(1)
    place, key = resolve_name(name.rpartition(".")[0]), name.rpartition(".")[2]
    was = vars(place).get(key)
    try:
        found = grade(one, f"{one.solution}\n{name} = lambda *a, **k: a[0]\n", tmp_path)
    finally:
        delattr(place, key) if was is None else setattr(place, key, was)
    assert found["message"].startswith(f"replaces {name} by something else")
    assert grade(one, one.solution, tmp_path)["status"] == "passed"


def test_errors_in_notebooks_are_told_by_their_cells(tmp_path: Path) -> None:
    text = get_exercise(1).solution.replace("return attention_weights(q, k) @ v", "return 1 / 0")
    book = to_notebook(text.replace("import math", "%matplotlib inline\nimport math"))
    (tmp_path / "mine.ipynb").write_text(json.dumps(book))
    found = grade_file(run_exercise(1)["TASKS"], tmp_path / "mine.ipynb", 60)
    assert found["tasks"][0]["status"] == "correct"
    assert found["tasks"][1]["location"] == "line 3 of cell 4: return 1 / 0"


def test_the_worked_numbers_are_those_of_real_configurations() -> None:
    qkvo, ffn = run_exercise(4)["qkvo_params"], run_exercise(5)["ffn_params"]
    gpt2, llama = (count_parameters(config(name)).per_layer[0] for name in ("gpt2", "llama-3-8b"))
    assert qkvo(768, 12, 12, 64, True) == gpt2.attention == 2_362_368
    assert qkvo(4096, 32, 8, 128, False) == llama.attention
    assert ffn(4096, 14336, True, False) == llama.ffn == 176_160_768
    assert ffn(768, 3072, False, True) == gpt2.ffn
    assert ffn(4096, 16384, False, False) == 134_217_728
    assert run_exercise(8)["kv_cache_bytes"](32, 32, 8, 128, 8192, 1, 2) == 2**30
