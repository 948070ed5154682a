"""Preference data: all forms give the same rows, invalid rows have reasons, batches of pairs and of labeled answers."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_templates import STYLES

import cutaway as ct
from cutaway.tokenizer import Tokenizer, byte_tokenizer
from cutaway.tokenizer.chat.assistant_mask import AssistantMaskEncoder
from cutaway.train.checkpoint.pretrained_checkpoint import BaseCheckpointInfo
from cutaway.train.data.datasets import Row
from cutaway.train.data.preference_dataset import LabeledDataset, PairDataset
from cutaway.train.data.preference_encoder import LabeledEncoder, PairEncoder
from cutaway.train.data.record_data import RecordDatasets, load_record_datasets
from cutaway.train.data.records import InvalidRecordError, Record
from cutaway.train.recipe.preference_objectives import DPOConfig, KTOConfig
from cutaway.train.recipe.schema import DataConfig, ObjectiveConfig, SourceConfig

SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "What is rust?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Iron oxide.", "A great question!"))
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def build_tokenizer(template: str | None = "chatml") -> Tokenizer:
    style, backend = STYLES["chatml"], byte_tokenizer().backend
    backend.add_special_tokens(style.special_tokens.split())
    eos = {"eos_token": "<|im_end|>"}
    return Tokenizer(backend, special_tokens_map=eos, chat_template=None if template is None else style.template)


def encode(fields: dict[str, Any], seq_len: int = 200, truncation: Any = "right") -> Row:
    encoder = PairEncoder(DPOConfig(truncation=truncation), seq_len, build_tokenizer())
    return encoder.encode(Record(fields, "pairs.jsonl line 1"))


def encode_labeled(fields: dict[str, Any]) -> Row:
    return LabeledEncoder(KTOConfig(), 200, build_tokenizer()).encode(Record(fields, "answers.jsonl line 1"))


def expected_answer(messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Tokens of a conversation, of which the last message is the target."""
    train_on = [False] * (len(messages) - 1) + [True]
    ids, is_target = AssistantMaskEncoder(build_tokenizer()).encode_chat(messages, train_on=train_on)
    return list(ids), [int(flag) for flag in is_target]


def assert_rows_equal(row: Row, *answers: list[dict[str, Any]]) -> None:
    for part, messages in zip((row[:2], row[2:]), answers, strict=False):
        ids, is_target = expected_answer(messages)
        assert part[0].tolist() == ids
        assert part[1].tolist() == is_target
        assert 0 < sum(is_target) < len(is_target)


FORMS: dict[str, dict[str, Any]] = {
    "lists": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "answers as texts": {"prompt": [USER], "chosen": GOOD["content"], "rejected": BAD["content"]},
    "answers as messages": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "prompt as text": {"prompt": USER["content"], "chosen": [GOOD], "rejected": [BAD]},
    "conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "UltraFeedback": {
        "prompt": USER["content"],
        "prompt_id": "1",
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "messages": [USER, GOOD],
        "score_chosen": 8.0,
    },
    "prompt in the conversations": {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "JSON text": {"chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
}


@pytest.mark.parametrize("form", list(FORMS))
def test_forms_give_the_same_row(form: str) -> None:
    assert_rows_equal(encode(FORMS[form]), [USER, GOOD], [USER, BAD])


def test_system_message_and_earlier_turns_are_not_targets() -> None:
    start = [SYSTEM, *EARLIER, USER]
    assert_rows_equal(encode({"chosen": [*start, GOOD], "rejected": [*start, BAD]}), [*start, GOOD], [*start, BAD])
    assert_rows_equal(encode({"prompt": start, "chosen": [GOOD], "rejected": [BAD]}), [*start, GOOD], [*start, BAD])
    fields = {"system": SYSTEM["content"], "prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert_rows_equal(encode(fields), [SYSTEM, USER, GOOD], [SYSTEM, USER, BAD])


def test_texts_have_no_template_and_end_with_eos() -> None:
    row = encode({"prompt": "2+2=", "chosen": "4", "rejected": "five"})
    tokenizer = build_tokenizer()
    texts = [tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in (row[0], row[2])]
    assert texts == ["2+2=4<|im_end|>", "2+2=five<|im_end|>"]
    assert [row[1].sum(), row[3].sum()] == [2, 5]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, "unknown form"),
        ({"prompt": "a", "completion": "b", "label": True}, "objective kto"),
        ({"chosen": "a", "rejected": "b"}, "no prompt"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "system": "s"}, "system without messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "empty text"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "unknown form"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "no answer"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no prompt"),
        ({"prompt": [USER], "chosen": [{"content": "a"}], "rejected": [BAD]}, "no answer|invalid message"),
        ({"prompt": [USER], "chosen": 3, "rejected": [BAD]}, "invalid messages"),
    ],
)
def test_invalid_pairs(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRecordError, match=reason):
        encode(fields)


def test_truncation() -> None:
    fields = {"prompt": "abcd", "chosen": "efgh", "rejected": "efgi" * 9}
    chosen, chosen_targets, rejected, rejected_targets = encode(fields, seq_len=9)
    assert [len(chosen), len(rejected)] == [9, 10]
    assert [chosen_targets.sum(), rejected_targets.sum()] == [5, 6]
    with pytest.raises(InvalidRecordError, match="differ only after"):
        encode(fields, seq_len=6)
    with pytest.raises(InvalidRecordError, match="no target"):
        encode(fields, seq_len=3)
    with pytest.raises(InvalidRecordError, match="longer than"):
        encode(fields, seq_len=9, truncation="drop")


@pytest.mark.parametrize("label", [True, 1, "true", "True", "1", False, 0, "false", 0.0])
def test_labels(label: object) -> None:
    row = encode_labeled({"prompt": [USER], "completion": [GOOD], "label": label})
    assert_rows_equal(row[:2], [USER, GOOD])
    assert row[2].tolist() == [int(str(label).lower() in ("true", "1"))]
    with pytest.raises(InvalidRecordError, match="invalid label"):
        encode_labeled({"prompt": [USER], "completion": [GOOD], "label": f"{label}?"})


def test_labeled_forms() -> None:
    rows = [
        encode_labeled(fields | {"label": False})
        for fields in (
            {"prompt": [*EARLIER, USER], "completion": [BAD]},
            {"prompt": [*EARLIER, USER], "completion": BAD["content"]},
            {"messages": [*EARLIER, USER, BAD]},
            {"chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]},
        )
    ]
    for row in rows:
        assert_rows_equal(row[:2], [*EARLIER, USER, BAD])
        assert row[2].tolist() == [0]
    with pytest.raises(InvalidRecordError, match="prompt, completion and label"):
        encode_labeled({"prompt": "a", "completion": "b"})


def load_file(path: Path, objective: ObjectiveConfig, tokenizer: Tokenizer, messages: list[str]) -> RecordDatasets:
    data = DataConfig(sources=(SourceConfig(path=str(path)),), seq_len=100, validation_split=0.3)
    config = ct.config("tiny-gpt").replace(context=200)
    return load_record_datasets(data, objective, tokenizer, BaseCheckpointInfo(), config, 0, messages.append, 4)


def pair_fields(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "I do not know" + "?" * (n % 3)} for n in range(count)
    ]


def test_pairs_of_a_file(tmp_path: Path) -> None:
    rows: list[Any] = [
        *pair_fields(10),
        {"prompt": "a", "chosen": "b"},
        {"prompt": "a", "chosen": "c", "rejected": "c"},
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[:10])
    messages: list[str] = []
    loaded = load_file(tmp_path / "pairs.jsonl", DPOConfig(), build_tokenizer(), messages)
    assert isinstance(loaded.train, PairDataset)
    assert loaded.train.num_sequences + loaded.validation.num_sequences == 10
    assert any("1 × unknown form of data" in each and "1 × chosen and rejected are equal" in each for each in messages)
    assert any("are texts, which are not rendered with the chat template" in each for each in messages)
    assert loaded.summary is not None
    example = loaded.summary["examples"][0]
    assert [segment["target"] for segment in example["chosen"]] == [False, True]
    assert example["rejected"][1]["text"].startswith("I do not know")
    statistics = loaded.summary["statistics"]
    assert statistics["num_chosen_tokens"] < statistics["num_rejected_tokens"]
    from_csv = load_file(tmp_path / "pairs.csv", DPOConfig(), build_tokenizer(), messages)
    for ours, theirs in zip(loaded.train.rows, from_csv.train.rows, strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(ours, theirs, strict=True))
    batch = loaded.train.get_batch(0, 3)
    assert batch.num_pairs == 3
    assert batch.answers.tokens.shape == batch.answers.is_target.shape == (6, int(batch.answers.is_token.sum(1).max()))


def test_kto_splits_pairs_of_one_record_into_the_same_split(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, [*pair_fields(12), {"prompt": "x", "completion": "y", "label": True}])))
    loaded = load_file(path, KTOConfig(), build_tokenizer(), [])
    assert isinstance(loaded.train, LabeledDataset)
    tokenizer = build_tokenizer()
    prompts = [
        [tokenizer.decode(row[0].tolist()).partition("=")[0] for row in dataset.rows]
        for dataset in (loaded.train, loaded.validation)
    ]
    assert not set(prompts[0]) & set(prompts[1])
    assert len(prompts[0]) + len(prompts[1]) == 25
    assert loaded.summary is not None
    assert loaded.summary["statistics"]["num_desirable"] - loaded.summary["statistics"]["num_undesirable"] in (0, 1)


def test_mismatched_answers_are_those_of_the_same_step(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, pair_fields(12))))
    train = load_file(path, KTOConfig(), build_tokenizer(), []).train
    assert isinstance(train, LabeledDataset)
    step = train.get_batch(4, 4)
    for index in range(4):
        mixed = step.mismatched.tokens[index][step.mismatched.is_token[index]]
        own = step.answers.tokens[index][step.answers.is_token[index] & ~step.answers.is_target[index]]
        other = step.answers.tokens[index - 1][step.answers.is_target[index - 1]]
        assert mixed.tolist() == [*own.tolist(), *other.tolist()]
        targets = step.mismatched.tokens[index][step.mismatched.is_target[index]]
        assert targets.tolist() == other.tolist()
    halves = [train.get_batch(first, 2) for first in (4, 6)]  # the same as two micro-batches
    parts = [part.mismatched.tokens[i][part.mismatched.is_token[i]].tolist() for part in halves for i in range(2)]
    assert parts == [step.mismatched.tokens[i][step.mismatched.is_token[i]].tolist() for i in range(4)]
