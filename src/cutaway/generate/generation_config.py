"""Generation config of a checkpoint: special tokens, length limits and beam search options from its JSON files."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from cutaway.errors import InputError
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 256
"""max_new_tokens if neither the caller nor the checkpoint sets it."""


EarlyStopping = bool | Literal["never"]


MAX_PENALTY = 6
"""Maximum length penalty: a million tokens to this power is still finite in float32."""


@dataclass(frozen=True)
class GenerationConfig:
    """Generation settings of a checkpoint (see `read_generation_config`), with defaults for missing keys."""

    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None
    """First decoder token of an encoder-decoder."""
    forced_bos_token_id: int | None = None
    """Forced first token of the completion (the language in mBART)."""
    forced_eos_token_ids: tuple[int, ...] = ()
    """Forced last token of a sequence that reaches the maximum length."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never generated."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never generated."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never generated first."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size is generated twice; 0 for no limit."""
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_length: int = 0
    """Minimum tokens of prompt and completion together; for an encoder-decoder, of the target with its first token."""
    max_length: int | None = None
    min_new_tokens: int | None = None
    """Minimum tokens of the completion alone; min_new_tokens and max_new_tokens override min_length and max_length."""
    max_new_tokens: int | None = None

    def drop_tokens_outside_vocab(self, vocab_size: int) -> "GenerationConfig":
        """Remove suppressed tokens outside the vocabulary; published files may list tokens of a larger one."""
        return replace(
            self,
            bad_words_ids=tuple(words for words in self.bad_words_ids if max(words) < vocab_size),
            suppress_tokens=tuple(token for token in self.suppress_tokens if token < vocab_size),
            begin_suppress_tokens=tuple(token for token in self.begin_suppress_tokens if token < vocab_size),
        )

    def min_new_tokens_for(self, prompt_len: int) -> int:
        """Minimum tokens of the completion of a prompt of `prompt_len` tokens."""
        if self.min_new_tokens is not None:
            return self.min_new_tokens
        return max(0, self.min_length - prompt_len)

    def max_new_tokens_for(self, prompt_len: int) -> int | None:
        """Maximum tokens of the completion of a prompt of `prompt_len` tokens; None for no limit."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return None if self.max_length is None else max(0, self.max_length - prompt_len)


def read_generation_config(
    generation_config: Mapping[str, Any], hf_config: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> GenerationConfig:
    """Read generation_config.json, or config.json if there is none (as before 2023).

    Missing token ids are read from config.json, then from the tokenizer: without an EOS token generation would never
    stop.
    """
    file = "generation_config.json" if generation_config else "config.json"
    fields = _JsonFields(file, generation_config or hf_config)
    hf_fields = _JsonFields("config.json", hf_config)
    tokenizer_ids = (
        (None, None, None)
        if tokenizer is None
        else (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id)
    )
    eos, pad, bos = (
        fields.token_ids(key) or hf_fields.token_ids(key) or (() if token_id is None else (token_id,))
        for key, token_id in zip(("eos_token_id", "pad_token_id", "bos_token_id"), tokenizer_ids, strict=True)
    )
    bos_token_id = bos[0] if bos else None
    start_token_id = fields.token_id("decoder_start_token_id")
    start_token_id = start_token_id if start_token_id is not None else hf_fields.token_id("decoder_start_token_id")
    forced_bos = fields.token_id("forced_bos_token_id")
    if not generation_config and fields.boolean(
        "force_bos_token_to_be_generated"
    ):  # former name of forced_bos_token_id
        forced_bos = bos_token_id
    bad_words = fields.token_sequences("bad_words_ids")
    return GenerationConfig(
        eos_token_ids=eos,
        bos_token_id=bos_token_id,
        pad_token_id=pad[0] if pad else (eos[0] if eos else None),
        decoder_start_token_id=start_token_id if start_token_id is not None else bos_token_id,
        forced_bos_token_id=forced_bos,
        forced_eos_token_ids=fields.token_ids("forced_eos_token_id"),
        bad_words_ids=tuple(sequence for sequence in bad_words if sequence not in {(end,) for end in eos}),
        suppress_tokens=fields.token_ids("suppress_tokens"),
        begin_suppress_tokens=fields.token_ids("begin_suppress_tokens"),
        no_repeat_ngram_size=fields.integer("no_repeat_ngram_size") or 0,
        repetition_penalty=fields.number("repetition_penalty", 1.0, minimum=0.001),
        num_beams=fields.integer("num_beams", minimum=1) or 1,
        length_penalty=fields.number("length_penalty", 1.0),
        early_stopping=fields.early_stopping(),
        min_length=fields.integer("min_length") or 0,
        max_length=fields.integer("max_length", minimum=1),
        min_new_tokens=fields.integer("min_new_tokens"),
        max_new_tokens=fields.integer("max_new_tokens", minimum=1),
    )


@dataclass(frozen=True)
class _JsonFields:
    """Type-checked access to the values of an untrusted JSON file."""

    file: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise InputError(f"{self.file} is a {type(self.values).__name__}; it must be a JSON object")

    def type_error(self, key: str, expected: str) -> InputError:
        return InputError(f"{self.file} has {key} = {self.values[key]!r:.80}; it must be {expected}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them. Negative ids, which some published files use for none, are dropped."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_int(token_id) for token_id in ids):
            raise self.type_error(key, "a token id or a list of token ids")
        return tuple(token_id for token_id in ids if token_id >= 0)

    def token_id(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and not (_is_int(value) and value >= 0):
            raise self.type_error(key, "a token id")
        return value

    def token_sequences(self, key: str) -> tuple[tuple[int, ...], ...]:
        value = self.values.get(key)
        if value is None:
            return ()
        is_list_of_lists = isinstance(value, list) and all(
            isinstance(sequence, list) and sequence for sequence in value
        )
        if not is_list_of_lists or not all(
            _is_int(token_id) and token_id >= 0 for sequence in value for token_id in sequence
        ):
            raise self.type_error(key, "a list of non-empty lists of token ids")
        return tuple(tuple(sequence) for sequence in value)

    def integer(self, key: str, minimum: int = 0) -> int | None:
        value = self.values.get(key)
        if value is not None and not (_is_int(value) and value >= minimum):
            raise self.type_error(key, f"an integer, {minimum} or more")
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
    """A checkpoint: a model with its tokenizer and configuration files."""

    model: Transformer
    generation_config: dict[str, Any]
    hf_config: dict[str, Any]

    @property
    def tokenizer(self) -> Tokenizer | None: ...


def unpack_checkpoint(
    checkpoint: CheckpointLike | Transformer,
) -> tuple[Transformer, Tokenizer | None, GenerationConfig]:
    """Return a checkpoint's model, tokenizer and generation config."""
    if isinstance(checkpoint, Transformer):
        return checkpoint, None, GenerationConfig()
    if not isinstance(getattr(checkpoint, "model", None), Transformer):
        raise InputError(f"checkpoint is a {type(checkpoint).__name__}; pass the result of ct.load, or a model")
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    generation_config = read_generation_config(checkpoint.generation_config, checkpoint.hf_config, tokenizer)
    return model, tokenizer, generation_config.drop_tokens_outside_vocab(model.config.vocab_size)


def apply_generation_config(
    sampling_params: SamplingParams, generation_config: GenerationConfig, prompt_len: int
) -> SamplingParams:
    """Fill in length limits, suppressed tokens and penalties of the checkpoint where the request sets none."""
    max_new_tokens = sampling_params.max_new_tokens
    if max_new_tokens is None:
        default = generation_config.max_new_tokens_for(prompt_len)
        max_new_tokens = max(default if default else DEFAULT_MAX_NEW_TOKENS, sampling_params.min_new_tokens)
    min_new_tokens = min(
        sampling_params.min_new_tokens or generation_config.min_new_tokens_for(prompt_len), max_new_tokens
    )
    suppressed = {
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
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        suppress_tokens=tuple(sorted(suppressed)),
        repetition_penalty=penalty,
    )
