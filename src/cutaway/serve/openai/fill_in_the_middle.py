"""`suffix` of /v1/completions: prompts for fill-in-the-middle, of models whose tokenizer has the tokens for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cutaway.serve.errors import APIError
from cutaway.serve.openai.serving_engine import ServingEngine
from cutaway.tokenizer import Tokenizer


class FIMTokens(NamedTuple):
    """Tokens of the order prefix, suffix, middle (PSM). The model writes the middle after the last one."""

    prefix: str
    suffix: str
    middle: str


FIM_TOKENS = (
    FIMTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite, StableCode
    FIMTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FIMTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    FIMTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    FIMTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
END_TOKENS = ("▁<EOT>", "<fim_pad>", "<fim-pad>", "<|fim_pad|>", "<file_sep>", "<|file_sep|>", "<|file_separator|>")
"""Tokens that end the middle, in addition to EOS."""


def require_fim_tokens(tokenizer: Tokenizer) -> FIMTokens:
    """Return the fill-in-the-middle tokens of a tokenizer. Raise if it has none."""
    for tokens in FIM_TOKENS:
        if all(tokenizer.token_to_id(token) is not None for token in tokens):
            return tokens
    message = "suffix needs a model with fill-in-the-middle tokens, such as StarCoder or Qwen2.5-Coder; leave it out"
    raise APIError(400, message, param="suffix", code="unsupported_parameter")


def fim_stop_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that end the middle."""
    return [token_id for token in END_TOKENS if (token_id := tokenizer.token_to_id(token)) is not None]


def build_fim_encoder(
    prompts: Sequence[str | list[int]], suffix: str, serving: ServingEngine
) -> Callable[[], list[list[int]]]:
    """Return a function that tokenizes prompts and the text that follows their completion."""
    tokenizer = serving.get_tokenizer()
    tokens = require_fim_tokens(tokenizer)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise APIError(400, "suffix needs prompts that are texts, not token ids; send texts", param="suffix")
    serving.check_text_length([text + suffix for text in texts], "prompt")
    return lambda: [encode_fim(tokenizer, tokens, text, suffix) for text in texts]


def encode_fim(tokenizer: Tokenizer, tokens: FIMTokens, prefix: str, suffix: str) -> list[int]:
    """Token ids of a fill-in-the-middle prompt."""
    if not tokens.prefix.startswith("▁"):
        return tokenizer.encode(f"{tokens.prefix}{prefix}{tokens.suffix}{suffix}{tokens.middle}")
    # SentencePiece puts a space before a text. Code Llama has it before the prefix, but not before the suffix.
    prefix_id, suffix_id, middle_id = (tokenizer.token_to_id(token) for token in tokens)
    assert prefix_id is not None
    assert suffix_id is not None
    assert middle_id is not None
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prefix_ids = tokenizer.encode(prefix, add_special_tokens=False)
    return [*bos, prefix_id, *prefix_ids, suffix_id, *_encode_without_space(tokenizer, suffix), middle_id]


def _encode_without_space(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text that is not the start of a text: after a character that merges with no other."""
    start = tokenizer.encode("☺", add_special_tokens=False)
    return tokenizer.encode(f"☺{text}", add_special_tokens=False)[len(start) :]
