"""Records of files: rows with text that no tokenizer can encode are left out, in all commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import CliRunner
from support.tiny_runs import text_source

from cutaway.train.data.documents import SkippedDocuments
from cutaway.train.data.records import Record, encode_records, read_records

pytestmark = pytest.mark.unchecked

LONE = "a\ud83d b"
"""A text with an unpaired surrogate: half of an emoji, as of a text that was cut in the middle of one."""


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row", [{"text": LONE}, {LONE: "a"}, {"messages": [{"role": "user", "content": LONE}]}, {"a": {"b": [["c", LONE]]}}]
)
def test_unpaired_surrogates_are_left_out(row: dict[str, Any], tmp_path: Path) -> None:
    skipped = SkippedDocuments()
    data = write(tmp_path / "data.jsonl", [{"text": "😀"}, row])
    assert [record.fields for record in read_records(text_source(data), skipped)] == [{"text": "😀"}]
    assert skipped.counts == {"invalid UTF-8": 1}
    assert f"{data} line 2: unpaired surrogate at character 1 of 'a\\ud83d b'" in str(skipped)


def test_deep_nesting(tmp_path: Path) -> None:
    depth = 900
    (tmp_path / "data.jsonl").write_text(f'{{"text": {"[" * depth}"a"{"]" * depth}}}\n')
    assert len(list(read_records(text_source(tmp_path / "data.jsonl"), SkippedDocuments()))) == 1


def test_progress_of_encoding_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [Record({"text": str(number)}, f"line {number}") for number in range(3)]
    messages: list[str] = []
    monkeypatch.setattr("cutaway.train.data.records.LOG_INTERVAL", -1.0)
    assert encode_records(records, lambda each: each.fields["text"], SkippedDocuments(), messages.append) == [*"012"]
    assert messages[-1] == "encoding the records: 2 of 3"


TRAINING_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("tiny-english", {"prompt": "{}", "completion": "b {}"}),
    "dpo": ("tiny-english", {"prompt": "{}", "chosen": "b {}", "rejected": "c"}),
    "kto": ("tiny-english", {"prompt": "{}", "completion": "b", "label": True}),
    "reward": ("tiny-english", {"prompt": "{}", "chosen": "b {}", "rejected": "c"}),
    "grpo": ("tiny-english", {"prompt": "{}", "answer": "3"}),
    "classify": ("tiny-english-encoder", {"text": "a {}", "label": "{}"}),
    "token-classify": ("tiny-english-encoder", {"tokens": ["a", "{}"], "tags": ["O", "B-X"]}),
    "multiple-choice": ("tiny-english-encoder", {"question": "a {}", "choices": ["b", "{}"], "label": 1}),
    "embed": ("tiny-english-encoder", {"anchor": "a {}", "positive": "b {}"}),
}


def fill(value: Any, text: str) -> Any:
    """A value in which each "{}" is replaced."""
    if isinstance(value, dict):
        return {key: fill(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, text) for each in value]
    return value.replace("{}", text) if isinstance(value, str) else value


@pytest.mark.parametrize("recipe", TRAINING_ROWS)
def test_training_leaves_them_out(recipe: str, tmp_path: Path, run_cli: CliRunner) -> None:
    base, row = TRAINING_ROWS[recipe]
    rows = [fill(row, text) for text in ("one", "two", "one more", "two more", LONE)]
    data = write(tmp_path / "data.jsonl", rows)
    options = ("--set", "objective.reward=exact_match") if recipe == "grpo" else ()
    shown = run_cli("train", recipe, "--base", base, "--data", data, *options, "--show-data")
    assert "1 × invalid UTF-8" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("base", "row"),
    [
        ("tiny-english", {"prompt": "{}", "completion": "b"}),
        ("tiny-english-encoder", {"sentence1": "{}", "sentence2": "b {}"}),
    ],
)
def test_evaluation_leaves_them_out(base: str, row: dict[str, Any], tmp_path: Path, run_cli: CliRunner) -> None:
    data = write(tmp_path / "data.jsonl", [fill(row, text) for text in ("one", "two", LONE)])
    result = json.loads(run_cli("eval", base, "--data", data, "--json"))
    assert (result.get("skipped") or result["skipped_records"]) == {"invalid UTF-8": 1}
