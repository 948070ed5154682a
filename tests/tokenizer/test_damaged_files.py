"""Damaged and malicious tokenizer files: one clear error each, in bounded memory, no code run."""

import base64
import json
import os
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutaway.errors import InputError
from cutaway.tokenizer import (
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    tokenizer_from_gguf,
    tokenizer_to_gguf,
    train_bpe,
)

WORDS = "the cat sat on the mat and the dog ate the rat"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    train_bpe([WORDS] * 5, 300).save(tmp_path)
    return tmp_path


def assert_load_error(directory: Path, pattern: str = ".") -> InputError:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=pattern) as caught:
        load_tokenizer(directory)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
    message = str(caught.value)
    assert "\n" not in message.strip()
    assert len(message) < 1000
    return caught.value


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    result = change(value)
    path.write_text(json.dumps(value if result is None else result))


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
TOKENIZER: dict[str, Callable[[Any], Any]] = {
    "a list": lambda v: [v],
    "a number": lambda v: 3,
    "no model": lambda v: v.pop("model") and None,
    "model is a string": lambda v: v.update(model="BPE"),
    "vocab is a string": lambda v: v["model"].update(vocab="abc"),
    "no vocabulary": lambda v: v["model"].update(vocab={}),
    "id is a string": lambda v: v["model"]["vocab"].update(a="1"),
    "a negative id": lambda v: v["model"]["vocab"].update(a=-1),
    "a huge id": lambda v: v["model"]["vocab"].update(a=1 << 40),
    "fractional id": lambda v: v["model"]["vocab"].update(a=1.5),
    "boolean id": lambda v: v["model"]["vocab"].update(a=True),
    "a merge of three": lambda v: v["model"]["merges"].append(["a", "b", "c"]),
    "a merge of numbers": lambda v: v["model"]["merges"].append([1, 2]),
    "an unknown merge": lambda v: v["model"]["merges"].append(["☃", "☃"]),
    "merges are a string": lambda v: v["model"].update(merges="a b"),
    "an unknown model": lambda v: v["model"].update(type="Neural"),
    "an unknown step": lambda v: v.update(pre_tokenizer={"type": "Exec", "command": "id"}),
    "a broken regex": lambda v: v["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "((("}),
    "a bad added id": lambda v: v["added_tokens"][0].update(id=-7),
    "a huge added id": lambda v: v["added_tokens"][0].update(id=1 << 60),
    "an added list": lambda v: v.update(added_tokens=[[1]]),
    "added without content": lambda v: v["added_tokens"][0].pop("content") and None,
    "expanding steps": lambda v: v.update(normalizer={"type": "Sequence", "normalizers": [DOUBLED] * 40}),
    "one expanding step": lambda v: v.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 100_000}
    ),
    "repeated ByteLevel": lambda v: v["pre_tokenizer"]["pretokenizers"].extend(
        [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 40
    ),
    "a long template": lambda v: v.update(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}},
        }
    ),
    "a damaged charsmap": lambda v: v.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 64).decode()}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZER)
def test_damaged_tokenizer_json(name: str, directory: Path) -> None:
    edit_json(directory / "tokenizer.json", TOKENIZER[name])
    edit_json(directory / "tokenizer_config.json", lambda value: value.pop("added_tokens_decoder") and None)
    assert_load_error(directory)


CONFIG: dict[str, Callable[[Any], Any]] = {
    "a list": lambda v: [],
    "an odd chat template": lambda v: v.update(chat_template=3),
    "an odd list of templates": lambda v: v.update(chat_template=[{"name": 1}, 2]),
    "an odd length": lambda v: v.update(model_max_length="many"),
    "a negative length": lambda v: v.update(model_max_length=-5),
    "an odd side": lambda v: v.update(padding_side="up"),
    "a side of lists": lambda v: v.update(padding_side=[]),
    "an odd bos": lambda v: v.update(bos_token=7),
    "a bos without content": lambda v: v.update(bos_token={"lstrip": True}),
    "an odd flag": lambda v: v.update(clean_up_tokenization_spaces="yes"),
    "an odd class": lambda v: v.update(tokenizer_class=["A"]),
    "an odd decoder": lambda v: v.update(added_tokens_decoder=[1]),
    "an odd decoder id": lambda v: v.update(added_tokens_decoder={"x": {"content": "x"}}),
    "a huge decoder id": lambda v: v.update(added_tokens_decoder={"9" * 99: {"content": "x"}}),
    "an odd decoder flag": lambda v: v.update(added_tokens_decoder={"1": {"content": "x", "lstrip": 3}}),
    "odd extras": lambda v: v.update(extra_special_tokens=3, additional_special_tokens=None),
    "odd extra": lambda v: v.update(additional_special_tokens=[3]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIG)
def test_damaged_tokenizer_config(name: str, directory: Path) -> None:
    edit_json(directory / "tokenizer_config.json", CONFIG[name])
    assert_load_error(directory, "tokenizer_config")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"a": ', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 9999, b"null", b"\0" * 99]
)
def test_invalid_json(name: str, data: bytes, directory: Path) -> None:
    (directory / name).write_bytes(data)
    assert_load_error(directory, name)


def test_truncated_tokenizer_json(directory: Path) -> None:
    original = (directory / "tokenizer.json").read_bytes()
    for length in range(0, len(original) - 2, len(original) // 20):
        (directory / "tokenizer.json").write_bytes(original[:length])
        assert_load_error(directory)


def test_irregular_files_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/zero")
    assert_load_error(tmp_path, "regular file")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "nowhere")
    assert_load_error(tmp_path, "cannot be read")
    (tmp_path / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "vocab.txt").symlink_to(tmp_path / "fifo")
    assert_load_error(tmp_path, "regular file")
    with pytest.raises(InputError, match="not a directory"):
        load_tokenizer(tmp_path / "fifo")


def test_too_large_file_is_an_error(directory: Path) -> None:
    with (directory / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse file
    assert_load_error(directory, "bytes")


def test_symlinks_of_the_hub_cache_are_followed(directory: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (directory / "tokenizer.json").rename(blob)
    (directory / "tokenizer.json").symlink_to(blob)
    assert load_tokenizer(directory) is not None


def test_remote_code_is_never_run(directory: Path) -> None:
    (directory / "tokenization_evil.py").write_text("raise SystemExit('executed')")
    auto = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}, "tokenizer_class": "Evil"}
    edit_json(directory / "tokenizer_config.json", lambda value: value.update(auto))
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(WORDS)) == WORDS


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def proto(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text: str, kind: int = 1, score: bytes = b"\0\0\0\0") -> bytes:
    return proto(1, proto(1, text.encode()) + varint(2 << 3 | 5) + score + proto(3, kind))


BASE = piece("<unk>", 2) + piece("a") + piece("b")
SENTENCEPIECE = {
    "empty": b"",
    "text": b"hello world, this is no model\n" * 9,
    "field zero": b"\x00\x01" + BASE,
    "a group": b"\x0b" + BASE,
    "overlong varint": BASE + b"\x08" + b"\xff" * 20,
    "a cut field": BASE[:-2],
    "a length beyond the end": BASE + b"\x0a\xff\xff\xff\xff\x0f",
    "no pieces": proto(2, proto(3, 2)),
    "word model": BASE + proto(2, proto(3, 3)),
    "character model": BASE + proto(2, proto(3, 4)),
    "treat_whitespace_as_suffix": BASE + proto(2, proto(24, 1)),
    "unk_id past the end": BASE + proto(2, proto(40, 99)),
    "duplicate piece": BASE + piece("a"),
    "an empty piece": BASE + piece(""),
    "overlong piece": BASE + piece("a" * 100_000),
    "a piece not UTF-8": BASE + proto(1, proto(1, b"\xff\xfe")),
    "unknown piece type": BASE + piece("c", 99),
    "infinite score": BASE + piece("c", 1, b"\0\0\x80\x7f"),
    "NaN score": BASE + piece("c", 1, b"\0\0\xc0\x7f"),
    "number instead of a piece": BASE + proto(1, 7),
    "a cut charsmap": BASE + proto(3, proto(2, b"\xff\xff\xff\x7f1234")),
    "expanding charsmap": BASE + proto(3, proto(2, b"\x04\0\0\0abcd" + b"x" * 9999)),
}


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_damaged_sentencepiece_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(SENTENCEPIECE[name])
    assert_load_error(tmp_path, "tokenizer.model")


TEXT_FILES = {
    "tiktoken without rank": {"tokenizer.model": "YQ== 0\nYg==\n"},
    "tiktoken of odd base64": {"qwen.tiktoken": "YQ== 0\n*** 1\n"},
    "tiktoken of a huge rank": {"qwen.tiktoken": "YQ== 99999999999999\n"},
    "tiktoken of a negative rank": {"qwen.tiktoken": "YQ== -1\n"},
    "tiktoken of nothing": {"qwen.tiktoken": "\n"},
    "merges of one word": {"vocab.json": '{"a": 0, "b": 1}', "merges.txt": "#version: 0.2\nab\n"},
    "merges of unknown tokens": {"vocab.json": '{"a": 0, "b": 1}', "merges.txt": "a b\n"},
    "a vocabulary of lists": {"vocab.json": '{"a": [0]}', "merges.txt": ""},
    "a vocabulary without tokens": {"vocab.json": "{}", "merges.txt": ""},
    "marian without unk": {"vocab.json": '{"a": 0, "</s>": 1}', "source.spm": BASE},
    "marian of text": {"vocab.json": '{"<unk>": 0, "</s>": 1}', "source.spm": "no model"},
}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_damaged_text_files(name: str, tmp_path: Path) -> None:
    for file, text in TEXT_FILES[name].items():
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_load_error(tmp_path)


def test_large_id_gap_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_text("YQ== 0\n")
    added = {"added_tokens_decoder": {"4000000": {"content": "x"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    assert_load_error(tmp_path, "past the last rank")


def test_random_damage_raises_only_input_errors(directory: Path, tmp_path: Path) -> None:
    """Changed bytes give a tokenizer or an InputError, never another exception."""
    rng = random.Random(0)
    originals = {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    for _ in range(60):
        path = rng.choice(list(originals))
        data = bytearray(originals[path])
        for _ in range(3):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            tokenizer = load_tokenizer(directory)
            assert tokenizer is not None
            tokenizer.decode(tokenizer.encode(WORDS))
        except InputError:
            pass
        path.write_bytes(originals[path])


GGUF: dict[str, dict[str, Any]] = {
    "nothing": {"tokens": None},
    "no tokens": {"tokens": []},
    "tokens of numbers": {"tokens": [1, 2]},
    "tokens of text": {"tokens": "abc"},
    "an unknown type": {"model": "rwkv"},
    "no type": {"model": None},
    "an unknown split": {"pre": "my-own"},
    "an odd split": {"pre": 3},
    "too few kinds": {"token_type": [1]},
    "an odd merge": {"merges": ["a b c"]},
    "merges of numbers": {"merges": [1]},
    "an unknown merge": {"merges": ["☃ ☃"]},
    "eos past the end": {"eos_token_id": 1 << 30},
    "eos as string": {"eos_token_id": "2"},
    "negative eos": {"eos_token_id": -1},
    "an odd flag": {"add_bos_token": 3},
    "no scores": {"model": "llama"},
    "scores of text": {"model": "llama", "scores": ["a"]},
    "too few scores": {"model": "t5", "scores": [1.0]},
}


@pytest.mark.parametrize("name", GGUF)
def test_damaged_gguf_metadata(name: str) -> None:
    fields = tokenizer_to_gguf(byte_tokenizer())
    for key, value in GGUF[name].items():
        fields["tokenizer.ggml." + key] = value
    with pytest.raises(InputError):
        tokenizer_from_gguf({key: value for key, value in fields.items() if value is not None})


def test_invalid_arguments_are_an_error() -> None:
    tokenizer = byte_tokenizer()
    for bad in (None, 3, b"x", ["x"]):
        with pytest.raises(InputError):
            tokenizer.encode(bad)  # type: ignore[arg-type]
    for ids in ([-1], ["a"], [1.5], [1 << 40], [None]):
        with pytest.raises(InputError):
            tokenizer.decode(ids)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InputError, match="list of strings"):
        tokenizer.encode_batch("abc")
    with pytest.raises(InputError, match="unknown keys"):
        Tokenizer(tokenizer.backend, special_tokens_map={"bos": "x"})
    assert tokenizer.decode([97, 4000, 98]) == "ab"
    assert tokenizer.id_to_token(4000) is None
    assert tokenizer.token_to_id("nothing") is None


def test_saving_to_a_file_path_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be saved"):
        byte_tokenizer().save(tmp_path / "file")


def test_sentencepiece_model_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sentencepiece", "sentencepiece.sentencepiece_model_pb2"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "tokenizer.model").write_bytes(BASE)
    assert_load_error(tmp_path, r'pip install "cutaway\[sentencepiece\]"')
