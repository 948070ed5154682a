"""Errors of commands with adapters and models with task heads: each names what is wrong and what works."""

import json
from pathlib import Path

import pytest
from support.checkpoints import save_small_checkpoint
from support.cli_runner import CliRunner
from support.tiny_llama import save_chat_llama

import cutaway as ct
from cutaway.families.replace_head import replace_head

pytestmark = pytest.mark.unchecked

FILES = {
    "classes.jsonl": {"text": "a", "label": "x"},
    "pairs.jsonl": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "embeddings.jsonl": {"anchor": "a", "positive": "b"},
    "other.jsonl": {"title": "a"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data files, a decoder, an encoder-decoder, a classifier, and adapters of the decoder, one with a head."""
    directory = tmp_path_factory.mktemp("files")
    for name, row in FILES.items():
        (directory / name).write_text(json.dumps(row) + "\n" + json.dumps(row | {"index": 2}) + "\n")
    (directory / "header.csv").write_text("text,label\n")
    save_chat_llama(directory / "llama")
    save_small_checkpoint(directory / "t5", "tiny-t5")
    for name in ("adapter", "adapter2"):
        adapted = ct.load(directory / "llama")
        adapted.model.add_adapter({"rank": 2, "targets": ["attn.q"]})
        ct.save_adapter(adapted, directory / name, base=directory / "llama")
    ct.save(
        replace_head(ct.load(directory / "llama"), "sequence-classification", labels=("x", "y")), directory / "head"
    )
    with_head = replace_head(ct.load(directory / "llama"), "sequence-classification", labels=("x", "y"))
    with_head.model.add_adapter({"rank": 2, "targets": ["attn.q"]})
    ct.save_adapter(with_head, directory / "head-adapter", base=directory / "llama")
    for first, second in (("one", "two"), ("two", "one")):
        (directory / first).mkdir()
        config = json.loads((directory / "adapter" / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(directory / second)
        (directory / first / "adapter_config.json").write_text(json.dumps(config))
    return directory


CASES = [
    # Adapters
    ("generate llama --adapter head hi", "'head' is a whole model, not an adapter; pass it as the model"),
    ("generate llama --adapter t5 hi", "'t5' is a whole model"),
    ("generate adapter --adapter adapter2 hi", "the model has an adapter 'default' already"),
    ("generate one hi", "'one' is an adapter whose base models are adapters of each other; correct base_model_name"),
    ("serve llama --port 0 --adapter a=adapter --adapter b=head-adapter", "adapter 'b' has a head of its own"),
    ("serve llama --port 0 --adapter b=head-adapter --adapter a=adapter", "adapter 'a' is for a language model"),
    ("train sft --base one --data pairs.jsonl", "are adapters of each other; correct base_model_name"),
    ("size one", "is an adapter whose base models are adapters of each other"),
    ("open llama --adapter head text --no-browser", "is a whole model, not an adapter"),
    # Heads
    (
        "eval head --text other.jsonl --text-column title",
        "evaluate it on records with --data, as in: cutaway eval head",
    ),
    ("eval llama --adapter head-adapter --text other.jsonl --text-column title", "a head for sequence-classification"),
    ("eval head --data other.jsonl", "the key of the label is one of label, labels"),
    ("eval head --data header.csv", "no valid records: it is empty; name the columns"),
    ("eval llama --data pairs.jsonl", "pairs of answers evaluate a reward model (cutaway train reward)"),
    ("train classify --base head --data header.csv", "the files have no rows"),
    (
        "train embed --base t5 --data embeddings.jsonl",
        "objective embedding requires a model of form encoder or decoder",
    ),
    ("train classify --base t5 --data classes.jsonl", "objective classification requires a model of form encoder"),
]


@pytest.mark.parametrize(("command", "message"), CASES)
def test_error_names_what_is_wrong_and_what_works(
    command: str, message: str, files: Path, run_cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    [error] = run_cli(*command.split(), code=2).splitlines()
    assert error.startswith("cutaway: ")
    assert message in error
    assert error.count(" is an adapter") <= 1
    assert not (files / "runs").exists()
