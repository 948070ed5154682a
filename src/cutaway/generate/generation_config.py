"""What a checkpoint's own files say about generating with it: where to start and stop, and how to search."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from cutaway.errors import InputError
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 256
"""Tokens of an answer when neither the caller nor the checkpoint says how many."""


EarlyStopping = bool | Literal["never"]


MAX_PENALTY = 6
"""The greatest length penalty: a million tokens to this power is still a 32-bit number."""


@dataclass(frozen=True)
class GenerationConfig:
    """A checkpoint's own settings (see `read_generation_config`); what its files leave open has the value here."""

    eos_token_ids: tuple[int, ...] = ()
    """Each of these ends a text."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    """What an encoder-decoder's target begins with."""
    forced_bos_token_id: int | None = None
    """The first token after it, whatever the model says (a language, in mBART)."""
    forced_eos_token_ids: tuple[int, ...] = ()
    """The last token of a text that was cut at its greatest length, whatever the model says."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that never come up."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that never come up."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that never come up first."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens comes twice; 0 lets them."""
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_length: int = 0
    """Tokens of prompt and answer together; for an encoder-decoder, of the target with its first token."""
    max_length: int | None = None
    min_new_tokens: int | None = None
    """Tokens of the answer alone, which win over lengths with the prompt."""
    max_new_tokens: int | None = None

    def drop_tokens_outside_vocab(self, vocab_size: int) -> "GenerationConfig":
        """Without bans of tokens that this vocabulary does not have, as files for a larger one may name them."""
        return replace(
            self,
            bad_words_ids=tuple(words for words in self.bad_words_ids if max(words) < vocab_size),
            suppress_tokens=tuple(token for token in self.suppress_tokens if token < vocab_size),
            begin_suppress_tokens=tuple(token for token in self.begin_suppress_tokens if token < vocab_size),
        )

    def min_new_tokens_for(self, prompt_len: int) -> int:
        """How many tokens the answer to a prompt of this length must have before it may end."""
        if self.min_new_tokens is not None:
            return self.min_new_tokens
        return max(0, self.min_length - prompt_len)

    def max_new_tokens_for(self, prompt_len: int) -> int | None:
        """How many tokens the answer to a prompt of this length may have; None if the files set no limit."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return None if self.max_length is None else max(0, self.max_length - prompt_len)


def read_generation_config(
    generation_config: Mapping[str, Any], hf_config: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> GenerationConfig:
    """The settings in a generation_config.json, or in the config.json where there is none (as before 2023).

    Ids that the first leaves open are looked up in the second, and then in the tokenizer: a model that is not told
    its end would never stop.
    """
    file = "generation_config.json" if generation_config else "config.json"
    read = _JsonFields(file, generation_config or hf_config)
    rest = _JsonFields("config.json", hf_config)
    own = (
        (None, None, None)
        if tokenizer is None
        else (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    )
    eos, pad, bos = (
        read.token_ids(key) or rest.token_ids(key) or (() if number is None else (number,))
        for key, number in zip(("eos_token_id", "pad_token_id", "bos_token_id"), own, strict=True)
    )
    first = bos[0] if bos else None
    start = read.token_id("decoder_start_token_id")
    start = start if start is not None else rest.token_id("decoder_start_token_id")
    forced_bos = read.token_id("forced_bos_token_id")
    if not generation_config and read.boolean(
        "force_bos_token_to_be_generated"
    ):  # its name before it could be another token
        forced_bos = first
    banned = read.token_sequences("bad_words_ids")
    return GenerationConfig(
        eos_token_ids=eos,
        bos_token_id=first,
        pad_token_id=pad[0] if pad else (eos[0] if eos else None),
        decoder_start_token_id=start if start is not None else first,
        forced_bos_token_id=forced_bos,
        forced_eos_token_ids=read.token_ids("forced_eos_token_id"),
        bad_words_ids=tuple(sequence for sequence in banned if sequence not in {(end,) for end in eos}),
        suppress_tokens=read.token_ids("suppress_tokens"),
        begin_suppress_tokens=read.token_ids("begin_suppress_tokens"),
        no_repeat_ngram_size=read.integer("no_repeat_ngram_size") or 0,
        repetition_penalty=read.number("repetition_penalty", 1.0, minimum=0.001),
        num_beams=read.integer("num_beams", minimum=1) or 1,
        length_penalty=read.number("length_penalty", 1.0),
        early_stopping=read.early_stopping(),
        min_length=read.integer("min_length") or 0,
        max_length=read.integer("max_length", minimum=1),
        min_new_tokens=read.integer("min_new_tokens"),
        max_new_tokens=read.integer("max_new_tokens", minimum=1),
    )


@dataclass(frozen=True)
class _JsonFields:
    """Values of a file that anyone may have written, each with its type or an error."""

    file: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise InputError(f"{self.file} is a {type(self.values).__name__}; it must be a JSON object")

    def type_error(self, key: str, expected: str) -> InputError:
        return InputError(f"{self.file} has {key} = {self.values[key]!r:.80}; it must be {expected}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them. A negative one stands for none, as some published files have it."""
        value = self.values.get(key)
        given = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_int(each) for each in given):
            raise self.type_error(key, "a token's id or a list of ids")
        return tuple(each for each in given if each >= 0)

    def token_id(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and not (_is_int(value) and value >= 0):
            raise self.type_error(key, "a token's id")
        return value

    def token_sequences(self, key: str) -> tuple[tuple[int, ...], ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        lists = isinstance(value, list) and all(isinstance(each, list) and each for each in value)
        if not lists or not all(_is_int(one) and one >= 0 for each in value for one in each):
            raise self.type_error(key, "a list of lists of token ids, none of them empty")
        return tuple(tuple(each) for each in value)

    def integer(self, key: str, minimum: int = 0) -> int | None:
        value = self.values.get(key)
        if value is not None and not (_is_int(value) and value >= minimum):
            raise self.type_error(key, f"a whole number, {minimum} or more")
        return value

    def number(self, key: str, default: float, minimum: float = -MAX_PENALTY) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= MAX_PENALTY:
            raise self.type_error(key, f"a number from {minimum} to {MAX_PENALTY}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.type_error(key, "true or false")
        return value is True

    def early_stopping(self) -> EarlyStopping:
        return "never" if self.values.get("early_stopping") == "never" else self.boolean("early_stopping")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CheckpointLike(Protocol):
    """A checkpoint: a model with its tokenizer and its own settings."""

    model: Transformer
    generation_config: dict[str, Any]
    hf_config: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer | None: ...


def unpack_checkpoint(
    checkpoint: CheckpointLike | Transformer,
) -> tuple[Transformer, Tokenizer | None, GenerationConfig]:
    """The model, its tokenizer, and what its files say about generating."""
    if isinstance(checkpoint, Transformer):
        return checkpoint, None, GenerationConfig()
    if not isinstance(getattr(checkpoint, "model", None), Transformer):
        raise InputError(f"checkpoint is a {type(checkpoint).__name__}; give what ct.load returns, or a model")
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    start = read_generation_config(checkpoint.generation_config, checkpoint.hf_config, tokenizer)
    return model, tokenizer, start.drop_tokens_outside_vocab(model.config.vocab_size)


def apply_generation_config(
    sampling_params: SamplingParams, generation_config: GenerationConfig, prompt_len: int
) -> SamplingParams:
    """A request with the checkpoint's limits and bans where it names none of its own."""
    most = sampling_params.max_new_tokens
    if most is None:
        told = generation_config.max_new_tokens_for(prompt_len)
        most = max(told if told else DEFAULT_MAX_NEW_TOKENS, sampling_params.min_new_tokens)
    least = min(sampling_params.min_new_tokens or generation_config.min_new_tokens_for(prompt_len), most)
    banned = {
        *sampling_params.suppress_tokens,
        *generation_config.suppress_tokens,
        *(words[0] for words in generation_config.bad_words_ids if len(words) == 1),
    }
    penalty = (
        generation_config.repetition_penalty
        if sampling_params.repetition_penalty == 1
        else sampling_params.repetition_penalty
    )
    return replace(
        sampling_params,
        max_new_tokens=most,
        min_new_tokens=least,
        suppress_tokens=tuple(sorted(banned)),
        repetition_penalty=penalty,
    )
