"""Data of supervised fine-tuning: forms of records, packing, truncation, statistics."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_templates import STYLES

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer
from cutaway.train.checkpoint.pretrained_checkpoint import BaseCheckpointInfo
from cutaway.train.data.chat_encoder import SFTEncoder
from cutaway.train.data.chat_formats import Conversation, PlainText, parse_record
from cutaway.train.data.chat_summary import target_segments
from cutaway.train.data.packing import pack_best_fit
from cutaway.train.data.record_data import RecordDatasets, load_record_datasets
from cutaway.train.data.records import InvalidRecordError, Record
from cutaway.train.recipe.schema import DataConfig, SFTConfig, SourceConfig

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
SYSTEM = {"role": "system", "content": "Be kind."}


def parse(fields: dict[str, Any]) -> Conversation | PlainText:
    return parse_record(Record(fields, "line 1"))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO},
        {"messages": json.dumps(HELLO)},  # a cell of a CSV file
        {"messages": HELLO, "tools": None, "prompt": "unused"},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]},
        {"conversations": HELLO},
        {"instruction": "Hello", "output": "Hi!"},
        {"instruction": "Hello", "input": "", "output": "Hi!"},
        {"prompt": HELLO[:1], "completion": HELLO[1:]},
        {"prompt": json.dumps(HELLO[:1]), "completion": json.dumps(HELLO[1:])},  # cells of a CSV file
        {"prompt": HELLO[:1], "completion": "Hi!"},
        {"prompt": "Hello", "completion": HELLO[1]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": part} for part in ("Hel", "lo")]},
                HELLO[1],
            ]
        },
    ],
)
def test_forms_of_one_conversation(fields: dict[str, Any]) -> None:
    assert parse(fields) == Conversation(HELLO, None, [False, True])


def test_forms_with_system_tools_and_several_turns() -> None:
    expected = Conversation([SYSTEM, *HELLO, *HELLO], None, [False, False, True, False, True])
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi!"}]
    assert parse({"messages": [SYSTEM, *HELLO, *HELLO]}) == expected
    assert parse({"conversations": [*turns, *turns], "system": "Be kind."}) == expected
    assert parse({"conversations": [{"from": "system", "value": "Be kind."}, *turns, *turns]}) == expected
    alpaca = {"instruction": "Hello", "output": "Hi!", "history": [["Hello", "Hi!"]], "system": "Be kind."}
    assert parse(alpaca) == expected
    prompt = {"prompt": [SYSTEM, *HELLO, HELLO[0]], "completion": [HELLO[1]]}
    assert parse(prompt) == Conversation(expected.messages, None, [False, False, False, False, True])
    weighted = [SYSTEM, HELLO[0], {**HELLO[1], "weight": 0}, HELLO[0], {**HELLO[1], "weight": 1}]
    assert parse({"messages": weighted}) == parse(prompt)
    assert parse({"instruction": "Sum", "input": "1 2", "output": "3"}).messages[0]["content"] == "Sum\n\n1 2"  # type: ignore[union-attr]


def test_tool_calls_have_arguments_as_objects() -> None:
    as_text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "add"}}
    result = {"role": "tool", "content": "2"}
    expected = [HELLO[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    for calls in ([CALL], [as_text], json.dumps([as_text])):
        call = {"role": "assistant", "content": None, "tool_calls": calls, "name": None}
        for tools in ([tool], json.dumps([tool])):
            parsed = parse({"messages": [HELLO[0], call, result], "tools": tools})
            assert parsed == Conversation(expected, [tool], [False, True, False])
    sharegpt = [
        {"from": "human", "value": "Hello"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
    ]
    parsed = parse({"conversations": sharegpt})
    assert isinstance(parsed, Conversation)
    assert parsed.messages == [HELLO[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, result]
    without_calls = {"role": "assistant", "content": "Hi!", "tool_calls": []}
    assert parse({"messages": [HELLO[0], without_calls]}) == parse({"messages": HELLO})


INVALID: list[tuple[dict[str, Any], str]] = [
    ({}, "its keys are none"),
    ({"question": "a", "answer": "b"}, "its keys are question, answer; objective sft needs one of: messages"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "Hello"}, "messages: Expecting value"),
    ({"messages": "[" * 100_000}, "messages: "),
    ({"messages": 3}, "messages is a int"),
    ({"messages": [3]}, "message 0 has no role"),
    ({"messages": [{"role": "user"}]}, "message 0 has no content"),
    ({"messages": [{"role": "user", "content": 3}]}, "message 0 has a int as content"),
    ({"messages": HELLO[:1]}, "nothing to train on"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "a", "weight": 2}]}, "weight 2; it must be 0 or 1"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "no function name"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": 3}]}, "must be a list"),
    ({"messages": HELLO, "tools": "x"}, "tools: Expecting value"),
    ({"messages": HELLO, "tools": [3]}, "tools must be a list of objects"),
    ({"conversations": [{"value": "Hello"}]}, "needs the keys from and value"),
    ({"conversations": [{"from": "alien", "value": "Hello"}]}, "is from 'alien'; use one of human"),
    ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "function call of conversations"),
    ({"instruction": "Hello"}, "no output"),
    ({"instruction": 3, "output": "a"}, "instruction is a int"),
    ({"instruction": "a", "output": "a", "history": "x"}, "history must be a list of pairs"),
    ({"prompt": "Hello"}, "no completion"),
    ({"prompt": "Hello", "chosen": "a", "rejected": "b"}, "objective dpo"),
    ({"prompt": "Hello", "completion": 4}, "completion must be a text or a list of messages, not 4"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, HELLO[1]]},
        "message 0 has a part of type 'image_url'; only text is supported",
    ),
    ({"prompt": "Hello", "completion": ""}, "completion is empty"),
    (
        {"prompt": "Hello", "completion": "Hi!", "system": "Be kind."},
        "it has system, but texts are not rendered with a chat template",
    ),
    ({"prompt": "Hello", "completion": "Hi!", "tools": [{"name": "add"}]}, "tools without messages"),
    ({"text": ""}, "text is empty"),
    ({"text": ["a"]}, "text is a list"),
]


@pytest.mark.parametrize(("fields", "message"), INVALID)
def test_invalid_records(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecordError) as raised:
        parse(fields)
    assert message in str(raised.value)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_keeps_every_document_whole(lengths: list[int]) -> None:
    packs = pack_best_fit(lengths, 20)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= 20 for pack in packs)
    assert sum(sum(lengths[index] for index in pack) <= 10 for pack in packs) <= 1  # two such packs would be one
    assert packs == pack_best_fit(lengths, 20)


def chat_tokenizer() -> Tokenizer:
    style = STYLES["chatml"]
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<|endoftext|>", *style.special_tokens.split()])
    return Tokenizer(backend, special_tokens_map={"eos_token": "<|endoftext|>"}, chat_template=style.template)


def load_datasets(
    directory: Path, rows: list[Any], tokenizer: Tokenizer, seq_len: int = 512, **objective: Any
) -> tuple[RecordDatasets, list[str]]:
    path, messages = directory / "data.jsonl", list[str]()
    path.write_text("\n".join(json.dumps(row) for row in rows))
    data = DataConfig(sources=(SourceConfig(path=str(path)),), seq_len=seq_len, validation_split=0.2)
    config: Any = type("Config", (), {"context": 4096})()
    loaded = load_record_datasets(
        data, SFTConfig(**objective), tokenizer, BaseCheckpointInfo(), config, 0, messages.append
    )
    return loaded, messages


def chat(number: int, length: int = 3) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": str(number)}, {"role": "assistant", "content": "x" * length}]}


def targets(tokenizer: Tokenizer, row: Any) -> str:
    return tokenizer.decode(row[0][row[1].astype(bool)].tolist(), skip_special_tokens=False)


def test_targets_of_each_form() -> None:
    tokenizer = chat_tokenizer()
    fields = [{"messages": HELLO}, {"prompt": "2 + 2 =", "completion": " 4"}, {"text": "Abc"}]
    expected = ["Hi!<|im_end|>", " 4<|endoftext|>", "Abc<|endoftext|>"]
    for train_on in ("assistant", "all"):
        encoder = SFTEncoder(SFTConfig(train_on=train_on), 100, tokenizer)
        rows = [encoder.encode(Record(each, "")) for each in fields]
        if train_on == "assistant":
            assert [targets(tokenizer, row) for row in rows] == expected
            assert [segment["target"] for segment in target_segments(rows[1], tokenizer)] == [False, True]
        else:
            assert all(row[1].all() for row in rows)
        assert encoder.end_token_ids == {tokenizer.token_to_id("<|im_end|>")}


def test_truncation_and_statistics(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    rows = [chat(n) for n in range(30)] + [chat(100 + n, 200) for n in range(10)]
    lengths = [len(tokenizer.encode_chat(row["messages"], add_generation_prompt=False)) for row in rows]
    seq_len = 60
    for packing in (False, True):
        cut, messages = load_datasets(tmp_path, rows, tokenizer, seq_len, packing=packing)
        assert "10 records have more than data.seq_len + 1 = 61 tokens: truncated on the right" in messages
        assert cut.summary is not None
        statistics = cut.summary["statistics"]
        assert statistics["longest_record"] == max(lengths)
        assert statistics["num_records"] + statistics["num_validation_records"] == 40
        packs = cut.train.rows
        assert statistics["num_tokens"] == sum(len(row[0]) for row in packs) == sum(map(len, records(packs, packing)))
        assert statistics["num_sequences"] == len(packs)
        assert all(len(row[0]) <= seq_len + 1 for row in packs)
        assert len(cut.summary["examples"]) == 3
    dropped, messages = load_datasets(tmp_path, rows, tokenizer, seq_len, truncation="drop")
    assert len(dropped.train.rows) + len(dropped.validation.rows) == 30
    assert any("10 × longer than data.seq_len" in message for message in messages)
    with pytest.raises(InputError, match=r"40 × no target tokens .*no token of the assistant is within data\.seq_len"):
        load_datasets(tmp_path, rows, tokenizer, 10)


def records(rows: Any, packed: bool) -> list[Any]:
    if not packed:
        return [row[0] for row in rows]
    return [row[0][row[2] == document] for row in rows for document in np.unique(row[2])]


def test_packed_and_padded_datasets_have_the_same_records(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    rows = [chat(n, 1 + n % 40) for n in range(60)]
    padded, _ = load_datasets(tmp_path, rows, tokenizer, 200)
    packed, _ = load_datasets(tmp_path, rows, tokenizer, 200, packing=True)
    assert len(packed.train.rows) < len(padded.train.rows) / 2
    contents = [sorted(map(tuple, records(each.train.rows, flag))) for each, flag in ((padded, False), (packed, True))]
    assert contents[0] == contents[1]
    assert padded.fingerprint == packed.fingerprint
    batch = packed.train.get_batch(0, 3)
    assert batch.tokens.shape == batch.is_target.shape == batch.document_ids.shape
    # Every epoch has all sequences once, in another order.
    count = packed.train.num_sequences
    epochs = [packed.train.get_rows(range(start, start + count)) for start in (0, count)]
    orders = [[row[0].tobytes() for row in epoch] for epoch in epochs]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_models_without_chat_template_get_a_shipped_one(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    loaded, messages = load_datasets(tmp_path, [chat(n) for n in range(10)], tokenizer)
    assert any("using 'plain', which is saved with the model" in message for message in messages)
    assert tokenizer.chat_template is not None
    assert loaded.end_token_ids == {tokenizer.eos_token_id}
    tokenizer = byte_tokenizer()
    load_datasets(tmp_path, [{"text": f"text {n}"} for n in range(10)], tokenizer)
    assert tokenizer.chat_template is None  # not needed


def test_hostile_texts_are_left_out(tmp_path: Path) -> None:
    surrogate = {"messages": [HELLO[0], {"role": "assistant", "content": "a\ud800"}]}
    nested: Any = "x"
    for _ in range(200):
        nested = [nested]
    tools = {"messages": HELLO, "tools": [{"type": nested}]}
    rows = [
        *(chat(n) for n in range(10)),
        surrogate,
        {"text": "\ud800"},
        {"prompt": "\udfff", "completion": "a"},
        tools,
    ]
    loaded, messages = load_datasets(tmp_path, rows, chat_tokenizer())
    assert len(loaded.train.rows) + len(loaded.validation.rows) == 10
    assert any("3 × invalid UTF-8" in m and "1 × the chat template cannot encode it" in m for m in messages)


def test_data_without_valid_records_is_an_error(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    with pytest.raises(InputError, match=r"no valid record .*its keys are question, answer"):
        load_datasets(tmp_path, [{"question": str(n), "answer": "b"} for n in range(10)], tokenizer)
    tokenizer.chat_template = "{{ messages.nothing.nothing }}"
    with pytest.raises(InputError, match=r"chat template"):
        load_datasets(tmp_path, [chat(n) for n in range(10)], tokenizer)
    tokenizer.chat_template = "{% if"
    with pytest.raises(InputError, match=r"has an error in line 1"):
        load_datasets(tmp_path, [chat(n) for n in range(10)], tokenizer)
