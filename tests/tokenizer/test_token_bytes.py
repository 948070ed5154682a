"""Token bytes ≡ decode, for all kinds of tokenizers whose tokens have bytes of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.tokenizer_files import (
    CORPUS,
    HARD_TEXTS,
    write_bert_files,
    write_gemma_files,
    write_gpt2_files,
    write_llama2_files,
    write_llama3_files,
    write_marian_files,
    write_qwen2_files,
    write_t5_files,
)
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, tokenizer_from_gguf, tokenizer_to_gguf
from cutaway.tokenizer.token_bytes import BytesDecodeStream, token_bytes

WRITERS = [
    write_gpt2_files,
    write_llama3_files,
    write_qwen2_files,
    write_llama2_files,
    write_gemma_files,
    write_t5_files,
    write_marian_files,
]


def assert_bytes_are_decoded_text(tokenizer: Tokenizer) -> None:
    bytes_of_token = token_bytes(tokenizer)
    assert not set(bytes_of_token) & tokenizer.all_special_ids
    for text in [*HARD_TEXTS, *CORPUS[:3]]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(bytes_of_token.get(token_id, b"") for token_id in ids).decode(errors="replace")
        decoded = tokenizer.decode(ids)
        assert joined.strip() == decoded.strip()
        assert joined in (decoded, f" {decoded}") or isinstance(tokenizer.backend.model, models.Unigram)
        stream = BytesDecodeStream(bytes_of_token)
        assert "".join(map(stream.push, ids)) + stream.finish() == joined


@pytest.mark.parametrize("write_files", WRITERS)
def test_joined_bytes_are_the_decoded_text(write_files: Callable[[Path], None], tmp_path: Path) -> None:
    write_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert_bytes_are_decoded_text(tokenizer)


def test_byte_tokenizer_and_gguf(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    assert [token_bytes(tokenizer)[i] for i in range(256)] == [bytes([i]) for i in range(256)]
    write_llama2_files(tmp_path)
    llama2 = load_tokenizer(tmp_path)
    assert llama2 is not None
    from_gguf = tokenizer_from_gguf(tokenizer_to_gguf(llama2))
    assert token_bytes(from_gguf) == token_bytes(llama2)
    assert_bytes_are_decoded_text(from_gguf)


def test_an_incomplete_character_is_held_back() -> None:
    stream = BytesDecodeStream(token_bytes(byte_tokenizer()))
    assert [stream.push(byte) for byte in "é!".encode()] == ["", "é", "!"]
    stream.push("é".encode()[0])
    assert stream.finish() == "\ufffd"


def test_tokenizers_without_token_bytes_are_refused(tmp_path: Path) -> None:
    write_bert_files(tmp_path)
    wordpiece = load_tokenizer(tmp_path)
    assert wordpiece is not None
    with pytest.raises(InputError, match=r"structured output: its decoder .WordPiece. changes tokens"):
        token_bytes(wordpiece)
    words = Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(InputError, match="it has no decoder"):
        token_bytes(Tokenizer(words))
    words.decoder = decoders.CTC()
    with pytest.raises(InputError, match=r"its decoder .CTC. changes tokens"):
        token_bytes(Tokenizer(words))
