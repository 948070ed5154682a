"""Sampling parameters of a request, validated on construction."""

import difflib
import json
import math
import operator
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from numbers import Real
from typing import cast

from cutaway.errors import InputError
from cutaway.generate.structured_output.constraint import CONSTRAINT_KINDS, Constraint, normalize_constraint

_ARGUMENT_ALIASES = {
    "assistant_model": "draft_model",
    "bad_words_ids": "suppress_tokens",
    "best_of": "n",
    "cache_dtype": "kv_cache_dtype",
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "schema",
    "guided_regex": "regex",
    "json_schema": "schema",
    "max_batch_size": "max_num_seqs",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "num_beams": "beams",
    "num_return_sequences": "n",
    "prompt_lookup_num_tokens": "num_draft_tokens",
    "response_format": "schema",
    "structured_outputs": "schema",
    "streamer": "on_chunk",
}
"""Argument names of other libraries, for suggestions in error messages."""
_ENGINE_ARGUMENTS = ("beams", "max_num_seqs", "max_model_len", "cache_implementation", "prefill_chunk_size")
"""Arguments of `generate` beside the sampling parameters, for suggestions of misspelled names."""
_MAX_STOP_STRINGS, _MAX_STOP_CHARS = 256, 16_384
_MAX_N, _MAX_LOGPROBS, MAX_TOKENS = 128, 50, 2**31 - 1
_MAX_LOGIT_BIAS = 1e6
"""Largest logit bias: above it, float32 rounding would erase the differences between logits."""
_INT_RANGES = {
    "max_new_tokens": (1, MAX_TOKENS),
    "min_new_tokens": (0, MAX_TOKENS),
    "top_k": (1, MAX_TOKENS),
    "seed": (0, 2**63 - 1),
    "logprobs": (0, _MAX_LOGPROBS),
    "prompt_logprobs": (0, _MAX_LOGPROBS),
    "n": (1, _MAX_N),
}
_FLOAT_RANGES = {
    "temperature": (0.0, math.inf, "0 (greedy) or more"),
    "top_p": (math.ulp(0.0), 1.0, "above 0 and at most 1 (1 keeps all)"),
    "min_p": (0.0, 1.0, "from 0 (keeps all) to 1"),
    "repetition_penalty": (0.001, 1000.0, "from 0.001 to 1000 (1 changes nothing, 1.1 is usual)"),
    "presence_penalty": (-2.0, 2.0, "from -2 to 2 (0 changes nothing)"),
    "frequency_penalty": (-2.0, 2.0, "from -2 to 2 (0 changes nothing)"),
}
"""Smallest and largest value of each parameter, and the range in words."""
_OPTIONAL = ("max_new_tokens", "top_k", "top_p", "min_p", "seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: length limits, temperature, top-k, top-p, min-p, penalties, stop conditions, logprobs."""

    max_new_tokens: int | None = None
    """Maximum number of completion tokens. None: until the context is full; `generate` replaces it by the limit in the
    checkpoint's generation config, or by 256."""
    min_new_tokens: int = 0
    """Minimum number of completion tokens before an EOS or stop token."""
    temperature: float = 0.0
    """Divisor of the logits before softmax; 0 for greedy decoding."""
    top_k: int | None = None
    """Keep only the k most likely tokens."""
    top_p: float | None = None
    """Nucleus sampling: keep the most likely tokens with this total probability."""
    min_p: float | None = None
    """Keep tokens with at least this fraction of the highest probability."""
    repetition_penalty: float = 1.0
    """For tokens in the prompt or completion, positive logits are divided and negative logits multiplied by it."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the completion."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the completion."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    suppress_tokens: Sequence[int] = ()
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    """Number of top log-probabilities to return per token; 0 returns only that of the sampled token."""
    prompt_logprobs: int | None = None
    """Number of top log-probabilities to return per token of the prompt; 0 returns only that of the token itself."""
    n: int = 1
    """Number of completions per prompt."""
    schema: object = None
    """JSON schema that the completion must match: a dict, JSON text, or a pydantic model class."""
    regex: str | None = None
    """Regular expression that the whole completion must match."""
    choice: Sequence[str] | str | None = None
    """Texts, one of which the completion must be."""
    grammar: str | None = None
    """Context-free grammar, in Lark or GBNF notation, that the completion must match."""

    def __post_init__(self) -> None:
        values: dict[str, object] = {
            "logit_bias": _check_logit_bias(self.logit_bias),
            "suppress_tokens": check_token_ids("suppress_tokens", self.suppress_tokens),
            "stop_token_ids": check_token_ids("stop_token_ids", self.stop_token_ids),
            "stop": _check_stop_strings(self.stop),
        }
        for name, int_range in _INT_RANGES.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                values[name] = check_int(name, getattr(self, name), *int_range)
        for name, float_range in _FLOAT_RANGES.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                values[name] = _check_float(name, getattr(self, name), *float_range)
        for kind in CONSTRAINT_KINDS:
            if getattr(self, kind) is not None:
                values[kind] = normalize_constraint(kind, getattr(self, kind))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos is {format_value(self.ignore_eos)}; pass True or False")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            limit = self.max_new_tokens
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens is {limit}; lower min_new_tokens"
            )

        given = [kind for kind in CONSTRAINT_KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} are both set, but a completion can match only one; pass one")

    @property
    def constraint(self) -> Constraint | None:
        """What the completion must match; None if nothing is given."""
        for kind in CONSTRAINT_KINDS:
            value = getattr(self, kind)
            if value is not None:
                return Constraint(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return None

    def all_stop_token_ids(self, eos_token_ids: Iterable[int]) -> set[int]:
        """Tokens that end a completion: `stop_token_ids`, and EOS tokens unless `ignore_eos`."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}

    def check_vocab(self, vocab_size: int) -> None:
        """Raise if a token id is outside the vocabulary, or if all tokens are suppressed."""
        for name in ("logit_bias", "suppress_tokens", "stop_token_ids"):
            tokens: Collection[int] = getattr(self, name)
            if len(tokens) > vocab_size:
                raise InputError(f"{name} has {len(tokens)} entries, but vocab_size is {vocab_size}; pass fewer")
            outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if outside is not None:
                raise InputError(f"{name} contains token {outside}; the vocabulary has ids 0 to {vocab_size - 1}")
        suppressed = {*self.suppress_tokens, *(token for token, bias in self.logit_bias.items() if bias == -math.inf)}
        if len(suppressed) == vocab_size:
            raise InputError("suppress_tokens and logit_bias suppress the whole vocabulary; allow at least one token")
        if self.min_new_tokens and len(suppressed | set(self.stop_token_ids)) == vocab_size:
            raise InputError(
                "min_new_tokens suppresses the stop tokens, and all other tokens are suppressed too; allow at least one"
                " token"
            )


def format_value(value: object) -> str:
    """repr of a value for error messages, truncated to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_int(name: str, value: object, minimum: int, maximum: int) -> int:
    """Return the value as int; raise unless it is an integer (not bool) from `minimum` to `maximum`."""
    expected = f"an integer from {minimum} to {maximum}" if maximum < MAX_TOKENS else f"an integer, {minimum} or more"
    expected = "an integer from 0 to 2**63 - 1" if maximum == 2**63 - 1 else expected
    integer = as_int(value)
    if integer is None or not minimum <= integer <= maximum:
        raise InputError(f"{name} is {format_value(value)}; pass {expected}")
    return integer


def as_int(value: object) -> int | None:
    """The value as int, or None if it is not of an integer type (bool and float do not count)."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # arrays have __index__, but raise
        return None


def _check_float(name: str, value: object, minimum: float, maximum: float, expected: str) -> float:
    """Return the value as float; raise unless it is a finite number from `minimum` to `maximum`."""
    number = as_float(value)
    if number is None or not math.isfinite(number) or not minimum <= number <= maximum:
        raise InputError(f"{name} is {format_value(value)}; pass a number {expected}")
    return number


def as_float(value: object) -> float | None:
    """The value as float, or None if it is not a real number (bool and str do not count)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _as_iterable(value: object) -> Iterable[object] | None:
    """Elements of a list, a set or a 1-dimensional array; None for other types, including str and mappings."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return None
    if isinstance(value, Sequence | AbstractSet):
        return value
    is_1d = getattr(value, "ndim", None) == 1 and hasattr(value, "tolist")
    return value.tolist() if is_1d else None  # type: ignore[attr-defined]


def check_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return the token ids as a tuple; raise if one is not an integer of at least 0. The vocabulary is not checked."""
    entries = _as_iterable(value)
    if entries is None:
        raise InputError(f"{name} is {format_value(value)}; pass a list of token ids, such as [0, 2]")
    return tuple(_check_token_id(name, entry) for entry in entries)


def _check_token_id(name: str, value: object) -> int:
    token_id = as_int(value)
    if token_id is None or token_id < 0:
        raise InputError(f"{name} contains {format_value(value)}; token ids are integers, 0 or more")
    return token_id


def check_ids_in_vocab(name: str, tokens: Iterable[object], vocab_size: int) -> list[int]:
    """Return the token ids as ints; raise if one is not in the vocabulary."""
    tokens = list(tokens)
    if set(map(type, tokens)) == {int}:  # the usual case, several times as fast as the loop
        ids = cast(list[int], tokens)
        if min(ids) >= 0 and max(ids) < vocab_size:
            return ids
    ids = []
    for token in tokens:
        token_id = token if type(token) is int else as_int(token)
        if token_id is None or not 0 <= token_id < vocab_size:
            raise InputError(f"{name} holds the id {format_value(token)}; the vocabulary has ids 0 to {vocab_size - 1}")
        ids.append(token_id)
    return ids


def _check_logit_bias(value: object) -> dict[int, float]:
    """Validate a logit bias and return it as a dict from token id to bias. A bias of −inf suppresses the token."""
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias is {format_value(value)}; pass a dict from token ids to numbers")
    result = {}
    for key, bias in value.items():
        token, number = _check_token_id("logit_bias", key), as_float(bias)
        if number is None or math.isnan(number) or number > _MAX_LOGIT_BIAS:
            expected = f"a number of at most {_MAX_LOGIT_BIAS:g}, or -inf to suppress the token"
            raise InputError(f"logit_bias of token {token} is {format_value(bias)}; pass {expected}")
        result[token] = number
    return result


def _check_stop_strings(value: object) -> tuple[str, ...]:
    """Return a stop string, or a list of stop strings, as a tuple; raise if one is empty or if there are too many."""
    entries = (value,) if isinstance(value, str) else _as_iterable(value)
    if entries is None:
        raise InputError(f"stop is {format_value(value)}; pass a string or a list of strings")
    result: list[str] = []
    for entry in entries:
        if not isinstance(entry, str):
            raise InputError(f"stop contains {format_value(entry)}; pass strings here, and token ids as stop_token_ids")
        if not entry:
            raise InputError("stop contains an empty string, which matches everywhere; leave it out")
        result.append(entry)
    if len(result) > _MAX_STOP_STRINGS:
        raise InputError(f"stop has {len(result)} strings; pass at most {_MAX_STOP_STRINGS}")
    if sum(map(len, result)) > _MAX_STOP_CHARS:
        raise InputError(f"the strings in stop have more than {_MAX_STOP_CHARS} characters in total; pass shorter ones")
    return tuple(result)


def resolve_temperature(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments, with temperature 1 if top_k, top_p or min_p is set and temperature is not.

    At temperature 0, top_k, top_p and min_p have no effect."""
    has_filter = any(arguments.get(name) is not None for name in ("top_k", "top_p", "min_p"))
    return ({"temperature": 1.0} if has_filter else {}) | dict(arguments)


def build_sampling_params(arguments: Mapping[str, object]) -> SamplingParams:
    """Build SamplingParams from named arguments. An unknown name raises an InputError that suggests a known name."""
    known = tuple(SamplingParams.__dataclass_fields__)
    for name in arguments:
        if name not in known:
            matches = difflib.get_close_matches(name, (*known, *_ENGINE_ARGUMENTS), 1)
            suggestion = _ARGUMENT_ALIASES.get(name) or next(iter(matches), None)
            hint = f"did you mean {suggestion}?" if suggestion else f"use one of {', '.join(known)}"
            raise InputError(f"'{name}' is not a sampling parameter; {hint}")
    return SamplingParams(**arguments)  # type: ignore[arg-type]  # it validates each value


def completion_seeds(sampling_params: SamplingParams) -> list[int]:
    """Seeds of the n completions of a prompt. The first is `sampling_params.seed`, or random if that is None."""
    first = secrets.randbelow(2**63) if sampling_params.seed is None else sampling_params.seed
    return [(first + i * 0x9E3779B97F4A7C15) % 2**63 for i in range(sampling_params.n)]
