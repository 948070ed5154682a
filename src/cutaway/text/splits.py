"""How byte-level BPE cuts text before it merges: the patterns in use, by the names that GGUF gives them."""

from collections.abc import Sequence

from tokenizers import Regex, pre_tokenizers

from cutaway.errors import InputError

# Contractions, then words, digits, punctuation, newlines and spaces; the families differ in how digits are grouped.
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN2 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+{0}|" + r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*{0}"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = _CASED.replace("{0}", _ENGLISH + "?") + r"|\p{N}{1,3}" + _CASED_REST
TEKKEN = _CASED.replace("{0}", "") + r"|\p{N}" + _CASED_REST
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "llama-bpe": (GPT4,),
    "qwen2": (QWEN2,),
    "smollm": (r"\p{N}", GPT2),
    "gpt-4o": (GPT4O,),
    "tekken": (TEKKEN,),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "bloom": (_BLOOM,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""One pattern after another, each cutting what the ones before it left."""
_SAME = {
    "gpt-2": "gpt2 mpt olmo jais phi-2 roberta-bpe jina-v1-en jina-v2-es jina-v2-de jina-v2-code trillion",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 dbrx smaug-bpe chatglm-bpe glm4 pixtral midm-2.0 lfm2",
    "qwen2": "stablelm2 deepseek-r1-qwen hunyuan megrez kormo grok-2",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b",
    "gpt-4o": "llama4 minimax-m2",
    "bloom": "poro-chat gpt3-finnish",
}
NAMES = {name: name for name in PATTERNS} | {other: name for name, line in _SAME.items() for other in line.split()}
IGNORES_MERGES = frozenset({"llama-bpe", "tekken", "gpt-4o"})
"""A word that is a token whole is taken whole, even if no chain of merges leads to it: tiktoken's rule."""

ADDS_BOS = frozenset({"llama-bpe", "tekken"})
"""Where a GGUF file does not say."""


def patterns_named(name: str) -> tuple[str, ...]:
    if name not in NAMES:
        known = ", ".join(sorted(PATTERNS))
        raise InputError(f"the GGUF file cuts text by the rule {name!r}, which is not known here; known are {known}")
    return PATTERNS[NAMES[name]]


def byte_level(patterns: Sequence[str], *, prefix: bool = False) -> pre_tokenizers.PreTokenizer:
    """Cut by the patterns, then write each byte as one visible character."""
    parts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
    ]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)])


def byte_characters() -> dict[int, str]:
    """GPT-2's visible character for each byte: printable Latin-1 for itself, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in shown)
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
