"""The pipelines around a vocabulary, by the class that a directory names.

transformers builds these classes anew from the vocabulary, even where a tokenizer.json describes a pipeline, and models
are used with those ids; so the same is done here. Any other class means: tokenizer.json as it stands.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

from cutaway.errors import InputError
from cutaway.text.settings import Settings, str_of
from cutaway.text.splits import QWEN2, byte_level
from cutaway.text.vocabulary import Vocabulary

Kind = Literal["BPE", "Unigram", "WordPiece"]
Ids = Mapping[str, tuple[str, int]]
"""The named special tokens that exist, as (content, id)."""


def _byte_level_bpe(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=False))
    prefix = settings.flag("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _composed(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    tokenizer = _byte_level_bpe(vocabulary, settings)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _qwen2(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    tokenizer = _composed(vocabulary, settings)
    tokenizer.pre_tokenizer = byte_level([QWEN2], prefix=settings.flag("add_prefix_space", False))
    return tokenizer


def _cohere(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    tokenizer = _composed(vocabulary, settings)
    prefix = settings.flag("add_prefix_space", False)
    digits, to_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    return tokenizer


def spaced_decoder(*, prefix: bool) -> decoders.Decoder:
    """▁ becomes a space, <0x..> a byte, and the space set before the text goes."""
    parts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if prefix else parts)


def _llama(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=True, byte_fallback=True))
    prefix = settings.flag("add_prefix_space", True)
    scheme = ("always" if settings.flag("legacy", False) else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = spaced_decoder(prefix=prefix)
    return tokenizer


def _gemma(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    unk = settings.named.get("unk_token", "<unk>")
    model = BPE(
        vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=True, byte_fallback=True, unk_token=str_of(unk)
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = spaced_decoder(prefix=False)
    return tokenizer


def _unigram(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    tokenizer = Tokenizer(Unigram(vocabulary.scores, unk_id=vocabulary.unk_id, byte_fallback=False))
    if vocabulary.charsmap is not None:
        tokenizer.normalizer = normalizers.Precompiled(vocabulary.charsmap)
    scheme = "always" if settings.flag("add_prefix_space", True) else "never"
    words, spaces = pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, spaces])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    return tokenizer


def _albert(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    tokenizer = _unigram(vocabulary, settings)
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.flag("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.flag("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    if vocabulary.charsmap is not None:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _wordpiece(vocabulary: Vocabulary, settings: Settings) -> Tokenizer:
    unk = settings.named.get("unk_token", "[UNK]")
    tokenizer = Tokenizer(WordPiece(vocabulary.ids, unk_token=str_of(unk)))
    accents = None if settings.options.get("strip_accents") is None else settings.flag("strip_accents", False)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=accents,
        lowercase=settings.flag("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def around(first: str | None, last: str) -> Callable[[Ids], Any]:
    """The named token `first` before and `last` behind; a pair of texts follows BERT's way."""

    def template(ids: Ids) -> Any:
        head = f"{ids[first][0]}:0 " if first else ""
        end = ids[last][0]
        return processors.TemplateProcessing(
            single=f"{head}$A:0 {end}:0",
            pair=f"{head}$A:0 {end}:0 $B:1 {end}:1",
            special_tokens=[ids[name] for name in (first, last) if name],
        )

    return template


def _doubled(ids: Ids) -> Any:
    """RoBERTa's: <s> A </s> </s> B </s>."""
    return processors.RobertaProcessing(ids["sep_token"], ids["cls_token"])


@dataclass(frozen=True)
class Recipe:
    kind: Kind
    build: Callable[[Vocabulary, Settings], Tokenizer]
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Special tokens where the directory names none."""
    post: Callable[[Ids], Any] | None = None
    """In place of tokenizer.json's own post-processor."""
    keeps_post: bool = True
    padding_side: Literal["left", "right"] = "right"
    sentinels: int = 0
    """How many <extra_id_n> follow the vocabulary, unless the directory says otherwise."""
    mask_takes_space: bool = False
    """The one before it."""


def sentinels(recipe: Recipe, settings: Settings) -> list[AddedToken]:
    count = settings.options.get("extra_ids", recipe.sentinels)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 10_000:
        raise InputError(f"{settings.where} sets extra_ids to {count!r:.40}; it must be a small whole number")
    return [AddedToken(f"<extra_id_{n}>", normalized=False, special=True) for n in range(count)]


def _names(**tokens: str) -> dict[str, str]:
    return {f"{name}_token": token for name, token in tokens.items()}


_END = "<|endoftext|>"
_BERT = _names(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
_FAIRSEQ = _names(bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>")
RECIPES: dict[str, Recipe] = {
    "GPT2Tokenizer": Recipe("BPE", _byte_level_bpe, _names(unk=_END, bos=_END, eos=_END)),
    "GPTNeoXTokenizer": Recipe(
        "BPE", _composed, _names(unk=_END, bos=_END, eos=_END, pad="<|padding|>"), keeps_post=False
    ),
    "Qwen2Tokenizer": Recipe("BPE", _qwen2, _names(unk=_END, eos=_END, pad=_END)),
    "CohereTokenizer": Recipe(
        "BPE",
        _cohere,
        _names(unk="<UNK>", bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>", cls="<CLS>", sep="<SEP>")
        | _names(mask="<MASK_TOKEN>"),
        padding_side="left",
    ),
    "RobertaTokenizer": Recipe("BPE", _byte_level_bpe, _FAIRSEQ, _doubled),
    "LlamaTokenizer": Recipe("BPE", _llama, _names(unk="<unk>", bos="<s>", eos="</s>"), padding_side="left"),
    "GemmaTokenizer": Recipe(
        "BPE",
        _gemma,
        _names(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>"),
        padding_side="left",
    ),
    "T5Tokenizer": Recipe(
        "Unigram",
        _unigram,
        _names(eos="</s>", unk="<unk>", pad="<pad>"),
        around(None, "eos_token"),
        sentinels=100,
    ),
    "XLMRobertaTokenizer": Recipe("Unigram", _unigram, _FAIRSEQ, around("bos_token", "eos_token")),
    "AlbertTokenizer": Recipe(
        "Unigram",
        _albert,
        _names(bos="[CLS]", eos="[SEP]", unk="<unk>", sep="[SEP]", pad="<pad>", cls="[CLS]", mask="[MASK]"),
        around("cls_token", "sep_token"),
    ),
    "BertTokenizer": Recipe("WordPiece", _wordpiece, _BERT, around("cls_token", "sep_token")),
    "MPNetTokenizer": Recipe("WordPiece", _wordpiece, _FAIRSEQ | _names(unk="[UNK]"), _doubled, mask_takes_space=True),
}
