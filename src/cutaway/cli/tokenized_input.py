"""A model, and a text as it reads it: a checkpoint's tokens, or the bytes of a model that was never trained."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutaway.cli.model_loading import build_untrained_model, load_checkpoint
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.cli.model_loading import DType
    from cutaway.model import Transformer

MAX_TRACED_TOKENS = 2048
"""Tokens of a text: every score is drawn."""


@dataclass
class TokenizedInput:
    """A model, what it reads, and how its tokens are spelled."""

    model: "Transformer"
    text: str
    tokens: list[int]
    """Of a decoder's own text, if there is an encoder beside it."""
    source: list[int] | None = None
    target: str | None = None
    tokenizer: Any = None
    is_untrained: bool = False
    """Whether the weights are random, and the tokens bytes."""
    notes: list[str] = field(default_factory=list)

    def token_str(self, token: int) -> str:
        """A token as it is shown."""
        if self.is_untrained:
            return repr(bytes([token]))[1:] if token < 256 else f"<{token}>"
        from cutaway.cli.views.terminal import escape_control_characters

        said = "" if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)
        if self.tokenizer is not None and (not said or "\ufffd" in said):  # a part of a letter
            said = self.tokenizer.id_to_token(token) or ""
        return escape_control_characters(repr(said)) if said else f"<{token}>"

    def decode(self, tokens: list[int]) -> str:
        """Tokens as text; what is no whole letter yet is left out at the end."""
        if self.is_untrained:
            return bytes(token for token in tokens if token < 256).decode("utf-8", "ignore")
        said = "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special_tokens=False)
        return said.rstrip("\ufffd")

    @property
    def traced_tokens(self) -> list[int]:
        """The text of which --position names a token: the target where it was given, or else what is read."""
        return self.tokens if self.source is None or self.target is not None else self.source

    def resolve_position(self, position: str) -> int:
        """The token that --position names: by number, or as the last one of a piece of text."""
        tokens = self.traced_tokens
        try:
            number = int(position)
        except ValueError:
            return self._find_position(position, tokens)
        if not -len(tokens) <= number < len(tokens):
            raise InputError(
                f"--position is {number}, and the text has the tokens 0 to {len(tokens) - 1}; "
                "give one of them, or a negative number from the end"
            )
        return number % len(tokens)

    def _find_position(self, substring: str, tokens: list[int]) -> int:
        from bisect import bisect_left

        whole = self.decode(tokens)
        start = whole.rfind(substring) if substring else -1
        if start < 0:
            raise InputError(
                f"--position is '{substring}', which is not in the text as the model reads it; give a piece of it, or"
                f" the number of a token, 0 to {len(tokens) - 1}"
            )
        end = start + len(substring)
        return bisect_left(range(len(tokens)), end, key=lambda last: len(self.decode(tokens[: last + 1])))


def load_tokenized_input(
    source: str, text: str, target: str | None, device: str | None, dtype: "DType | None", *, quiet: bool
) -> TokenizedInput:
    """A checkpoint with its tokenizer; or what a name describes, with fresh weights that read bytes."""
    from cutaway.cli.prompts import read_stdin, split_prompts

    text = next(split_prompts(read_stdin(), False)) if text == "-" else text
    if not text:
        raise InputError("the text is empty; give at least one character")
    made = build_untrained_model(source, device, dtype)
    if made is not None:
        reading = tokenize_bytes(made, text, target)
    else:
        reading = tokenize_for_checkpoint(load_checkpoint(source, device, dtype, quiet=quiet), text, target)
    check_target(reading.model, target)
    for name, ids in (("text", reading.source or reading.tokens), ("target", reading.tokens)):
        if len(ids) > MAX_TRACED_TOKENS:
            raise InputError(
                f"the {name} has {len(ids)} tokens; every score is drawn, so give at most {MAX_TRACED_TOKENS}"
            )
    context = reading.model.config.context
    if context is not None and len(reading.tokens) > context:
        reading.notes.append(f"the text has {len(reading.tokens)} tokens, more than the {context} it was made for")
    return reading


def tokenize_bytes(model: "Transformer", text: str, target: str | None) -> TokenizedInput:
    """Read by a model without a tokenizer, byte by byte."""
    size = model.config.vocab_size
    ids = [byte % size for byte in text.encode("utf-8", "surrogateescape")]
    if len(model.stacks) == 1:
        return TokenizedInput(model, text, ids, is_untrained=True)
    own = ids if target is None else [byte % size for byte in target.encode("utf-8", "surrogateescape")]
    sources = getattr(model.config, "source_vocab_size", None) or size
    return TokenizedInput(model, text, own or [0], [each % sources for each in ids], target, is_untrained=True)


def tokenize_for_checkpoint(checkpoint: Any, text: str, target: str | None) -> TokenizedInput:
    from cutaway.generate.generation_config import unpack_checkpoint

    model, tokenizer, start = unpack_checkpoint(checkpoint)
    ids = _encode_text(tokenizer, text)
    if len(model.stacks) == 1:
        return TokenizedInput(model, text, ids, tokenizer=tokenizer)
    if start.decoder_start_token_id is None:
        raise InputError(
            "this checkpoint does not say what token its answers begin with; add decoder_start_token_id to its "
            "generation_config.json"
        )
    own = _encode_text(tokenizer, target, add_special_tokens=False) if target else []
    return TokenizedInput(model, text, [start.decoder_start_token_id, *own], ids, target, tokenizer)


def _encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """A text's tokens; where there is no tokenizer the text is their numbers."""
    if tokenizer is not None:
        found: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not found:
            raise InputError("the text has no token that this model knows; give another")
        return found
    from cutaway.cli.prompts import parse_token_ids

    try:
        return parse_token_ids("the text", text)
    except InputError:
        raise InputError("this model has no tokenizer to read text with; write token ids, as in 1,2,3") from None


def check_target(model: "Transformer", target: str | None) -> None:
    if target is not None and len(model.stacks) == 1:
        form = f"a{'n' if model.config.form == 'encoder' else ''} {model.config.form}"
        raise InputError(f"--target is for encoder-decoders, and this is {form}; leave it out")
