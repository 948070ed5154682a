"""Generation config: special tokens, length limits and beam search options from a checkpoint's JSON files."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cutaway.errors import InputError
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 256
"""max_new_tokens if neither the caller nor the checkpoint sets it."""
MAX_PENALTY = 6
"""Maximum of repetition_penalty and of |length_penalty|.

A length of a million tokens, raised to this power, is finite in float32."""
EarlyStopping = bool | Literal["never"]
_SPECIAL_TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")


def _as_token_ids(value: object) -> tuple[object, ...]:
    """Convert a token id or a list of token ids to a tuple. Negative ids, which mean "no token", are dropped."""
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(x for x in ids if not isinstance(x, int) or isinstance(x, bool) or x >= 0)


def _first_token_id(value: object) -> object:
    return next(iter(_as_token_ids(value)), None)


def _as_token_sequences(value: object) -> object:
    if not isinstance(value, list):
        return value
    return tuple(tuple(words) if isinstance(words, list) else words for words in value)


TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(_as_token_ids)]
_TokenSequences = Annotated[
    tuple[Annotated[tuple[TokenId, ...], Field(min_length=1)], ...], BeforeValidator(_as_token_sequences)
]


class GenerationConfig(BaseModel):
    """Generation settings of a checkpoint (see `read_generation_config`), with defaults for missing keys."""

    model_config = ConfigDict(frozen=True, strict=True, populate_by_name=True)

    eos_token_ids: TokenIds = Field((), alias="eos_token_id")
    """Tokens that end a sequence."""
    bos_token_id: Annotated[TokenId | None, BeforeValidator(_first_token_id)] = None
    pad_token_id: Annotated[TokenId | None, BeforeValidator(_first_token_id)] = None
    decoder_start_token_id: TokenId | None = None
    """First decoder token of an encoder-decoder."""
    forced_bos_token_id: TokenId | None = None
    """Forced first token of the completion (in mBART, the token of the target language)."""
    forced_eos_token_ids: TokenIds = Field((), alias="forced_eos_token_id")
    """Tokens, one of which is forced as the last token of a sequence that reaches the maximum length."""
    bad_words_ids: _TokenSequences = ()
    """Token sequences that are never generated."""
    suppress_tokens: TokenIds = ()
    """Tokens that are never generated."""
    begin_suppress_tokens: TokenIds = ()
    """Tokens that are never the first token of a completion."""
    no_repeat_ngram_size: int = Field(0, ge=0)
    """Number of tokens of the n-grams that may not occur twice; 0 allows all repetitions."""
    repetition_penalty: float = Field(1.0, ge=0.001, le=MAX_PENALTY)
    num_beams: int = Field(1, ge=1)
    length_penalty: float = Field(1.0, ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)
    early_stopping: EarlyStopping = False
    min_length: int = Field(0, ge=0)
    """Minimum number of tokens of prompt and completion together.

    For an encoder-decoder, the target tokens are counted, including the start token."""
    max_length: int | None = Field(None, ge=1)
    min_new_tokens: int | None = Field(None, ge=0)
    """Minimum number of completion tokens. min_new_tokens and max_new_tokens override min_length and max_length."""
    max_new_tokens: int | None = Field(None, ge=1)

    def drop_tokens_outside_vocab(self, vocab_size: int) -> "GenerationConfig":
        """Return a copy without suppressed tokens outside the vocabulary, which some published files contain."""
        changes: dict[str, object] = {
            "bad_words_ids": tuple(words for words in self.bad_words_ids if max(words) < vocab_size),
            "suppress_tokens": tuple(token for token in self.suppress_tokens if token < vocab_size),
            "begin_suppress_tokens": tuple(token for token in self.begin_suppress_tokens if token < vocab_size),
        }
        return self.model_copy(update=changes)

    def min_new_tokens_for(self, prompt_len: int) -> int:
        """Minimum number of completion tokens for a prompt of `prompt_len` tokens."""
        if self.min_new_tokens is not None:
            return self.min_new_tokens
        return max(0, self.min_length - prompt_len)

    def max_new_tokens_for(self, prompt_len: int) -> int | None:
        """Maximum number of completion tokens for a prompt of `prompt_len` tokens; None for no limit."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return None if self.max_length is None else max(0, self.max_length - prompt_len)


def read_generation_config(
    generation_config: Mapping[str, object], hf_config: Mapping[str, object], tokenizer: Tokenizer | None = None
) -> GenerationConfig:
    """Build the generation config from the contents of generation_config.json and config.json.

    Settings are read from generation_config.json. If it is empty, as in checkpoints from before 2023, they are read
    from config.json (`hf_config`). Special token ids that are missing are taken from config.json, then from the
    tokenizer, because generation would never stop without an EOS token.
    """
    file = "generation_config.json" if generation_config else "config.json"
    config = _parse_file(file, generation_config or hf_config)
    known = config.model_dump(by_alias=True)
    missing = [key for key in _SPECIAL_TOKENS if known[key] in (None, ())]
    fallback = _parse_file("config.json", {key: hf_config[key] for key in missing if key in hf_config})
    tokenizer_eos = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    eos = config.eos_token_ids or fallback.eos_token_ids or tokenizer_eos
    bos, pad, start = (
        _first_not_none(getattr(config, key), getattr(fallback, key), getattr(tokenizer, key, None))
        for key in ("bos_token_id", "pad_token_id", "decoder_start_token_id")
    )
    changes: dict[str, object] = {
        "eos_token_ids": eos,
        "bos_token_id": bos,
        "pad_token_id": _first_not_none(pad, *eos[:1]),
        "decoder_start_token_id": _first_not_none(start, bos),
        "bad_words_ids": tuple(words for words in config.bad_words_ids if words not in {(end,) for end in eos}),
    }
    if not generation_config and hf_config.get("force_bos_token_to_be_generated") is True:
        changes["forced_bos_token_id"] = bos  # former name: force_bos_token_to_be_generated
    return config.model_copy(update=changes)


def _first_not_none(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _parse_file(file: str, values: Mapping[str, object]) -> GenerationConfig:
    """Validate the contents of an untrusted JSON file. A null value is treated as a missing key."""
    if not isinstance(values, Mapping):
        raise InputError(f"{file} is a {type(values).__name__}; it must be a JSON object")
    try:
        return GenerationConfig.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        key, problem = str(first["loc"][0]), first["msg"].replace("Input", "it", 1)
        raise InputError(f"{file} has {key} = {values[key]!r:.80}; {problem}") from None


class CheckpointLike(Protocol):
    """A checkpoint: a model with its tokenizer and configuration files."""

    model: Transformer
    generation_config: dict[str, object]
    hf_config: dict[str, object]

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
    """Return `sampling_params` with the suppressed tokens of the checkpoint added to those of the request.

    Length limits and repetition penalty are taken from the checkpoint if the request does not set them."""
    max_new_tokens = sampling_params.max_new_tokens
    if max_new_tokens is None:
        default = generation_config.max_new_tokens_for(prompt_len)
        max_new_tokens = max(default if default else DEFAULT_MAX_NEW_TOKENS, sampling_params.min_new_tokens)
    min_new_tokens = sampling_params.min_new_tokens or generation_config.min_new_tokens_for(prompt_len)
    suppressed = {
        *sampling_params.suppress_tokens,
        *generation_config.suppress_tokens,
        *(words[0] for words in generation_config.bad_words_ids if len(words) == 1),
    }
    penalty = sampling_params.repetition_penalty
    return replace(
        sampling_params,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(min_new_tokens, max_new_tokens),
        suppress_tokens=tuple(sorted(suppressed)),
        repetition_penalty=generation_config.repetition_penalty if penalty == 1 else penalty,
    )
