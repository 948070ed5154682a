"""`cutaway train` with the recipes for fine-tuning: the command that uses the model, --status, --dry-run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import small_checkpoint
from support.cli_runner import CliRunner
from support.tiny_llama import save_chat_llama
from support.tokenizer_files import write_bert_files

import cutaway as ct
from cutaway.tokenizer import load_tokenizer

pytestmark = pytest.mark.unchecked

CHAT = [{"role": "user", "content": "hi {}"}, {"role": "assistant", "content": "ho {}"}]
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": CHAT},
    "lora": {"prompt": "a {}", "completion": "b {}"},
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
DECODER_RECIPES = ("sft", "lora", "dpo", "kto", "orpo", "reward", "grpo")
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


@pytest.mark.parametrize("recipe", ROWS)
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
