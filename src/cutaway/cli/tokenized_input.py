"""Tokenized input of `cutaway trace` and `demo`. For an untrained model, which has no tokenizer, tokens are bytes."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutaway.cli.model_loading import build_untrained_model, load_checkpoint
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.cli.options import DType
    from cutaway.model import Transformer

MAX_TRACED_TOKENS = 2048
"""Maximum number of tokens. It is limited because all attention scores are stored."""


@dataclass
class TokenizedInput:
    """A model, its tokenizer, and one text tokenized for it."""

    model: "Transformer"
    text: str
    tokens: list[int]
    """Token ids. For an encoder-decoder, these are the decoder's."""
    source: list[int] | None = None
    target: str | None = None
    tokenizer: Any = None
    is_untrained: bool = False
    """True if the weights are random and the tokens are bytes."""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, token_ids in (("text", self.source or self.tokens), ("target", self.tokens)):
            if len(token_ids) > MAX_TRACED_TOKENS:
                limit = f"use at most {MAX_TRACED_TOKENS}, because all attention scores are stored"
                raise InputError(f"the {name} has {len(token_ids)} tokens; {limit}")

    def token_str(self, token: int) -> str:
        """Return a token's text in quotes, with control characters escaped. Without a text, return the id as <id>."""
        if self.is_untrained:
            return repr(bytes([token]))[1:] if token < 256 else f"<{token}>"
        from cutaway.cli.views.terminal import escape_control_characters

        text = "" if self.tokenizer is None else self.tokenizer.format_token(token)
        return escape_control_characters(repr(text)) if text else f"<{token}>"

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens. An incomplete character at the end is dropped."""
        if self.is_untrained:
            return bytes(token for token in tokens if token < 256).decode("utf-8", "ignore")
        text = "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text.rstrip("\ufffd")

    @property
    def traced_tokens(self) -> list[int]:
        """The tokens that --position refers to: the target if --target is set, else the input."""
        return self.tokens if self.source is None or self.target is not None else self.source

    def resolve_position(self, position: str) -> int:
        """Return the index of a token in `traced_tokens`.

        `position` is the token's index, which may be negative, or a part of the text whose last occurrence ends in the
        token.
        """
        tokens = self.traced_tokens
        try:
            index = int(position)
        except ValueError:
            return self._find_position(position, tokens)
        if not -len(tokens) <= index < len(tokens):
            raise InputError(
                f"--position is {index}; the text has tokens 0 to {len(tokens) - 1}, so "
                "use one of these, or a negative index from the end"
            )
        return index % len(tokens)

    def _find_position(self, substring: str, tokens: list[int]) -> int:
        from bisect import bisect_left

        text = self.decode(tokens)
        start = text.rfind(substring) if substring else -1
        if start < 0:
            raise InputError(
                f"--position is '{substring}', which is not in the decoded text; use a part of the text, or"
                f" the index of a token, 0 to {len(tokens) - 1}"
            )
        end = start + len(substring)
        return bisect_left(range(len(tokens)), end, key=lambda last: len(self.decode(tokens[: last + 1])))


def load_tokenized_input(
    source: str,
    text: str,
    target: str | None,
    device: str | None,
    dtype: "DType | None",
    *,
    quiet: bool,
    adapter: str | None = None,
) -> TokenizedInput:
    """Load a checkpoint, or build an untrained model, and tokenize the text. `target` is the decoder's text."""
    from cutaway.cli.prompts import read_stdin, split_prompts

    text = next(split_prompts(read_stdin(), False)) if text == "-" else text
    if not text:
        raise InputError("the text is empty; pass at least one character")
    untrained_model = build_untrained_model(source, device, dtype, adapter)
    if untrained_model is not None:
        tokenized = tokenize_bytes(untrained_model, text, target)
    else:
        checkpoint = load_checkpoint(source, device, dtype, quiet=quiet, adapters=adapter)
        tokenized = tokenize_for_checkpoint(checkpoint, text, target)
    config = tokenized.model.config
    if target is not None and len(tokenized.model.stacks) == 1:
        raise InputError(
            f"--target requires an encoder-decoder, but the form of this model is {config.form}; leave it out"
        )
    context = config.context
    if context is not None and len(tokenized.tokens) > context:
        tokenized.notes.append(f"the text has {len(tokenized.tokens)} tokens, more than the context of {context}")
    return tokenized


def tokenize_bytes(model: "Transformer", text: str, target: str | None) -> TokenizedInput:
    """Tokenize a text to bytes, for a model without a tokenizer."""

    def encode(text: str, vocab_size: int) -> list[int]:
        return [byte % vocab_size for byte in text.encode("utf-8", "surrogateescape")]

    vocab_size = model.config.vocab_size
    if len(model.stacks) == 1:
        return TokenizedInput(model, text, encode(text, vocab_size), is_untrained=True)
    source_ids = encode(text, getattr(model.config, "source_vocab_size", None) or vocab_size)
    decoder_ids = encode(text if target is None else target, vocab_size) or [0]
    return TokenizedInput(model, text, decoder_ids, source_ids, target, is_untrained=True)


def tokenize_for_checkpoint(checkpoint: Any, text: str, target: str | None) -> TokenizedInput:
    from cutaway.generate.generation_config import unpack_checkpoint

    model, tokenizer, generation_config = unpack_checkpoint(checkpoint)
    token_ids = _encode_text(tokenizer, text)
    if len(model.stacks) == 1:
        return TokenizedInput(model, text, token_ids, tokenizer=tokenizer)
    start_token = generation_config.decoder_start_token_id
    if start_token is None:
        raise InputError(
            "this checkpoint has no decoder_start_token_id, the first decoder token; add it to its "
            "generation_config.json"
        )
    target_ids = _encode_text(tokenizer, target, add_special_tokens=False) if target else []
    return TokenizedInput(model, text, [start_token, *target_ids], token_ids, target, tokenizer)


def _encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Tokenize a text. Without a tokenizer, parse it as token ids."""
    if tokenizer is not None:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise InputError("the text has no tokens in this model's vocabulary; pass another text")
        return token_ids
    from cutaway.cli.prompts import parse_token_ids

    try:
        return parse_token_ids("the text", text)
    except InputError:
        raise InputError("this model has no tokenizer; pass token ids, such as 1,2,3") from None
