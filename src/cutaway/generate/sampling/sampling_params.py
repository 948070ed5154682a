"""What one request asks for, checked when it is made."""

import difflib
import math
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from cutaway.errors import InputError

ARGUMENT_ALIASES = {
    "assistant_model": "draft_model",
    "bad_words_ids": "suppress_tokens",
    "best_of": "n",
    "cache_dtype": "kv_cache_dtype",
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "max_batch_size": "max_num_seqs",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "num_beams": "beams",
    "num_return_sequences": "n",
    "prompt_lookup_num_tokens": "num_draft_tokens",
    "streamer": "on_chunk",
}
"""What other libraries call it, where the names are not alike."""
ENGINE_ARGUMENTS = ("beams", "max_num_seqs", "max_model_len", "cache_implementation", "prefill_chunk_size")
"""Arguments of `generate` beside the sampling parameters, of which a misspelled one is told."""


MAX_STOP_STRINGS, MAX_STOP_CHARS = 256, 16_384


MAX_N, MAX_LOGPROBS, MAX_TOKENS = 128, 50, 2**31 - 1


MAX_LOGIT_BIAS = 1e6
"""Above this, what is added would round the logits away."""


@dataclass(frozen=True)
class SamplingParams:
    """How a text is continued: how far, how drawn, and where it stops."""

    max_new_tokens: int | None = None
    """None: until the context is full."""
    min_new_tokens: int = 0
    """No end-of-text or stop token before this many."""
    temperature: float = 0.0
    """0: always the most likely token."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    """Divides what is liked and multiplies what is disliked, for tokens of the prompt and the answer."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token already in the answer."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it is in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    suppress_tokens: Sequence[int] = ()
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    """How many alternatives to tell beside the chosen token; 0: only the chosen one's."""
    n: int = 1
    """Answers to one prompt."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, low, high in (
            ("max_new_tokens", 1, MAX_TOKENS),
            ("min_new_tokens", 0, MAX_TOKENS),
            ("top_k", 1, MAX_TOKENS),
            ("seed", 0, 2**63 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("n", 1, MAX_N),
        ):
            value = getattr(self, name)
            if value is not None or name in ("min_new_tokens", "n"):
                put(name, check_int(name, value, low, high))
        put(
            "temperature",
            check_float("temperature", self.temperature, 0.0, math.inf, "0 (the most likely token) or more"),
        )
        if self.top_p is not None:
            put(
                "top_p",
                check_float(
                    "top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1 (1 keeps all)", exclusive_minimum=True
                ),
            )
        if self.min_p is not None:
            put("min_p", check_float("min_p", self.min_p, 0.0, 1.0, "from 0 (keeps all) to 1"))
        wide = "from 0.001 to 1000 (1 changes nothing, 1.1 is usual)"
        put("repetition_penalty", check_float("repetition_penalty", self.repetition_penalty, 0.001, 1000.0, wide))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, check_float(name, getattr(self, name), -2.0, 2.0, "from -2 to 2 (0 changes nothing)"))
        put("logit_bias", check_logit_bias(self.logit_bias))
        put("suppress_tokens", check_token_ids("suppress_tokens", self.suppress_tokens))
        put("stop_token_ids", check_token_ids("stop_token_ids", self.stop_token_ids))
        put("stop", check_stop_strings(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos is {format_value(self.ignore_eos)}; give True or False")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}; lower it"
            )

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse what a model with this vocabulary cannot do."""
        for name, tokens in (
            ("logit_bias", self.logit_bias),
            ("suppress_tokens", self.suppress_tokens),
            ("stop_token_ids", self.stop_token_ids),
        ):
            if len(tokens) > vocab_size:
                raise InputError(f"{name} has {len(tokens)} entries, but the vocabulary only {vocab_size}; give fewer")
            outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if outside is not None:
                raise InputError(f"{name} names token {outside}; the vocabulary has ids 0 to {vocab_size - 1}")
        out = {*self.suppress_tokens, *(token for token, bias in self.logit_bias.items() if bias == -math.inf)}
        if len(out) == vocab_size:
            raise InputError("suppress_tokens and logit_bias leave no token of the vocabulary; allow at least one")
        if self.min_new_tokens and len(out | set(self.stop_token_ids)) == vocab_size:
            raise InputError(
                "min_new_tokens forbids the stop tokens at first, and all else is suppressed; allow a token"
            )


def format_value(value: object) -> str:
    """A value as an error shows it, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_int(name: str, value: object, minimum: int, maximum: int) -> int:
    """A whole number of any integer type, which bool is not."""
    span = (
        f"a whole number from {minimum} to {maximum}" if maximum < MAX_TOKENS else f"a whole number, {minimum} or more"
    )
    span = "a whole number from 0 to 2**63 - 1" if maximum == 2**63 - 1 else span
    found = as_int(value)
    if found is None or not minimum <= found <= maximum:
        raise InputError(f"{name} is {format_value(value)}; give {span}")
    return found


def as_int(value: object) -> int | None:
    """The integer that this is, or None: True and 1.0 are none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # arrays have the method, and refuse
        return None


def check_float(
    name: str, value: object, minimum: float, maximum: float, expected: str, *, exclusive_minimum: bool = False
) -> float:
    """A finite real number in its range."""
    found = as_float(value)
    if (
        found is None
        or not math.isfinite(found)
        or not minimum <= found <= maximum
        or (exclusive_minimum and found == minimum)
    ):
        raise InputError(f"{name} is {format_value(value)}; give a number {expected}")
    return found


def as_float(value: object) -> float | None:
    """The real number that this is, or None: True and "1" are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def as_iterable(value: object) -> Iterable[object] | None:
    """What a list, a set or an array holds, or None: text and mappings are no lists."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return None
    if isinstance(value, Sequence | AbstractSet):
        return value
    flat = getattr(value, "ndim", None) == 1 and hasattr(value, "tolist")
    return value.tolist() if flat else None  # type: ignore[attr-defined]


def check_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids; whether the model has them is asked later."""
    entries = as_iterable(value)
    if entries is None:
        raise InputError(f"{name} is {format_value(value)}; give a list of token ids, such as [0, 2]")
    return tuple(check_token_id(name, entry) for entry in entries)


def check_token_id(name: str, value: object) -> int:
    found = as_int(value)
    if found is None or found < 0:
        raise InputError(f"{name} holds {format_value(value)}; token ids are whole numbers from 0")
    return found


def check_logit_bias(value: object) -> dict[int, float]:
    """What is added to the logits of single tokens; −inf bans one."""
    if not isinstance(value, Mapping):
        raise InputError(
            f"logit_bias is {format_value(value)}; give a mapping from token ids to numbers, such as {{50256: -5}}"
        )
    result = {}
    for key, bias in value.items():
        token, found = check_token_id("logit_bias", key), as_float(bias)
        if found is None or math.isnan(found) or found > MAX_LOGIT_BIAS:
            raise InputError(
                f"logit_bias of token {token} is {format_value(bias)}; give a number of at most {MAX_LOGIT_BIAS:g}, or"
                " -inf to ban the token"
            )
        result[token] = found
    return result


def check_stop_strings(value: object) -> tuple[str, ...]:
    """One stop string or several, as a tuple."""
    entries = (value,) if isinstance(value, str) else as_iterable(value)
    if entries is None:
        raise InputError(f"stop is {format_value(value)}; give a string or a list of strings")
    result: list[str] = []
    for entry in entries:
        if not isinstance(entry, str):
            raise InputError(f"stop holds {format_value(entry)}; give strings, and token ids as stop_token_ids")
        if not entry:
            raise InputError("stop holds an empty string, which is everywhere; leave it out")
        result.append(entry)
    if len(result) > MAX_STOP_STRINGS:
        raise InputError(f"stop holds {len(result)} strings; give at most {MAX_STOP_STRINGS}")
    if sum(map(len, result)) > MAX_STOP_CHARS:
        raise InputError(f"the strings in stop are over {MAX_STOP_CHARS} characters together; give shorter ones")
    return tuple(result)


def resolve_temperature(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, with temperature 1 where filters would have nothing to do for want of one."""
    filtered = any(arguments.get(name) is not None for name in ("top_k", "top_p", "min_p"))
    return ({"temperature": 1.0} if filtered else {}) | dict(arguments)


def build_sampling_params(arguments: Mapping[str, Any]) -> SamplingParams:
    known = tuple(SamplingParams.__dataclass_fields__)
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, *ENGINE_ARGUMENTS), 1)
            meant = ARGUMENT_ALIASES.get(name) or next(iter(near), None)
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
            raise InputError(f"there is no setting '{name}'; {hint}")
    return SamplingParams(**arguments)


def completion_seeds(sampling_params: SamplingParams) -> list[int]:
    """One for each answer, the first as it was given."""
    first = secrets.randbelow(2**63) if sampling_params.seed is None else sampling_params.seed
    return [(first + i * 0x9E3779B97F4A7C15) % 2**63 for i in range(sampling_params.n)]
