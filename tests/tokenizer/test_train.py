"""Tokenizers made here: reversible, deterministic, and open to transformers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer_files import CORPUS, HARD_TEXTS, TEXTS, load_both_tokenizers

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe


@pytest.fixture(scope="module", params=[byte_tokenizer, lambda: train_bpe(CORPUS, 600)], ids=["bytes", "bpe"])
def made(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


def test_reversible(made: Tokenizer) -> None:
    @given(TEXTS | st.text())
    def any_text(text: str) -> None:
        if any("\ud800" <= character <= "\udfff" for character in text):
            return
        assert made.decode(made.encode(text), skip_special_tokens=False) == text
        stream = made.decode_stream(skip_special_tokens=False)
        assert "".join(map(stream.push, made.encode(text))) + stream.finish() == text

    any_text()


def test_bytes_are_ids() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("hé😀") == list("hé😀".encode())
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        259,
        256,
        257,
        258,
    )
    assert tokenizer.encode("a<|eos|>b") == [97, 257, 98]
    assert tokenizer.decode([97, 257, 98]) == "ab"
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"
    assert tokenizer.encode_batch(["a", ""]) == [[97], []]


def test_training(made: Tokenizer) -> None:
    tokenizer = train_bpe(iter(CORPUS), 600)
    assert tokenizer.vocab_size == 600
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (597, 598, 599)
    assert tokenizer.backend.to_str() == train_bpe(CORPUS, 600).backend.to_str()
    text = "the lazy dog and the shells"
    assert len(tokenizer.encode(text)) < len(text) / 2
    one = train_bpe(CORPUS, 300, special_tokens=["<|endoftext|>", "<|user|>"])
    assert one.bos_token_id == one.eos_token_id == one.token_to_id("<|endoftext|>")
    assert one.pad_token_id is None
    assert one.all_special_ids == {298, 299}


def test_training_is_the_same_in_every_process() -> None:
    code = "import hashlib, sys; from cutaway.tokenizer import train_bpe; made = train_bpe(sys.argv[1:], 400)\n"
    code += "print(hashlib.md5(made.backend.to_str().encode()).hexdigest())"
    runs = [
        subprocess.run([sys.executable, "-c", code, *CORPUS[:20]], capture_output=True, check=True, text=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] != ""


@pytest.mark.parametrize(
    "arguments",
    [
        {"vocab_size": 258},
        {"vocab_size": 1 << 40},
        {"vocab_size": 300.5},
        {"special_tokens": ["a", "a"]},
        {"special_tokens": [""]},
    ],
)
def test_training_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        train_bpe(**({"texts": ["a"], "vocab_size": 300} | arguments))
    with pytest.raises(InputError):
        train_bpe("text", 300)
    with pytest.raises(InputError):
        train_bpe([b"text"], 300)  # type: ignore[list-item]


def test_saved(made: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "old"}')  # from earlier days, and silent now
    (tmp_path / "chat_template.jinja").write_text("old")
    made.save(tmp_path)
    again, theirs = load_both_tokenizers(tmp_path)
    assert again.chat_template is None
    assert again.special_tokens_map == made.special_tokens_map
    for text in HARD_TEXTS:
        ids = made.encode(text)
        assert theirs.encode(text) == again.encode(text) == ids
        assert theirs.decode(ids) == again.decode(ids, skip_special_tokens=False) == text
    with_chat = Tokenizer(
        made.backend,
        special_tokens_map=made.special_tokens_map,
        chat_template="{{ messages[0].content }}ü",
        padding_side="left",
    )
    with_chat.model_max_length = 77
    with_chat.save(tmp_path)
    last = load_tokenizer(tmp_path)
    assert last is not None
    assert (last.chat_template, last.padding_side, last.model_max_length) == (with_chat.chat_template, "left", 77)


def test_nothing_heavy_is_imported() -> None:
    heavy = ("torch", "transformers", "sentencepiece")
    code = f"import sys, cutaway.tokenizer; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parts_of_a_character_are_told_by_their_bytes() -> None:
    tokenizer = byte_tokenizer()
    assert [tokenizer.format_token(token) for token in tokenizer.encode("aé ")] == ["a", "<0xC3>", "<0xA9>", " "]
    assert tokenizer.format_token(1 << 20) is None
