"""What one request asks for, checked when it is made."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from numbers import Real

from cutaway.errors import InputError

MOST_STOPS, MOST_STOP_LETTERS = 256, 16_384
MOST_ANSWERS, MOST_LOGPROBS, MOST_TOKENS = 128, 50, 2**31 - 1
LARGEST_BIAS = 1e6
"""Above this, what is added would round the logits away."""


@dataclass(frozen=True)
class Settings:
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
    banned: Sequence[int] = ()
    stop: Sequence[str] | str = ()
    stop_tokens: Sequence[int] = ()
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
            ("max_new_tokens", 1, MOST_TOKENS),
            ("min_new_tokens", 0, MOST_TOKENS),
            ("top_k", 1, MOST_TOKENS),
            ("seed", 0, 2**63 - 1),
            ("logprobs", 0, MOST_LOGPROBS),
            ("n", 1, MOST_ANSWERS),
        ):
            value = getattr(self, name)
            if value is not None or name in ("min_new_tokens", "n"):
                put(name, whole(name, value, low, high))
        put("temperature", number("temperature", self.temperature, 0.0, math.inf, "0 (the most likely token) or more"))
        if self.top_p is not None:
            put("top_p", number("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1 (1 keeps all)", above=True))
        if self.min_p is not None:
            put("min_p", number("min_p", self.min_p, 0.0, 1.0, "from 0 (keeps all) to 1"))
        wide = "from 0.001 to 1000 (1 changes nothing, 1.1 is usual)"
        put("repetition_penalty", number("repetition_penalty", self.repetition_penalty, 0.001, 1000.0, wide))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, number(name, getattr(self, name), -2.0, 2.0, "from -2 to 2 (0 changes nothing)"))
        put("logit_bias", biases(self.logit_bias))
        put("banned", ids("banned", self.banned))
        put("stop_tokens", ids("stop_tokens", self.stop_tokens))
        put("stop", stops(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos is {shown(self.ignore_eos)}; give True or False")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}; lower it"
            )

    def check(self, vocab_size: int) -> None:
        """Refuse what a model with this vocabulary cannot do."""
        for name, tokens in (
            ("logit_bias", self.logit_bias),
            ("banned", self.banned),
            ("stop_tokens", self.stop_tokens),
        ):
            if len(tokens) > vocab_size:
                raise InputError(f"{name} has {len(tokens)} entries, but the vocabulary only {vocab_size}; give fewer")
            outside = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if outside is not None:
                raise InputError(f"{name} names token {outside}; the vocabulary has ids 0 to {vocab_size - 1}")
        out = {*self.banned, *(token for token, bias in self.logit_bias.items() if bias == -math.inf)}
        if len(out) == vocab_size:
            raise InputError("banned and logit_bias leave no token of the vocabulary; allow at least one")
        if self.min_new_tokens and len(out | set(self.stop_tokens)) == vocab_size:
            raise InputError("min_new_tokens forbids the stop tokens at first, and all else is banned; allow a token")


def shown(value: object) -> str:
    """A value as an error shows it, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def whole(name: str, value: object, low: int, high: int) -> int:
    """A whole number of any integer type, which bool is not."""
    span = f"a whole number from {low} to {high}" if high < MOST_TOKENS else f"a whole number, {low} or more"
    span = "a whole number from 0 to 2**63 - 1" if high == 2**63 - 1 else span
    found = index(value)
    if found is None or not low <= found <= high:
        raise InputError(f"{name} is {shown(value)}; give {span}")
    return found


def index(value: object) -> int | None:
    """The integer that this is, or None: True and 1.0 are none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # arrays have the method, and refuse
        return None


def number(name: str, value: object, low: float, high: float, span: str, *, above: bool = False) -> float:
    """A finite real number in its range."""
    found = real(value)
    if found is None or not math.isfinite(found) or not low <= found <= high or (above and found == low):
        raise InputError(f"{name} is {shown(value)}; give a number {span}")
    return found


def real(value: object) -> float | None:
    """The real number that this is, or None: True and "1" are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def several(value: object) -> Iterable[object] | None:
    """What a list, a set or an array holds, or None: text and mappings are no lists."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return None
    if isinstance(value, Sequence | AbstractSet):
        return value
    flat = getattr(value, "ndim", None) == 1 and hasattr(value, "tolist")
    return value.tolist() if flat else None  # type: ignore[attr-defined]


def ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids; whether the model has them is asked later."""
    entries = several(value)
    if entries is None:
        raise InputError(f"{name} is {shown(value)}; give a list of token ids, such as [0, 2]")
    return tuple(token_id(name, entry) for entry in entries)


def token_id(name: str, value: object) -> int:
    found = index(value)
    if found is None or found < 0:
        raise InputError(f"{name} holds {shown(value)}; token ids are whole numbers from 0")
    return found


def biases(value: object) -> dict[int, float]:
    """What is added to the logits of single tokens; −inf bans one."""
    if not isinstance(value, Mapping):
        raise InputError(
            f"logit_bias is {shown(value)}; give a mapping from token ids to numbers, such as {{50256: -5}}"
        )
    result = {}
    for key, bias in value.items():
        token, found = token_id("logit_bias", key), real(bias)
        if found is None or math.isnan(found) or found > LARGEST_BIAS:
            raise InputError(
                f"logit_bias of token {token} is {shown(bias)}; give a number of at most {LARGEST_BIAS:g}, or -inf"
                " to ban the token"
            )
        result[token] = found
    return result


def stops(value: object) -> tuple[str, ...]:
    """One stop string or several, as a tuple."""
    entries = (value,) if isinstance(value, str) else several(value)
    if entries is None:
        raise InputError(f"stop is {shown(value)}; give a string or a list of strings")
    result: list[str] = []
    for entry in entries:
        if not isinstance(entry, str):
            raise InputError(f"stop holds {shown(entry)}; give strings, and token ids as stop_tokens")
        if not entry:
            raise InputError("stop holds an empty string, which is everywhere; leave it out")
        result.append(entry)
    if len(result) > MOST_STOPS:
        raise InputError(f"stop holds {len(result)} strings; give at most {MOST_STOPS}")
    if sum(map(len, result)) > MOST_STOP_LETTERS:
        raise InputError(f"the strings in stop are over {MOST_STOP_LETTERS} characters together; give shorter ones")
    return tuple(result)
