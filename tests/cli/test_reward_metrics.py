"""`cutaway eval --data` on a reward model: pairs of answers, and answers to score; rewards equal to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.cli_runner import CliRunner
from support.tiny_llama import save_chat_llama

import cutaway as ct
from cutaway.evaluate.confidence_interval import proportion_confidence_interval
from cutaway.families.replace_head import replace_head
from cutaway.tokenizer import load_tokenizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer
from cutaway.train.trainer.task_metrics import task_metrics

pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reward")
    base = ct.load(save_chat_llama(directory / "base"))
    options = {"num_labels": 1, "problem_type": "regression"}
    return ct.save(replace_head(base, "sequence-classification", seed=0, **options), directory / "model")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def their_rewards(model: Path, texts: list[str]) -> list[float]:
    """Rewards by transformers, of texts with all special tokens."""
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    with torch.no_grad():
        return [
            reference(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits.item() for text in texts
        ]


def test_pairs_have_the_rewards_of_transformers(model: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    texts = [("a: ", f"{'yes ' * (i % 5)}{i}", f"no {i}") for i in range(12)]
    rows: list[dict[str, Any]] = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in texts]
    rows.append({"chosen": chat("why", "so"), "rejected": chat("why", "it is")})
    rendered = [(f"{prompt}{a}<|im_end|>", f"{prompt}{b}<|im_end|>") for prompt, a, b in texts]
    template = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    rendered.append((template.format("so"), template.format("it is")))
    data = write(tmp_path / "pairs.jsonl", *rows, {"prompt": "a", "chosen": "b", "rejected": "b"})
    for options in ((), ("--batch-size", 1)):
        result = json.loads(run_cli("eval", model, "--data", data, *options, "--json"))
        chosen, rejected = (their_rewards(model, [pair[side] for pair in rendered]) for side in (0, 1))
        assert [row["chosen"] for row in result["records"]] == pytest.approx(chosen, abs=1e-5)
        assert [row["rejected"] for row in result["records"]] == pytest.approx(rejected, abs=1e-5)
        num_right = sum(a > b for a, b in zip(chosen, rejected, strict=True))
        assert 0 < num_right < 13
        assert result["accuracy"] == num_right / 13
        assert result["accuracy_interval"] == pytest.approx(proportion_confidence_interval(num_right, 13))
        assert result["margin"] == pytest.approx((sum(chosen) - sum(rejected)) / 13, abs=1e-5)
        assert (result["task"], result["num_examples"]) == ("reward", 13)
        assert result["skipped"] == {"chosen and rejected are equal": 1}
        assert result["records"][12]["location"] == f"{data} line 13"
    table = run_cli("eval", model, "--data", data)
    assert f"{num_right / 13:.1%}" in table
    assert "95 % interval" in table
    assert "mean margin" in table


def test_pairs_have_the_metrics_of_training(model: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    """The metrics of an evaluation before the first step are those of `cutaway eval` on the validation records."""
    rows = [{"prompt": f"{i} ", "chosen": "b" * (i % 7 + 1), "rejected": "c" * (i % 3) + "d"} for i in range(30)]
    data = write(tmp_path / "pairs.jsonl", *rows)
    recipe = load_recipe("reward", ["training.max_steps=1", "training.precision=fp32"], [data], model)
    trainer = prepare_trainer(recipe, tmp_path / "run", device="cpu")
    trainer.model.eval()
    expected = task_metrics(trainer.model, trainer.data, trainer.objective_fn, trainer.recipe)
    held_out = []
    for row in trainer.data.validation.rows:  # type: ignore[attr-defined]
        text = trainer.run_directory.tokenizer.decode(row[0].tolist())
        held_out.append(next(each for each in rows if f"{each['prompt']}{each['chosen']}" == text))
    result = json.loads(run_cli("eval", model, "--data", write(tmp_path / "held-out.jsonl", *held_out), "--json"))
    assert len(held_out) == trainer.data.num_validation_sequences
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_answers_are_scored(model: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    rows = [{"prompt": "a: ", "completion": "yes"}, {"messages": chat("why", "so")}, {"prompt": "a", "completion": ""}]
    data = write(tmp_path / "answers.jsonl", *rows)
    template = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
    expected = their_rewards(model, ["a: yes<|im_end|>", template])
    result = json.loads(run_cli("eval", model, "--data", data, "--json"))
    assert [row["reward"] for row in result["records"]] == pytest.approx(expected, abs=1e-5)
    assert [row["location"] for row in result["records"]] == [f"{data} line {number}" for number in (1, 2)]
    assert result["mean_reward"] == pytest.approx(sum(expected) / 2, abs=1e-5)
    assert (result["num_examples"], result["skipped"]) == (2, {"empty text": 1})
    table = run_cli("eval", model, "--data", data)
    assert "mean reward" in table
    assert f"{max(expected):.4f}" in table


def test_regression_with_labels_stays(model: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    data = write(tmp_path / "labels.jsonl", *({"text": f"t {i}", "label": i / 2} for i in range(6)))
    result = json.loads(run_cli("eval", model, "--data", data, "--json"))
    assert {"pearson", "spearman", "mean_squared_error"} <= result.keys()
    unlabeled = [{"text": "t"}, *({"text": f"t {i}", "label": i / 2} for i in range(6))]
    data = write(tmp_path / "labels.jsonl", *unlabeled)
    result = json.loads(run_cli("eval", model, "--data", data, "--json"))
    assert (result["num_examples"], sum(result["skipped"].values())) == (6, 1)
    error = run_cli("eval", model, "--data", data, "--target-column", "other", code=2)
    assert "it has no value for 'other'" in error


def test_other_fields_are_an_error(model: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    data = write(tmp_path / "other.jsonl", {"title": "a", "body": "b"})
    error = run_cli("eval", model, "--data", data, code=2)
    assert "its keys are title, body" in error
    assert "a reward model needs prompt, chosen and rejected, or answers to score" in error
    data = write(tmp_path / "no-prompt.jsonl", {"chosen": "a", "rejected": "b"})
    assert "add the prompt" in run_cli("eval", model, "--data", data, code=2)


def test_truncation_is_reported(model: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    data = write(tmp_path / "long.jsonl", {"prompt": "a", "completion": "b" * 400})
    result = json.loads(run_cli("eval", model, "--data", data, "--json"))
    assert result["num_truncated"] == 1
    assert result["records"][0]["reward"] == pytest.approx(their_rewards(model, ["a" + "b" * 255])[0], abs=1e-5)
