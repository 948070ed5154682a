"""Tokenizer pipelines (normalizer, pre-tokenizer, model, decoder, post-processor) by tokenizer class.

transformers rebuilds the pipeline of these classes from the vocabulary, even if tokenizer.json has a pipeline, so the
same is done here to get the same ids. For any other class, tokenizer.json is used unchanged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordPiece

from cutaway.errors import InputError
from cutaway.tokenizer.split_patterns import QWEN2_SPLIT_PATTERN, build_byte_level_pre_tokenizer
from cutaway.tokenizer.tokenizer_config import TokenizerConfig, token_content
from cutaway.tokenizer.vocabulary import Vocabulary

_ModelType = Literal["BPE", "Unigram", "WordPiece"]


_SpecialTokenIds = Mapping[str, tuple[str, int]]
"""bos_token, eos_token and so on, if present → (content, id)."""
_PostProcessorBuilder = Callable[[_SpecialTokenIds], processors.PostProcessor]


def _build_byte_level_bpe(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=False))
    prefix = cfg.get_bool("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_nfc_byte_level_bpe(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    tokenizer = _build_byte_level_bpe(vocabulary, cfg)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _build_qwen2(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    tokenizer = _build_nfc_byte_level_bpe(vocabulary, cfg)
    prefix = cfg.get_bool("add_prefix_space", False)
    tokenizer.pre_tokenizer = build_byte_level_pre_tokenizer([QWEN2_SPLIT_PATTERN], add_prefix_space=prefix)
    return tokenizer


def _build_cohere(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    tokenizer = _build_nfc_byte_level_bpe(vocabulary, cfg)
    prefix = cfg.get_bool("add_prefix_space", False)
    digits, to_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    return tokenizer


def build_metaspace_decoder(*, add_prefix_space: bool) -> decoders.Decoder:
    """Build a decoder that maps ▁ to a space and <0x..> to a byte, and removes the prefix space if one is added."""
    parts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(content=" ", left=1)] if add_prefix_space else parts)


def _build_llama(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    tokenizer = Tokenizer(BPE(vocab=vocabulary.ids, merges=vocabulary.merges, fuse_unk=True, byte_fallback=True))
    prefix = cfg.get_bool("add_prefix_space", True)
    scheme = ("always" if cfg.get_bool("legacy", False) else "first") if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = build_metaspace_decoder(add_prefix_space=prefix)
    return tokenizer


def _build_gemma(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    unk = token_content(cfg.special_tokens.get("unk_token", "<unk>"))
    tokenizer = Tokenizer(BPE(vocabulary.ids, vocabulary.merges, fuse_unk=True, byte_fallback=True, unk_token=unk))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = build_metaspace_decoder(add_prefix_space=False)
    return tokenizer


def _build_unigram(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    tokenizer = Tokenizer(Unigram(vocabulary.scores, unk_id=vocabulary.unk_id, byte_fallback=False))
    if vocabulary.precompiled_charsmap is not None:
        tokenizer.normalizer = normalizers.Precompiled(vocabulary.precompiled_charsmap)
    scheme = "always" if cfg.get_bool("add_prefix_space", True) else "never"
    words, spaces = pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, spaces])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    return tokenizer


def _build_albert(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    tokenizer = _build_unigram(vocabulary, cfg)
    steps: list[normalizers.Normalizer] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not cfg.get_bool("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if cfg.get_bool("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    if vocabulary.precompiled_charsmap is not None:
        steps.append(normalizers.Precompiled(vocabulary.precompiled_charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _build_wordpiece(vocabulary: Vocabulary, cfg: TokenizerConfig) -> Tokenizer:
    unk = cfg.special_tokens.get("unk_token", "[UNK]")
    tokenizer = Tokenizer(WordPiece(vocabulary.ids, unk_token=token_content(unk)))
    accents = cfg.get_bool("strip_accents", False) if cfg.options.get("strip_accents") is not None else None
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=cfg.get_bool("tokenize_chinese_chars", True),
        strip_accents=accents,
        lowercase=cfg.get_bool("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _template_processor(first: str | None, last: str) -> _PostProcessorBuilder:
    """Return a builder of a post-processor: `first` A `last` for a text A, `first` A `last` B `last` for a pair."""

    def template(ids: _SpecialTokenIds) -> processors.PostProcessor:
        head = f"{ids[first][0]}:0 " if first else ""
        end = ids[last][0]
        return processors.TemplateProcessing(
            single=f"{head}$A:0 {end}:0",
            pair=f"{head}$A:0 {end}:0 $B:1 {end}:1",
            special_tokens=[ids[name] for name in (first, last) if name],
        )

    return template


def _roberta_processor(ids: _SpecialTokenIds) -> processors.PostProcessor:
    """Post-processor that encodes a pair of texts A, B as <s> A </s> </s> B </s>."""
    return processors.RobertaProcessing(ids["sep_token"], ids["cls_token"])


@dataclass(frozen=True)
class PipelineSpec:
    """How to build the pipeline of a tokenizer class from a vocabulary."""

    model_type: _ModelType
    build: Callable[[Vocabulary, TokenizerConfig], Tokenizer]
    default_special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens that are used if the directory does not set them."""
    post_processor: _PostProcessorBuilder | None = None
    """Builds the post-processor. If None, `keep_json_post_processor` decides."""
    keep_json_post_processor: bool = True
    """Use the post-processor of tokenizer.json, if there is one."""
    padding_side: Literal["left", "right"] = "right"
    num_extra_ids: int = 0
    """Default number of sentinel tokens <extra_id_n> after the vocabulary."""
    mask_lstrip: bool = False
    """Whether the mask token includes the preceding space."""


def sentinel_tokens(pipeline: PipelineSpec, cfg: TokenizerConfig) -> list[AddedToken]:
    """Sentinel tokens <extra_id_n> of T5. Their number is `extra_ids` of tokenizer_config.json or the class default."""
    count = cfg.options.get("extra_ids", pipeline.num_extra_ids)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 10_000:
        source = cfg.source
        raise InputError(f"{source} sets extra_ids to {count!r:.40}; it must be an integer from 0 to 10000")
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
        _template_processor(None, "eos_token"),
        num_extra_ids=100,
    ),
    "XLMRobertaTokenizer": PipelineSpec(
        "Unigram", _build_unigram, _FAIRSEQ_TOKENS, _template_processor("bos_token", "eos_token")
    ),
    "AlbertTokenizer": PipelineSpec(
        "Unigram",
        _build_albert,
        _special_tokens(bos="[CLS]", eos="[SEP]", unk="<unk>", sep="[SEP]", pad="<pad>", cls="[CLS]", mask="[MASK]"),
        _template_processor("cls_token", "sep_token"),
    ),
    "BertTokenizer": PipelineSpec(
        "WordPiece", _build_wordpiece, _BERT_TOKENS, _template_processor("cls_token", "sep_token")
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
    """Post-processor: BOS before and EOS after a text. A token that is None or whose flag is False is omitted."""
    first, last = (token if flag else None for token, flag in zip((bos, eos), add_bos_eos, strict=True))
    # Template ids are arbitrary names; the text of the tokens may contain colons and spaces.
    begin, end = (["BOS:0"] if first else []), (["EOS:0"] if last else [])
    single = [*begin, "$A:0", *end]
    pair = [*single, *(part.replace(":0", ":1") for part in [*begin, "$B:0", *end])]
    used = [("BOS", first), ("EOS", last)]
    special = [{"id": name, "ids": [token[1]], "tokens": [token[0]]} for name, token in used if token]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
