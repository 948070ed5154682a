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
from cutaway.tokenizer.split_patterns import QWEN2_SPLIT_PATTERN, build_byte_level_pre_tokenizer
from cutaway.tokenizer.tokenizer_config import TokenizerConfig, token_content
from cutaway.tokenizer.vocabulary import Vocabulary

ModelType = Literal["BPE", "Unigram", "WordPiece"]


SpecialTokenIds = Mapping[str, tuple[str, int]]
"""The named special tokens that exist, as (content, id)."""


def _build_byte_level_bpe(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=False))
    prefix = tokenizer_config.get_bool("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_nfc_byte_level_bpe(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    tokenizer = _build_byte_level_bpe(vocabulary, tokenizer_config)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _build_qwen2(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    tokenizer = _build_nfc_byte_level_bpe(vocabulary, tokenizer_config)
    tokenizer.pre_tokenizer = build_byte_level_pre_tokenizer(
        [QWEN2_SPLIT_PATTERN], add_prefix_space=tokenizer_config.get_bool("add_prefix_space", False)
    )
    return tokenizer


def _build_cohere(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    tokenizer = _build_nfc_byte_level_bpe(vocabulary, tokenizer_config)
    prefix = tokenizer_config.get_bool("add_prefix_space", False)
    digits, to_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    return tokenizer


def build_metaspace_decoder(*, add_prefix_space: bool) -> decoders.Decoder:
    """▁ becomes a space, <0x..> a byte, and the space set before the text goes."""
    parts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if add_prefix_space else parts)


def _build_llama(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=True, byte_fallback=True))
    prefix = tokenizer_config.get_bool("add_prefix_space", True)
    scheme = ("always" if tokenizer_config.get_bool("legacy", False) else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = build_metaspace_decoder(add_prefix_space=prefix)
    return tokenizer


def _build_gemma(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    unk = tokenizer_config.special_tokens.get("unk_token", "<unk>")
    model = BPE(
        vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=True, byte_fallback=True, unk_token=token_content(unk)
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = build_metaspace_decoder(add_prefix_space=False)
    return tokenizer


def _build_unigram(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    tokenizer = Tokenizer(Unigram(vocabulary.scores, unk_id=vocabulary.unk_id, byte_fallback=False))
    if vocabulary.precompiled_charsmap is not None:
        tokenizer.normalizer = normalizers.Precompiled(vocabulary.precompiled_charsmap)
    scheme = "always" if tokenizer_config.get_bool("add_prefix_space", True) else "never"
    words, spaces = pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, spaces])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    return tokenizer


def _build_albert(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    tokenizer = _build_unigram(vocabulary, tokenizer_config)
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not tokenizer_config.get_bool("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if tokenizer_config.get_bool("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    if vocabulary.precompiled_charsmap is not None:
        steps.append(normalizers.Precompiled(vocabulary.precompiled_charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _build_wordpiece(vocabulary: Vocabulary, tokenizer_config: TokenizerConfig) -> Tokenizer:
    unk = tokenizer_config.special_tokens.get("unk_token", "[UNK]")
    tokenizer = Tokenizer(WordPiece(vocabulary.ids, unk_token=token_content(unk)))
    accents = (
        None
        if tokenizer_config.options.get("strip_accents") is None
        else tokenizer_config.get_bool("strip_accents", False)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=tokenizer_config.get_bool("tokenize_chinese_chars", True),
        strip_accents=accents,
        lowercase=tokenizer_config.get_bool("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def template_processor(first: str | None, last: str) -> Callable[[SpecialTokenIds], Any]:
    """The named token `first` before and `last` behind; a pair of texts follows BERT's way."""

    def template(ids: SpecialTokenIds) -> Any:
        head = f"{ids[first][0]}:0 " if first else ""
        end = ids[last][0]
        return processors.TemplateProcessing(
            single=f"{head}$A:0 {end}:0",
            pair=f"{head}$A:0 {end}:0 $B:1 {end}:1",
            special_tokens=[ids[name] for name in (first, last) if name],
        )

    return template


def _roberta_processor(ids: SpecialTokenIds) -> Any:
    """RoBERTa's: <s> A </s> </s> B </s>."""
    return processors.RobertaProcessing(ids["sep_token"], ids["cls_token"])


@dataclass(frozen=True)
class PipelineSpec:
    model_type: ModelType
    build: Callable[[Vocabulary, TokenizerConfig], Tokenizer]
    default_special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens where the directory names none."""
    post_processor: Callable[[SpecialTokenIds], Any] | None = None
    """In place of tokenizer.json's own post-processor."""
    keep_json_post_processor: bool = True
    padding_side: Literal["left", "right"] = "right"
    num_extra_ids: int = 0
    """How many <extra_id_n> follow the vocabulary, unless the directory says otherwise."""
    mask_lstrip: bool = False
    """The mask token takes the space before it."""


def sentinel_tokens(pipeline: PipelineSpec, tokenizer_config: TokenizerConfig) -> list[AddedToken]:
    count = tokenizer_config.options.get("extra_ids", pipeline.num_extra_ids)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 10_000:
        raise InputError(f"{tokenizer_config.source} sets extra_ids to {count!r:.40}; it must be a small whole number")
    return [AddedToken(f"<extra_id_{n}>", normalized=False, special=True) for n in range(count)]


def _special_tokens(**tokens: str) -> dict[str, str]:
    return {f"{name}_token": token for name, token in tokens.items()}


_ENDOFTEXT = "<|endoftext|>"
_BERT_TOKENS = _special_tokens(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
_FAIRSEQ_TOKENS = _special_tokens(bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>")

PIPELINES: dict[str, PipelineSpec] = {
    "GPT2Tokenizer": PipelineSpec(
        "BPE", _build_byte_level_bpe, _special_tokens(unk=_ENDOFTEXT, bos=_ENDOFTEXT, eos=_ENDOFTEXT)
    ),
    "GPTNeoXTokenizer": PipelineSpec(
        "BPE",
        _build_nfc_byte_level_bpe,
        _special_tokens(unk=_ENDOFTEXT, bos=_ENDOFTEXT, eos=_ENDOFTEXT, pad="<|padding|>"),
        keep_json_post_processor=False,
    ),
    "Qwen2Tokenizer": PipelineSpec(
        "BPE", _build_qwen2, _special_tokens(unk=_ENDOFTEXT, eos=_ENDOFTEXT, pad=_ENDOFTEXT)
    ),
    "CohereTokenizer": PipelineSpec(
        "BPE",
        _build_cohere,
        _special_tokens(
            unk="<UNK>", bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>", cls="<CLS>", sep="<SEP>"
        )
        | _special_tokens(mask="<MASK_TOKEN>"),
        padding_side="left",
    ),
    "RobertaTokenizer": PipelineSpec("BPE", _build_byte_level_bpe, _FAIRSEQ_TOKENS, _roberta_processor),
    "LlamaTokenizer": PipelineSpec(
        "BPE", _build_llama, _special_tokens(unk="<unk>", bos="<s>", eos="</s>"), padding_side="left"
    ),
    "GemmaTokenizer": PipelineSpec(
        "BPE",
        _build_gemma,
        _special_tokens(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>"),
        padding_side="left",
    ),
    "T5Tokenizer": PipelineSpec(
        "Unigram",
        _build_unigram,
        _special_tokens(eos="</s>", unk="<unk>", pad="<pad>"),
        template_processor(None, "eos_token"),
        num_extra_ids=100,
    ),
    "XLMRobertaTokenizer": PipelineSpec(
        "Unigram", _build_unigram, _FAIRSEQ_TOKENS, template_processor("bos_token", "eos_token")
    ),
    "AlbertTokenizer": PipelineSpec(
        "Unigram",
        _build_albert,
        _special_tokens(bos="[CLS]", eos="[SEP]", unk="<unk>", sep="[SEP]", pad="<pad>", cls="[CLS]", mask="[MASK]"),
        template_processor("cls_token", "sep_token"),
    ),
    "BertTokenizer": PipelineSpec(
        "WordPiece", _build_wordpiece, _BERT_TOKENS, template_processor("cls_token", "sep_token")
    ),
    "MPNetTokenizer": PipelineSpec(
        "WordPiece",
        _build_wordpiece,
        _FAIRSEQ_TOKENS | _special_tokens(unk="[UNK]"),
        _roberta_processor,
        mask_lstrip=True,
    ),
}


def bos_eos_processor(
    bos: tuple[str, int] | None, eos: tuple[str, int] | None, add_bos_eos: tuple[bool, bool]
) -> processors.TemplateProcessing:
    """BOS before and EOS behind each text, where wanted and existing."""
    first, last = (token if flag else None for token, flag in zip((bos, eos), add_bos_eos, strict=True))
    # In a template a special token may be named by anything; its own text may hold colons and spaces.
    begin, end = (["BOS:0"] if first else []), (["EOS:0"] if last else [])
    single = [*begin, "$A:0", *end]
    pair = [*single, *(part.replace(":0", ":1") for part in [*begin, "$B:0", *end])]
    used = [("BOS", first), ("EOS", last)]
    special = [{"id": name, "ids": [token[1]], "tokens": [token[0]]} for name, token in used if token]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
