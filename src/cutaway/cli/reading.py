"""A model, and a text as it reads it: a checkpoint's tokens, or the bytes of a model that was never trained."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.cli.convert import DType
    from cutaway.model import Transformer

LONGEST = 2048
"""Tokens of a text: every score is drawn."""


@dataclass
class Reading:
    """A model, what it reads, and how its tokens are spelled."""

    model: "Transformer"
    text: str
    tokens: list[int]
    """Of a decoder's own text, if there is an encoder beside it."""
    source: list[int] | None = None
    target: str | None = None
    tokenizer: Any = None
    fresh: bool = False
    """Whether the weights are random, and the tokens bytes."""
    notes: list[str] = field(default_factory=list)

    def spelled(self, token: int) -> str:
        """A token as it is shown."""
        if self.fresh:
            return repr(bytes([token]))[1:] if token < 256 else f"<{token}>"
        from cutaway.cli.screen import visible

        said = "" if self.tokenizer is None else self.tokenizer.decode([token], skip_special=False)
        if self.tokenizer is not None and (not said or "\ufffd" in said):  # a part of a letter
            said = self.tokenizer.token(token) or ""
        return visible(repr(said)) if said else f"<{token}>"

    def written(self, tokens: list[int]) -> str:
        """Tokens as text; what is no whole letter yet is left out at the end."""
        if self.fresh:
            return bytes(token for token in tokens if token < 256).decode("utf-8", "ignore")
        said = "" if self.tokenizer is None else self.tokenizer.decode(tokens, skip_special=False)
        return said.rstrip("\ufffd")

    @property
    def followed_text(self) -> list[int]:
        """The text of which --at names a token: the target where it was given, or else what is read."""
        return self.tokens if self.source is None or self.target is not None else self.source

    def place(self, at: str) -> int:
        """The token that --at names: by number, or as the last one of a piece of text."""
        tokens = self.followed_text
        try:
            number = int(at)
        except ValueError:
            return self.place_of(at, tokens)
        if not -len(tokens) <= number < len(tokens):
            raise InputError(
                f"--at is {number}, and the text has the tokens 0 to {len(tokens) - 1}; "
                "give one of them, or a negative number from the end"
            )
        return number % len(tokens)

    def place_of(self, piece: str, tokens: list[int]) -> int:
        from bisect import bisect_left

        whole = self.written(tokens)
        start = whole.rfind(piece) if piece else -1
        if start < 0:
            raise InputError(
                f"--at is '{piece}', which is not in the text as the model reads it; give a piece of it, or the "
                f"number of a token, 0 to {len(tokens) - 1}"
            )
        end = start + len(piece)
        return bisect_left(range(len(tokens)), end, key=lambda last: len(self.written(tokens[: last + 1])))


def opened(
    source: str, text: str, target: str | None, device: str | None, dtype: "DType | None", *, quiet: bool
) -> Reading:
    """A checkpoint with its tokenizer; or what a name describes, with fresh weights that read bytes."""
    from cutaway.cli.prompts import split, standard_input

    text = next(split(standard_input(), False)) if text == "-" else text
    if not text:
        raise InputError("the text is empty; give at least one character")
    made = fresh(source, device, dtype)
    if made is not None:
        reading = as_bytes(made, text, target)
    else:
        from cutaway.cli import generate

        reading = as_tokens(generate.opened(source, device, dtype, quiet=quiet), text, target)
    check_target(reading.model, target)
    for name, ids in (("text", reading.source or reading.tokens), ("target", reading.tokens)):
        if len(ids) > LONGEST:
            raise InputError(f"the {name} has {len(ids)} tokens; every score is drawn, so give at most {LONGEST}")
    context = reading.model.config.context
    if context is not None and len(reading.tokens) > context:
        reading.notes.append(f"the text has {len(reading.tokens)} tokens, more than the {context} it was made for")
    return reading


def is_described(source: str) -> bool:
    """Whether a source is a preset's name or a file of settings, and no checkpoint."""
    from cutaway.config import presets
    from cutaway.shipped import where

    is_file = source.endswith((".toml", ".json"))
    if (Path(source).exists() and not is_file) or where(source) is not None:
        return False
    return is_file or source in presets() or "/" not in source.partition("@")[0]


def fresh(source: str, device: str | None, dtype: "DType | None") -> Any:
    """The model that a preset's name or a file of settings describes; None if it is a checkpoint's."""
    from cutaway.config import config

    if not is_described(source):
        return None
    described = config(source)  # a misspelt name is told its nearest
    import torch

    from cutaway.generate.plan import free_memory
    from cutaway.model import build
    from cutaway.model.inputs import check_device
    from cutaway.size.params import count

    here = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    numbers = torch.float32 if dtype is None else getattr(torch, dtype)
    room, need = free_memory(here), count(described).total * numbers.itemsize
    if room is not None and need > room:
        raise InputError(
            f"'{source}' takes {need / 1e9:.3g} GB as fresh weights, and {room / 1e9:.3g} are free; "
            "choose a smaller one, such as tiny-llama"
        )
    return build(described, device=here, dtype=numbers, seed=0)


def as_bytes(model: "Transformer", text: str, target: str | None) -> Reading:
    """Read by a model without a tokenizer, byte by byte."""
    size = model.config.vocab_size
    ids = [byte % size for byte in text.encode("utf-8", "surrogateescape")]
    if len(model.stacks) == 1:
        return Reading(model, text, ids, fresh=True)
    own = ids if target is None else [byte % size for byte in target.encode("utf-8", "surrogateescape")]
    sources = getattr(model.config, "source_vocab_size", None) or size
    return Reading(model, text, own or [0], [each % sources for each in ids], target, fresh=True)


def as_tokens(checkpoint: Any, text: str, target: str | None) -> Reading:
    from cutaway.generate.texts import opened as parts

    model, tokenizer, start = parts(checkpoint)
    ids = encoded(tokenizer, text)
    if len(model.stacks) == 1:
        return Reading(model, text, ids, tokenizer=tokenizer)
    if start.decoder_start is None:
        raise InputError(
            "this checkpoint does not say what token its answers begin with; add decoder_start_token_id to its "
            "generation_config.json"
        )
    own = encoded(tokenizer, target, special=False) if target else []
    return Reading(model, text, [start.decoder_start, *own], ids, target, tokenizer)


def encoded(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """A text's tokens; where there is no tokenizer the text is their numbers."""
    if tokenizer is not None:
        found: list[int] = tokenizer.encode(text, special=special)
        if not found:
            raise InputError("the text has no token that this model knows; give another")
        return found
    from cutaway.cli.prompts import ids

    try:
        return ids("the text", text)
    except InputError:
        raise InputError("this model has no tokenizer to read text with; write token ids, as in 1,2,3") from None


def check_target(model: "Transformer", target: str | None) -> None:
    if target is not None and len(model.stacks) == 1:
        form = f"a{'n' if model.config.form == 'encoder' else ''} {model.config.form}"
        raise InputError(f"--target is for encoder-decoders, and this is {form}; leave it out")
