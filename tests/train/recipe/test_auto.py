"""Recipes chosen for a text, the list of shipped recipes, hints for unknown keys, vocab_size from the tokenizer."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import CliRunner
from support.tiny_runs import read_metrics, tiny_recipe

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.train.recipe import list_recipes, load_recipe
from cutaway.train.recipe.auto import MAX_EPOCHS, MIN_STEPS, Machine, build_auto_recipe
from cutaway.train.recipe.catalog import PURPOSE_TITLES, describe_recipes
from cutaway.train.recipe.dump import recipe_to_toml
from cutaway.train.recipe.key_hints import KEYS_OF_OTHER_LIBRARIES, recipe_key_paths, suggest_key
from cutaway.train.trainer.launch import prepare_trainer, train

pytestmark = [pytest.mark.usefixtures("skip_preflight"), pytest.mark.unchecked]
LAPTOP = Machine(1.6e11, 8 * 2**30, False, "4 CPU cores")
GPU = Machine(2e14, 80 * 2**30, True, "a GPU")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def write_text(path: Path, num_bytes: int) -> Path:
    """Write lines that all differ."""
    lines, size = [], 0
    for number in range(num_bytes):
        lines.append(f"line {number} of the text, with {number * number % 9973} words\n")
        size += len(lines[-1])
        if size >= num_bytes:
            break
    path.write_text("".join(lines))
    return path


def parameters(recipe: dict[str, Any]) -> int:
    return sum(each.numel() for each in ct.build(load_recipe(recipe).transformer_config, device="meta").parameters())


@pytest.mark.parametrize("num_bytes", [2_000, 30_000, 400_000])
def test_chosen_recipe_fits_the_text_and_the_time(num_bytes: int, tmp_path: Path) -> None:
    """The data has both splits, and FLOPs and epochs are within their limits."""
    chosen = build_auto_recipe([write_text(tmp_path / "my.txt", num_bytes)], LAPTOP)
    recipe = load_recipe(chosen.table)
    trainer = prepare_trainer(recipe, tmp_path / "run", device="cpu")
    training = recipe.training
    num_tokens = training.max_steps * training.batch_size * recipe.data.seq_len
    assert 6 * parameters(chosen.table) * num_tokens <= LAPTOP.flops_per_second * 300 * 1.01
    num_train_tokens = len(trainer.data.train.split.tokens)  # type: ignore[attr-defined]
    assert num_tokens / num_train_tokens <= 3 * MAX_EPOCHS or training.max_steps == MIN_STEPS
    assert training.max_steps >= MIN_STEPS
    assert trainer.data.num_validation_sequences >= 1
    assert f"{training.max_steps:,} steps" in chosen.summary


def test_more_text_time_and_speed_give_larger_models(tmp_path: Path) -> None:
    small, large = (write_text(tmp_path / f"{size}.txt", size) for size in (20_000, 3_000_000))
    sizes = [
        parameters(build_auto_recipe([text], machine, minutes=minutes).table)
        for text, machine, minutes in ((small, LAPTOP, 5), (large, LAPTOP, 5), (large, LAPTOP, 60), (large, GPU, 60))
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[-1]
    tables = [build_auto_recipe([large], LAPTOP, minutes=minutes).table for minutes in (5, 5, 6)]
    assert tables[0] == tables[1]  # the choice depends on the arguments only
    assert tables[2]["training"]["max_steps"] > tables[0]["training"]["max_steps"]
    assert build_auto_recipe([large], GPU).table["training"]["precision"] == "bf16"
    bounded = Machine(GPU.flops_per_second, 2**26, True, "a GPU with little memory")
    assert parameters(build_auto_recipe([large], bounded).table) * 16 <= 2**26


def test_text_column_is_found(tmp_path: Path) -> None:
    text = write_text(tmp_path / "my.txt", 60_000).read_text().splitlines()
    paths = {}
    for column in ("text", "body"):
        paths[column] = tmp_path / f"{column}.jsonl"
        paths[column].write_text("".join(json.dumps({column: line, "id": 3}) + "\n" for line in text))
        [source] = load_recipe(build_auto_recipe([paths[column]], LAPTOP).table).data.sources
        assert source.text_column == column
    two = tmp_path / "two.jsonl"
    two.write_text("".join(json.dumps({"title": "t", "body": line}) + "\n" for line in text))
    [source] = load_recipe(build_auto_recipe([two], LAPTOP, text_column="body").table).data.sources
    assert source.text_column == "body"


def test_training_on_a_text_without_a_recipe(
    tmp_path: Path, run_cli: CliRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run stores the chosen recipe, and the printed recipe is the same."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "my.txt", 5_000)
    options = ("--text", "my.txt", "--device", "cpu", "--set", "training.max_steps=40", "--set", "eval.interval=20")
    printed = run_cli("train", *options, "--print-recipe")
    assert not (tmp_path / "runs").exists()
    run_cli("train", *options)
    stored = json.loads((tmp_path / "runs" / "my" / "run.json").read_text())["recipe"]
    assert load_recipe(tomllib.loads(printed)) == load_recipe(stored)
    rows = read_metrics(tmp_path / "runs" / "my")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.75 * losses[0]
    assert [row["sample"][:4] for row in rows if "sample" in row] == ["line", "line"]


@pytest.mark.parametrize("name", list_recipes())
def test_printed_recipe_is_the_same_recipe(name: str) -> None:
    recipe = load_recipe(name)
    assert load_recipe(tomllib.loads(recipe_to_toml(recipe))) == recipe


def test_list_and_help_show_all_recipes_by_purpose(run_cli: CliRunner) -> None:
    recipes = describe_recipes()
    assert {recipe.name for recipe in recipes} == set(list_recipes())
    for recipe in recipes:
        assert recipe.purpose in PURPOSE_TITLES, f"{recipe.name}.toml has no purpose"
        assert 10 < len(recipe.description) < 90, f"{recipe.name}.toml needs a description of one line"
    assert json.loads(run_cli("train", "--list", "--json")) == [recipe._asdict() for recipe in recipes]
    for output in (run_cli("train", "--list", columns=100), run_cli("train", "--help", columns=100)):
        names = re.findall(r"^  ([a-z][a-z0-9-]+)  ? ?", output, re.MULTILINE)
        assert set(names) >= set(list_recipes())
        assert "train from scratch" in output
        assert "translate --data FILE" in output


@pytest.mark.parametrize(
    ("section", "key", "expected"),
    [
        ("training", "lr", "optimizer.lr"),
        ("", "seq_len", "data.seq_len"),
        ("optimizer", "learning_rate", "optimizer.lr"),
        ("", "num_train_epochs", "training.num_epochs"),
        ("", "gradient-accumulation-steps", "training.grad_accum_steps"),
        ("eval", "tensorbord", "logging.tensorboard"),
        ("model", "base", "model.checkpoint"),
        ("data", "xyzzy", None),
    ],
)
def test_hints_for_unknown_keys(section: str, key: str, expected: str | None) -> None:
    assert suggest_key(section, key) == expected


def test_hints_are_keys_that_exist() -> None:
    """Adapter keys exist if the model section has adapters."""
    paths = {path for path in KEYS_OF_OTHER_LIBRARIES.values() if not path.startswith("model.adapter")}
    assert paths <= recipe_key_paths()


TABLE = {"form": "decoder", "d_model": 32, "decoder": {"layers": 1, "block": {"attention": {"heads": 2}}}}


@pytest.mark.parametrize(
    ("vocab_size", "tokenizer", "expected"),
    [
        (None, {"kind": "bytes"}, 259),
        (320, {"kind": "bytes"}, 320),  # padding
        (None, {"kind": "bpe", "vocab_size": 300}, 300),
        (300, {"kind": "bpe", "vocab_size": 300}, 300),
    ],
)
def test_vocab_size_follows_from_the_tokenizer(
    vocab_size: int | None, tokenizer: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    model = TABLE | ({} if vocab_size is None else {"vocab_size": vocab_size})
    recipe = tiny_recipe(write_text(tmp_path / "my.txt", 5_000), model=model, data={"tokenizer": tokenizer})
    assert load_recipe(recipe).transformer_config.vocab_size == expected
    run = train(recipe, tmp_path / "run", overrides=["training.max_steps=2"], device="cpu")
    checkpoint = ct.load(run.directory)
    assert checkpoint.config.vocab_size == expected
    assert ct.generate(checkpoint, "line", max_new_tokens=4)


def test_vocab_size_of_a_preset_is_replaced_and_a_smaller_one_is_an_error(tmp_path: Path) -> None:
    text = write_text(tmp_path / "my.txt", 5_000)
    assert load_recipe(tiny_recipe(text, model="gpt2")).transformer_config.vocab_size == 259
    with pytest.raises(CutawayError, match=r"model.vocab_size is 100, but the tokenizer has 259 tokens; remove"):
        prepare_trainer(load_recipe(tiny_recipe(text, model=TABLE | {"vocab_size": 100})), tmp_path / "run")
