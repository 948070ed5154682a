"""Evaluation of a fine-tuning run: before the first step, on a general text, and with several sample prompts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cli_runner import CliRunner
from support.tiny_runs import read_metrics, run_digest, tiny_recipe

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import EvalConfig
from cutaway.train.trainer.general_loss import DEFAULT_TEXT, GeneralLossChange, general_loss_change, read_general_text
from cutaway.train.trainer.launch import prepare_trainer, resume, train

pytestmark = [pytest.mark.usefixtures("skip_preflight"), pytest.mark.unchecked]
TEXT = "".join(f"{number} and {number} make {2 * number}.\n" for number in range(400))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small decoder that is trained for a few steps."""
    (tmp_path / "base.txt").write_text(DEFAULT_TEXT.read_text() * 2)
    recipe = tiny_recipe(tmp_path / "base.txt", training={"max_steps": 30}, checkpoint={"num_snapshots": 0})
    return train(recipe, tmp_path / "base", device="cpu").directory


def fine_tuning_recipe(base: Path, tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    (tmp_path / "sums.txt").write_text(TEXT)
    return tiny_recipe(
        tmp_path / "sums.txt", model={"checkpoint": str(base)}, optimizer={"lr": 1e-2},
        checkpoint={"interval": 4, "num_snapshots": 0}, **overrides,
    )  # fmt: skip


def mean_loss(source: Path, text: str, seq_len: int) -> float:
    """Mean loss over consecutive windows of seq_len tokens, computed without `evaluate`."""
    checkpoint = ct.load(source)
    assert checkpoint.tokenizer is not None
    tokens = torch.tensor(checkpoint.tokenizer.encode(text))
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, seq_len):
            window = tokens[start : start + seq_len + 1]
            logits = checkpoint.model.eval()(window[None, :-1])[0]
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(tokens) - 1)


@pytest.mark.nightly
def test_general_loss_before_and_after_fine_tuning(base: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    recipe = fine_tuning_recipe(base, tmp_path, training={"max_steps": 25})
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    output = run_cli("train", tmp_path / "recipe.json", "--out", tmp_path / "run", "--device", "cpu", "--json")
    rows = [row for row in read_metrics(tmp_path / "run") if "eval_loss" in row]
    assert [row["step"] for row in rows] == [0, 5, 10, 15, 20, 25]
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    before, after = (mean_loss(source, text, 32) for source in (base, tmp_path / "run"))
    assert rows[0]["general_loss"] == pytest.approx(before, rel=1e-5)
    assert rows[-1]["general_loss"] == pytest.approx(after, rel=1e-5)
    assert after > before  # the model has learned sums and forgotten English
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"]
    expected = {"before": rows[0]["general_loss"], "after": rows[-1]["general_loss"]}
    expected["percent"] = 100 * (expected["after"] / expected["before"] - 1)
    assert json.loads(output.splitlines()[-1])["general_loss"] == expected
    status = run_cli("train", "--status", tmp_path / "run")
    assert f"loss on general text: {before:.3f} before, {after:.3f} after" in status


def test_killed_before_the_first_checkpoint_and_resumed(base: Path, tmp_path: Path) -> None:
    """The evaluation before the first step is in the log once."""
    recipe = fine_tuning_recipe(base, tmp_path, eval={"sample_prompts": ["1 and", "2 and"]})
    expected = train(recipe, tmp_path / "expected", device="cpu").directory

    def fail(row: dict[str, Any], timing: dict[str, Any]) -> None:
        if row["step"] == 2:
            raise ZeroDivisionError

    trainer = prepare_trainer(load_recipe(recipe), tmp_path / "run", device="cpu")
    trainer.callback.on_step_end = fail
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    resume(tmp_path / "run", device="cpu")
    assert run_digest(tmp_path / "run") == run_digest(expected)
    samples = [row["sample"].split("\n2 and") for row in read_metrics(expected) if "sample" in row]
    assert len(samples) == 4
    assert all(len(each) == 2 and each[0].startswith("1 and") for each in samples)


def test_chat_models_answer_the_sample_prompts(base: Path, tmp_path: Path) -> None:
    """The sample is the reply to the prompt as the user's message."""
    checkpoint = ct.load(base)
    assert checkpoint.tokenizer is not None
    config_file = base / "model" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    config_file.write_text(json.dumps(config | {"chat_template": template}))
    recipe = fine_tuning_recipe(base, tmp_path, training={"max_steps": 1}, eval={"sample_prompt": "1 and"})
    run = train(recipe, tmp_path / "run", device="cpu").directory
    sample = read_metrics(run)[-2]["sample"]
    [expected] = ct.generate(
        ct.load(run), [[{"role": "user", "content": "1 and"}]], max_new_tokens=80, temperature=0.8, top_k=50, seed=1
    )
    assert sample == f"1 and → {expected.text}"


def test_own_text_and_no_text(base: Path, tmp_path: Path) -> None:
    (tmp_path / "general.txt").write_text("Some other text, which is short.")
    options = {"training": {"max_steps": 2}}
    own = fine_tuning_recipe(base, tmp_path, eval={"general_text": str(tmp_path / "general.txt")}, **options)
    rows = read_metrics(train(own, tmp_path / "own", device="cpu").directory)
    assert rows[0]["general_loss"] == pytest.approx(mean_loss(base, "Some other text, which is short.", 32), rel=1e-5)
    none = fine_tuning_recipe(base, tmp_path, eval={"general_text": ""}, **options)
    rows = read_metrics(train(none, tmp_path / "none", device="cpu").directory)
    assert not any("general_loss" in row for row in rows)
    (tmp_path / "empty.txt").write_text(" \n")
    for path, message in ((tmp_path / "empty.txt", "contains no text"), (tmp_path / "x.txt", "does not exist")):
        with pytest.raises(CutawayError, match=rf"eval.general_text: .*{message}"):
            read_general_text(EvalConfig(general_text=str(path)))


def test_change_of_the_general_loss() -> None:
    rows = [{"step": step, "general_loss": loss} for step, loss in ((0, 2.0), (5, 2.2), (10, 3.0))]
    assert general_loss_change(rows, None) == GeneralLossChange(2.0, 3.0)
    change = general_loss_change(rows, 5)
    assert change is not None
    assert math.isclose(change.percent, 10)
    assert general_loss_change(rows[1:], None) is None
    assert general_loss_change(rows[:1], None) is None
