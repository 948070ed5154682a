"""Byte tokenizer and train_bpe: lossless, deterministic, loadable in transformers."""

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
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


def test_round_trip(tokenizer: Tokenizer) -> None:
    @given(TEXTS | st.text())
    def any_text(text: str) -> None:
        if any("\ud800" <= character <= "\udfff" for character in text):
            return
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
        stream = tokenizer.decode_stream(skip_special_tokens=False)
        assert "".join(map(stream.push, tokenizer.encode(text))) + stream.finish() == text

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


def test_train_bpe() -> None:
    tokenizer = train_bpe(iter(CORPUS), 600)
    assert tokenizer.vocab_size == 600
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (597, 598, 599)
    assert tokenizer.backend.to_str() == train_bpe(CORPUS, 600).backend.to_str()
    text = "the lazy dog and the shells"
    assert len(tokenizer.encode(text)) < len(text) / 2
    single = train_bpe(CORPUS, 300, special_tokens=["<|endoftext|>", "<|user|>"])
    assert single.bos_token_id == single.eos_token_id == single.token_to_id("<|endoftext|>")
    assert single.pad_token_id is None
    assert single.all_special_ids == {298, 299}


def test_training_is_deterministic_across_processes() -> None:
    code = "import hashlib, sys; from cutaway.tokenizer import train_bpe; tokenizer = train_bpe(sys.argv[1:], 400)\n"
    code += "print(hashlib.md5(tokenizer.backend.to_str().encode()).hexdigest())"
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
def test_invalid_training_arguments_are_an_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        train_bpe(**({"texts": ["a"], "vocab_size": 300} | arguments))
    with pytest.raises(InputError):
        train_bpe("text", 300)
    with pytest.raises(InputError):
        train_bpe([b"text"], 300)  # type: ignore[list-item]


def test_saved_tokenizer_round_trip(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "old"}')  # legacy file that must be ignored
    (tmp_path / "chat_template.jinja").write_text("old")
    tokenizer.save(tmp_path)
    loaded, peer = load_both_tokenizers(tmp_path)
    assert loaded.chat_template is None
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    for text in HARD_TEXTS:
        ids = tokenizer.encode(text)
        assert peer.encode(text) == loaded.encode(text) == ids
        assert peer.decode(ids) == loaded.decode(ids, skip_special_tokens=False) == text
    with_chat = Tokenizer(
        tokenizer.backend,
        special_tokens_map=tokenizer.special_tokens_map,
        chat_template="{{ messages[0].content }}ü",
        padding_side="left",
    )
    with_chat.model_max_length = 77
    with_chat.save(tmp_path)
    loaded_chat = load_tokenizer(tmp_path)
    assert loaded_chat is not None
    assert (loaded_chat.chat_template, loaded_chat.padding_side, loaded_chat.model_max_length) == (
        with_chat.chat_template,
        "left",
        77,
    )


def test_no_heavy_imports() -> None:
    heavy = ("torch", "transformers", "sentencepiece")
    code = f"import sys, cutaway.tokenizer; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_format_token_shows_bytes_of_partial_characters() -> None:
    tokenizer = byte_tokenizer()
    assert [tokenizer.format_token(token) for token in tokenizer.encode("aé ")] == ["a", "<0xC3>", "<0xA9>", " "]
    assert tokenizer.format_token(1 << 20) is None
