"""Pre-tokenization patterns of byte-level BPE by their GGUF names, and the byte-to-unicode table."""

from collections.abc import Sequence

from tokenizers import Regex, pre_tokenizers

from cutaway.errors import InputError

# Contractions, then words, digits, punctuation, newlines and spaces; the families differ in how digits are grouped.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_SPLIT_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4_SPLIT_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION_AND_SPACES
QWEN2_SPLIT_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION_AND_SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+{0}|" + r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*{0}"
)
_CASED_PUNCTUATION_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O_SPLIT_PATTERN = _CASED_WORDS.replace("{0}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_PUNCTUATION_AND_SPACES
_TEKKEN_SPLIT_PATTERN = _CASED_WORDS.replace("{0}", "") + r"|\p{N}" + _CASED_PUNCTUATION_AND_SPACES
_DEEPSEEK3_SPLIT_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM_SPLIT_PATTERN = r" ?[^(\s|.,!?…。，、।۔،)]+"

SPLIT_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_SPLIT_PATTERN,),
    "llama-bpe": (GPT4_SPLIT_PATTERN,),
    "qwen2": (QWEN2_SPLIT_PATTERN,),
    "smollm": (r"\p{N}", _GPT2_SPLIT_PATTERN),
    "gpt-4o": (_GPT4O_SPLIT_PATTERN,),
    "tekken": (_TEKKEN_SPLIT_PATTERN,),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3_SPLIT_PATTERN),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_SPLIT_PATTERN, "[0-9][0-9][0-9]"),
    "bloom": (_BLOOM_SPLIT_PATTERN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""GGUF name → split patterns. They are applied in order, each to the pieces that the previous pattern returns."""
_PRE_TOKENIZER_ALIASES = {
    "gpt-2": "gpt2 mpt olmo jais phi-2 roberta-bpe jina-v1-en jina-v2-es jina-v2-de jina-v2-code trillion",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 dbrx smaug-bpe chatglm-bpe glm4 pixtral midm-2.0 lfm2",
    "qwen2": "stablelm2 deepseek-r1-qwen hunyuan megrez kormo grok-2",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b",
    "gpt-4o": "llama4 minimax-m2",
    "bloom": "poro-chat gpt3-finnish",
}
PRE_TOKENIZER_NAMES = {name: name for name in SPLIT_PATTERNS} | {
    other: name for name, line in _PRE_TOKENIZER_ALIASES.items() for other in line.split()
}
IGNORE_MERGES = frozenset({"llama-bpe", "tekken", "gpt-4o"})
"""Pre-tokenizers where a word in the vocabulary is one token even if no merges lead to it, as in tiktoken."""

ADD_BOS_BY_DEFAULT = frozenset({"llama-bpe", "tekken"})
"""Pre-tokenizers that add BOS if the GGUF file does not specify it."""


def get_split_patterns(name: str) -> tuple[str, ...]:
    """Split patterns of a GGUF pre-tokenizer (`tokenizer.ggml.pre`)."""
    if name not in PRE_TOKENIZER_NAMES:
        known = ", ".join(sorted(SPLIT_PATTERNS))
        raise InputError(f"tokenizer.ggml.pre is {name!r}, which cutaway does not support; supported are {known}")
    return SPLIT_PATTERNS[PRE_TOKENIZER_NAMES[name]]


def build_byte_level_pre_tokenizer(
    patterns: Sequence[str], *, add_prefix_space: bool = False
) -> pre_tokenizers.PreTokenizer:
    """Pre-tokenizer that splits by the patterns, then maps each byte to one printable character."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, to_bytes])


def bytes_to_unicode() -> dict[int, str]:
    """Return GPT-2's {byte: character}. Printable Latin-1 bytes are unchanged, others become U+0100, U+0101 …"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
