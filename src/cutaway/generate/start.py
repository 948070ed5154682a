"""What a checkpoint's own files say about generating with it: where to start and stop, and how to search."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from cutaway.errors import InputError

if TYPE_CHECKING:  # only its ids are read
    from cutaway.text import Tokenizer

EarlyStopping = bool | Literal["never"]
LARGEST = 6
"""The greatest length penalty: a million tokens to this power is still a 32-bit number."""


@dataclass(frozen=True)
class Start:
    """A checkpoint's settings for generation, read by `read_start`; what its files leave open has the value here."""

    eos: tuple[int, ...] = ()
    """Each of these ends a text."""
    bos: int | None = None
    pad: int | None = None
    decoder_start: int | None = None
    """What an encoder-decoder's target begins with."""
    forced_bos: int | None = None
    """The first token after it, whatever the model says (a language, in mBART)."""
    forced_eos: tuple[int, ...] = ()
    """The last token of a text that was cut at its greatest length, whatever the model says."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that never come up."""
    suppressed: tuple[int, ...] = ()
    """Tokens that never come up."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that never come up first."""
    no_repeat_ngram: int = 0
    """No sequence of this many tokens comes twice; 0 lets them."""
    repetition_penalty: float = 1.0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_length: int = 0
    """Tokens of prompt and answer together; for an encoder-decoder, of the target with its first token."""
    max_length: int | None = None
    min_new_tokens: int | None = None
    """Tokens of the answer alone, which win over lengths with the prompt."""
    max_new_tokens: int | None = None

    def within(self, vocab_size: int) -> "Start":
        """Without bans of tokens that this vocabulary does not have, as files for a larger one may name them."""
        return replace(
            self,
            banned=tuple(words for words in self.banned if max(words) < vocab_size),
            suppressed=tuple(token for token in self.suppressed if token < vocab_size),
            suppressed_first=tuple(token for token in self.suppressed_first if token < vocab_size),
        )

    def least_new(self, prompt: int) -> int:
        """How many tokens the answer to a prompt of this length must have before it may end."""
        if self.min_new_tokens is not None:
            return self.min_new_tokens
        return max(0, self.min_length - prompt)

    def most_new(self, prompt: int) -> int | None:
        """How many tokens the answer to a prompt of this length may have; None if the files set no limit."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return None if self.max_length is None else max(0, self.max_length - prompt)


def read_start(generation: Mapping[str, Any], theirs: Mapping[str, Any], tokenizer: "Tokenizer | None" = None) -> Start:
    """The settings in a generation_config.json, or in the config.json where there is none (as before 2023).

    Ids that the first leaves open are looked up in the second, and then in the tokenizer: a model that is not told
    its end would never stop.
    """
    file = "generation_config.json" if generation else "config.json"
    read = _Reader(file, generation or theirs)
    rest = _Reader("config.json", theirs)
    own = (None, None, None) if tokenizer is None else (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id)
    eos, pad, bos = (
        read.ids(key) or rest.ids(key) or (() if number is None else (number,))
        for key, number in zip(("eos_token_id", "pad_token_id", "bos_token_id"), own, strict=True)
    )
    first = bos[0] if bos else None
    start = read.id("decoder_start_token_id")
    start = start if start is not None else rest.id("decoder_start_token_id")
    forced_bos = read.id("forced_bos_token_id")
    if not generation and read.flag("force_bos_token_to_be_generated"):  # its name before it could be another token
        forced_bos = first
    banned = read.sequences("bad_words_ids")
    return Start(
        eos=eos,
        bos=first,
        pad=pad[0] if pad else (eos[0] if eos else None),
        decoder_start=start if start is not None else first,
        forced_bos=forced_bos,
        forced_eos=read.ids("forced_eos_token_id"),
        banned=tuple(sequence for sequence in banned if sequence not in {(end,) for end in eos}),
        suppressed=read.ids("suppress_tokens"),
        suppressed_first=read.ids("begin_suppress_tokens"),
        no_repeat_ngram=read.count("no_repeat_ngram_size") or 0,
        repetition_penalty=read.number("repetition_penalty", 1.0, least=0.001),
        beams=read.count("num_beams", least=1) or 1,
        length_penalty=read.number("length_penalty", 1.0),
        early_stopping=read.early_stopping(),
        min_length=read.count("min_length") or 0,
        max_length=read.count("max_length", least=1),
        min_new_tokens=read.count("min_new_tokens"),
        max_new_tokens=read.count("max_new_tokens", least=1),
    )


@dataclass(frozen=True)
class _Reader:
    """Values of a file that anyone may have written, each with its type or an error."""

    file: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise InputError(f"{self.file} is a {type(self.values).__name__}; it must be a JSON object")

    def refuse(self, key: str, wanted: str) -> InputError:
        return InputError(f"{self.file} has {key} = {self.values[key]!r:.80}; it must be {wanted}")

    def ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them. A negative one stands for none, as some published files have it."""
        value = self.values.get(key)
        given = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_whole(each) for each in given):
            raise self.refuse(key, "a token's id or a list of ids")
        return tuple(each for each in given if each >= 0)

    def id(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and not (_whole(value) and value >= 0):
            raise self.refuse(key, "a token's id")
        return value

    def sequences(self, key: str) -> tuple[tuple[int, ...], ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        lists = isinstance(value, list) and all(isinstance(each, list) and each for each in value)
        if not lists or not all(_whole(one) and one >= 0 for each in value for one in each):
            raise self.refuse(key, "a list of lists of token ids, none of them empty")
        return tuple(tuple(each) for each in value)

    def count(self, key: str, least: int = 0) -> int | None:
        value = self.values.get(key)
        if value is not None and not (_whole(value) and value >= least):
            raise self.refuse(key, f"a whole number, {least} or more")
        return value

    def number(self, key: str, default: float, least: float = -LARGEST) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= LARGEST:
            raise self.refuse(key, f"a number from {least} to {LARGEST}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value is True

    def early_stopping(self) -> EarlyStopping:
        return "never" if self.values.get("early_stopping") == "never" else self.flag("early_stopping")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
