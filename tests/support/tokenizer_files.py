"""Tokenizer files of many kinds, trained on a small corpus, and comparison with transformers."""

import json
import warnings
from pathlib import Path
from typing import Any

import sentencepiece
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from cutaway.tokenizer import Tokenizer, load_tokenizer
from cutaway.tokenizer.split_patterns import GPT4_SPLIT_PATTERN

HARD_TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\t\n \r\n",
    "Hello, world!",
    " leading and trailing ",
    "  two  spaces   three  ",
    "don't I'LL we've N'T",
    "numbers 1 12 123 1234 12345 3.14 ½ ²",
    "naïve café ÅNGSTRÖM ﬁ ﬂ Ａｂｃ ①",
    "e\u0301 vs \u00e9, n\u0303",
    "日本語のテキストと漢字、かな。",
    "한국어 문장입니다",
    "مرحبا بالعالم، كيف حالك؟",
    "שָׁלוֹם עולם",
    "नमस्ते दुनिया",
    "emoji 😀👍🏽 family 👨‍👩‍👧‍👦 flag 🇩🇪",
    "zero\u200bwidth\u200djoin\ufeffbom\u00a0nbsp\u3000wide",
    "▁ already ▁meta▁",
    "<s> inside </s> the <unk> text<pad>x <|endoftext|>y",
    "[CLS] and [MASK]. [SEP]<mask> <bos>z",
    "a <mask> b <MASK>  [MASK] c <S> x",
    "x = {'a': [1, 2]}\n\n\tif x:\n        pass\n",
    "http://example.com/?q=a&b=c#d",
    "ab" * 40,
    "\u0000\u0001\u007f",
    "a\r\nb\rc",
    "Ċ Ġ ł",
    "<0x0A> <0xFF>",
]
CORPUS = [
    *HARD_TEXTS[5:24],
    "The quick brown fox jumps over the lazy dog and runs away from it.",
    "In the beginning there was a model, and the model was without form; and the tokens were upon the face of it.",
    "She sells sea shells by the sea shore; the shells she sells are surely seashells.",
    "def encode(text):\n    return [ord(c) for c in text]\n",
    "Der schnelle braune Fuchs springt über den faulen Hund. Ça va très bien, merci à tous.",
] * 4
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(
    st.sampled_from(
        [*"abe 'tnr.,1\n", "  ", "the", " the", "é", "日本", "😀", "</s>", "<s>", "▁", "\u0301", "<|endoftext|>"]
    ),
    max_size=14,
).map("".join)
LLAMA2_SPM_OPTIONS = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "vocab_size": 700,
}


def train_sentencepiece(directory: Path, name: str, **options: Any) -> bytes:
    defaults = {
        "vocab_size": 400,
        "hard_vocab_limit": False,
        "character_coverage": 0.98,
        "minloglevel": 2,
        "num_threads": 1,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(directory / "spm"), **(defaults | options)
    )
    data = (directory / "spm.model").read_bytes()
    (directory / "spm.model").unlink()
    (directory / "spm.vocab").unlink()
    (directory / name).write_bytes(data)
    return data


def write_file(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value) if not isinstance(value, str) else value)


def train_byte_bpe(split: pre_tokenizers.PreTokenizer | None = None, *special: str, size: int = 420) -> Backend:
    tokenizer = Backend(models.BPE())
    parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([part for part in parts if part is not None])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_gpt2_files(directory: Path) -> None:
    train_byte_bpe(None, "<|endoftext|>").model.save(str(directory))
    write_file(directory, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024})


def write_roberta_files(directory: Path) -> None:
    train_byte_bpe(None, "<s>", "<pad>", "</s>", "<unk>", "<mask>").model.save(str(directory))
    write_file(directory, "config.json", {"model_type": "roberta"})


def write_llama3_files(directory: Path) -> None:
    tokenizer = train_byte_bpe(pre_tokenizers.Split(Regex(GPT4_SPLIT_PATTERN), "isolated"), size=500)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                special_tokens=[("<|begin_of_text|>", bos)],
            ),
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_file(
        directory,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "clean_up_tokenization_spaces": True,
        },
    )
    write_file(directory, "config.json", {"model_type": "llama"})


def write_qwen2_files(directory: Path) -> None:
    train_byte_bpe(None).model.save(str(directory))
    added = {
        str(420 + i): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, t in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    }
    write_file(
        directory,
        "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": added,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_prefix_space": False,
        },
    )


def write_llama2_files(directory: Path, **config: Any) -> None:
    train_sentencepiece(
        directory, "tokenizer.model", **LLAMA2_SPM_OPTIONS, remove_extra_whitespaces=False, split_digits=True
    )
    unk, bos, eos = ({"__type": "AddedToken", "content": token, "lstrip": False} for token in ("<unk>", "<s>", "</s>"))
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": bos, "eos_token": eos}
    write_file(directory, "tokenizer_config.json", settings | {"unk_token": unk, "legacy": False} | config)


def write_gemma_files(directory: Path) -> None:
    train_sentencepiece(
        directory,
        "tokenizer.model",
        **LLAMA2_SPM_OPTIONS,
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols=["<mask>", "<start_of_turn>", "<end_of_turn>", "\n\n", "  "],
    )
    settings = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False}
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_file(directory, "tokenizer_config.json", settings | names)


def write_t5_files(directory: Path) -> None:
    train_sentencepiece(directory, "spiece.model", model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write_file(directory, "config.json", {"model_type": "t5"})


def write_bert_files(directory: Path, **config: Any) -> None:
    tokenizer = Backend(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=config.get("do_lower_case", True))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(directory))
    write_file(directory, "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"} | config)


def write_marian_files(directory: Path) -> None:
    pieces = []
    for name in ("source.spm", "target.spm"):
        train_sentencepiece(directory, name, model_type="unigram", vocab_size=300)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(directory / name))
        pieces += [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    names = ["</s>", "<unk>", *dict.fromkeys(pieces[::-1]), ">>fra<<", "<pad>"]
    # Some pieces of the source model have no id: they are unknown.
    names = [name for n, name in enumerate(names) if n % 17 or name.startswith("<")]
    write_file(directory, "vocab.json", {name: n for n, name in enumerate(names)})
    write_file(
        directory,
        "tokenizer_config.json",
        {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "fr"},
    )


def load_both_tokenizers(directory: Path) -> tuple[Tokenizer, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = AutoTokenizer.from_pretrained(directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer, peer


def assert_same_encoding(tokenizer: Tokenizer, peer: Any, text: str) -> None:
    for special in (True, False):
        ids = peer.encode(text, add_special_tokens=special)
        assert tokenizer.encode(text, add_special_tokens=special) == ids, repr(text)
        assert tokenizer.encode_batch([text, "a"], add_special_tokens=special)[0] == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == peer.decode(ids, skip_special_tokens=skip), (
                repr(text),
                skip,
            )
