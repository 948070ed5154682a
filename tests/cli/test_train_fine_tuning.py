"""`cutaway train` with the recipes for fine-tuning: the command that uses the model, --status, --dry-run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import small_checkpoint
from support.cli_runner import CliRunner
from support.nightly import nightly_except
from support.tiny_llama import save_chat_llama
from support.tokenizer_files import write_bert_files

import cutaway as ct
from cutaway.tokenizer import load_tokenizer
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer

pytestmark = pytest.mark.unchecked

CHAT = [{"role": "user", "content": "hi {}"}, {"role": "assistant", "content": "ho {}"}]
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": CHAT},
    "lora": {"prompt": "a {}", "completion": "b {}"},
    "qlora": {"prompt": "a {}", "completion": "b {}"},
    "dpo": {"prompt": "a {}", "chosen": "b {}", "rejected": "c"},
    "kto": {"prompt": "a {}", "completion": "b", "label": True},
    "orpo": {"prompt": "a {}", "chosen": "b {}", "rejected": "c"},
    "reward": {"prompt": "a {}", "chosen": "b {}", "rejected": "c"},
    "grpo": {"prompt": "a {}", "answer": "b"},
    "classify": {"text": "a {}", "label": "label of {}"},
    "token-classify": {"tokens": ["a", "{}"], "tags": ["O", "B-X"]},
    "multiple-choice": {"question": "a {}", "choices": ["b", "{}"], "label": 1},
    "embed": {"anchor": "a {}", "positive": "b {}"},
    "fill-mask": {"text": "the quick brown fox {} jumps over the lazy dog" * 20},
}
DECODER_RECIPES = ("sft", "lora", "qlora", "dpo", "kto", "orpo", "reward", "grpo")
WORDS = ("one", "two") * 4
SHORT = (
    "training.preflight=false",
    "training.max_steps=1",
    "training.batch_size=2",
    "eval.num_sequences=2",
    "data.seq_len=48",
)


def fill(value: Any, text: str) -> Any:
    """A value in which each "{}" is replaced."""
    if isinstance(value, dict):
        return {key: fill(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, text) for each in value]
    return value.replace("{}", text) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_llama(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("encoder")
    write_bert_files(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return ct.save(small_checkpoint("tiny-bert", tokenizer, vocab_size=tokenizer.vocab_size), directory / "model")


def arguments(recipe: str, base: Path, directory: Path) -> list[str]:
    """Arguments of `cutaway train` for a recipe, on data that is written to the directory."""
    data = directory / "data.jsonl"
    rows = [fill(ROWS[recipe], f"{word} {index}") for index, word in enumerate(WORDS)]
    rows = [row | {"label": index % 2} if recipe == "classify" else row for index, row in enumerate(rows)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [*SHORT, *(["objective.reward=exact_match", "objective.max_new_tokens=4"] if recipe == "grpo" else [])]
    return ["train", recipe, "--base", str(base), "--data", str(data), *(f"--set={each}" for each in overrides)]


@pytest.mark.parametrize("recipe", nightly_except(("sft", "reward", "token-classify", "embed"), ROWS))
def test_the_command_for_the_trained_model_works(
    recipe: str, decoder: Path, encoder: Path, tmp_path: Path, run_cli: CliRunner
) -> None:
    """--status names a command that suits the model."""
    base, run = decoder if recipe in DECODER_RECIPES else encoder, tmp_path / "run"
    run_cli(*arguments(recipe, base, tmp_path), "--out", run)
    status = json.loads(run_cli("train", "--status", run, "--json"))
    assert f"trained model: {status['command']}" in run_cli("train", "--status", run)
    for command in status["command"].split(", or "):
        words = [{"TEXT": "a text", "FILE": str(tmp_path / "data.jsonl")}.get(w, w) for w in shlex.split(command)]
        if words[1] != "serve":
            run_cli(*words[1:])


@pytest.mark.parametrize("recipe", nightly_except(("qlora", "dpo", "classify", "fill-mask"), ROWS))
def test_dry_run_says_what_training_does(
    recipe: str, decoder: Path, encoder: Path, tmp_path: Path, run_cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, steps, data and memory are those of the trainer. Nothing is written."""
    monkeypatch.chdir(tmp_path)
    base = decoder if recipe in DECODER_RECIPES else encoder
    command = [each for each in arguments(recipe, base, tmp_path) if "max_steps" not in each]
    plan = json.loads(run_cli(*command, "--dry-run", "--json"))
    shown = run_cli(*command, "--dry-run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]
    overrides = [each.removeprefix("--set=") for each in command if each.startswith("--set=")]
    messages: list[str] = []
    trainer = prepare_trainer(
        load_recipe(recipe, overrides, [tmp_path / "data.jsonl"], base),
        tmp_path / "run",
        device="cpu",
        callback=Callback(on_message=messages.append),
    )
    trained, frozen = (
        sum(each.numel() for each in trainer.model.parameters() if each.requires_grad is flag) for flag in (True, False)
    )
    if recipe == "qlora":  # the number of values is not that of the stored bytes
        frozen = sum(each.numel() for each in ct.load(base).model.parameters())
    assert (plan["num_trained_parameters"], plan["num_frozen_parameters"]) == (trained, frozen)
    assert f"objective {trainer.recipe.objective.kind}" in shown
    [logged] = [each for each in messages if each.startswith("estimated memory per step: ")]
    assert f"{plan['memory_bytes'] / 2**30:.2g} GiB" in logged
    assert plan["problem"] is None
    if recipe != "fill-mask":
        assert plan["max_steps"] == trainer.recipe.training.max_steps
        assert plan["data"]["num_records"] == trainer.data.num_sequences
        assert set(plan["messages"]) <= set(messages)


def test_dry_run_of_a_run_that_does_not_fit(
    decoder: Path, tmp_path: Path, run_cli: CliRunner, monkeypatch: Any
) -> None:
    monkeypatch.setattr("cutaway.train.trainer.fine_tuning_plan.free_memory", lambda _: 10_000)
    plan = json.loads(run_cli(*arguments("lora", decoder, tmp_path), "--dry-run", "--json", code=1))
    assert "are free; " in plan["problem"]


def test_dry_run_of_several_ranks(decoder: Path, tmp_path: Path, run_cli: CliRunner) -> None:
    command = [*arguments("sft", decoder, tmp_path), "--dry-run", "--world-size", "2"]
    report = json.loads(run_cli(*command, "--set", "parallel.dp_shard=2", "--json"))
    assert (
        report["weights"]["ratio"]
        == report["collectives"]["all-gather"]["count"] / report["collectives"]["all-gather"]["predicted_count"]
        == 1
    )
    for recipe, reason in (("lora", "an adapter"), ("orpo", "an adapter"), ("reward", "objective reward")):
        error = run_cli(*arguments(recipe, decoder, tmp_path), "--dry-run", "--world-size", "2", code=2)
        assert f"does not simulate {reason}; use --world-size 1" in error
