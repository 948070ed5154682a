"""Fields: how one key of another library's config.json and one path of a configuration say the same, both ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cutaway.errors import ConfigError
from cutaway.families.tree import MISSING, Tree

REQUIRED: Any = object()


class Theirs:
    """A config.json being read. Whoever asks for a key says what its absence means."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; null counts as absent where the default is not None."""
        value = self.data.get(key, default)
        if value is REQUIRED:
            raise ConfigError(f"config.json has no '{key}', and this family has no default for it; add it")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A number (null counts as absent)."""
        value = self.get(key, default)
        value = default if value is None else value
        if value is REQUIRED or isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"config.json's '{key}' is {value!r}, not a number; correct it")
        return value


class Field(Protocol):
    """Part of the table between their config.json and our configuration."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys it accounts for."""

    def read(self, theirs: Theirs, ours: Tree) -> None:
        """From their keys into our tree."""

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        """From our tree into their keys."""


Paths = str | tuple[str, ...]


def _paths(path: Paths) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else path


def _common(ours: Tree, path: Paths, key: str) -> Any:
    values = [ours.get(one) for one in _paths(path)]
    if any(value != values[0] for value in values[1:]):
        raise ConfigError(f"{' and '.join(_paths(path))} differ, and '{key}' is one for both")
    return values[0]


@dataclass(frozen=True)
class Key:
    """The same value under another name. A default may be computed from the other keys."""

    key: str
    path: Paths
    default: Any = REQUIRED
    to: Callable[[Any], Any] | None = None
    """Theirs into ours, where they differ; None stays None."""
    back: Callable[[Any], Any] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, theirs: Theirs, ours: Tree) -> None:
        default = self.default(theirs) if callable(self.default) else self.default
        value = theirs.get(self.key, default)
        if value is None and callable(self.default):  # null means "work it out"
            value = default
        if value is not None and self.to is not None:
            value = self.to(value)
        for path in _paths(self.path):
            ours.set(path, value)

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        value = _common(ours, self.path, self.key)
        if value is not MISSING:
            theirs[self.key] = self.back(value) if value is not None and self.back is not None else value


@dataclass(frozen=True)
class Choice:
    """A word of theirs for a value (or a whole part) of ours."""

    key: str
    path: Paths
    default: Any
    table: Mapping[Any, Any]

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, theirs: Theirs, ours: Tree) -> None:
        word = theirs.get(self.key, self.default)
        word = self.default if word is None else word
        known = [value for name, value in self.table.items() if name == word and type(name) is type(word)]
        if not known:
            words = ", ".join(repr(name) for name in self.table)
            raise ConfigError(f"config.json's '{self.key}' is {word!r}, which cutaway does not have; it has {words}")
        for path in _paths(self.path):
            ours.set(path, known[0])

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        value = _common(ours, self.path, self.key)
        words = [word for word, meaning in self.table.items() if _fits(meaning, value)]
        if not words:
            raise ConfigError(f"{_paths(self.path)[0]} is {value!r}, for which '{self.key}' has no word")
        theirs[self.key] = self.default if self.default in words else words[0]


def _fits(meaning: Any, value: Any) -> bool:
    """Whether a written-out part is the one that a table names briefly."""
    if isinstance(meaning, dict) and isinstance(value, dict):
        return all(_fits(inner, value.get(key)) for key, inner in meaning.items())
    if isinstance(meaning, list | tuple) and isinstance(value, list | tuple):
        return sorted(map(str, meaning)) == sorted(map(str, value))
    return bool(meaning == value)


def flag(key: str, path: Paths, default: bool, *, on: Any = True, off: Any = False) -> Choice:
    """True and False, and what they mean."""
    return Choice(key, path, default, {True: on, False: off})


@dataclass(frozen=True)
class Only:
    """A key that is honoured at these values alone; any other is refused, for the model would be another one."""

    key: str
    values: tuple[Any, ...]
    """The first is the default, and is what is written."""
    why: str
    written: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, theirs: Theirs, ours: Tree) -> None:
        value = theirs.get(self.key, self.values[0])
        if value not in self.values:
            raise ConfigError(f"config.json's '{self.key}' is {value!r}, which cutaway does not honour: {self.why}")

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        if self.written:
            theirs[self.key] = self.values[0]


@dataclass(frozen=True)
class Custom:
    """What no table can say: two functions that undo each other."""

    keys: tuple[str, ...]
    read: Callable[[Theirs, Tree], None]
    write: Callable[[Tree, dict[str, Any]], None]


@dataclass(frozen=True)
class Follows:
    """A path of ours that always says what another one says; where it does not, the way out and back shows it."""

    path: str
    source: str
    keys: tuple[str, ...] = ()

    def read(self, theirs: Theirs, ours: Tree) -> None:
        ours.set(self.path, ours.get(self.source))

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class InHead:
    """A field about the head, passed over where there is none."""

    field: Field

    @property
    def keys(self) -> tuple[str, ...]:
        return self.field.keys

    def read(self, theirs: Theirs, ours: Tree) -> None:
        if ours.get("head.kind") != "none":
            self.field.read(theirs, ours)

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        if ours.get("head.kind") != "none":
            self.field.write(ours, theirs)


def padding_within_vocab(default: int) -> Custom:
    """Where a vocabulary is too small for the padding token that an absent key would mean, none is written."""

    def write(ours: Tree, theirs: dict[str, Any]) -> None:
        if ours.data["vocab_size"] <= default:
            theirs["pad_token_id"] = None

    return Custom((), lambda theirs, ours: None, write)


ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick", "gelu_10": "gelu_clipped", "relu": "relu", "relu2": "relu2", "relu6": "relu6",
    "leaky_relu": "leaky_relu", "hardswish": "hardswish", "mish": "mish", "laplace": "laplace",
    "sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "tanh": "tanh", "linear": "identity",
}  # fmt: skip
"""Their word → ours. Several of theirs are one function; the first that is the family's default is written."""


def activation(key: str, path: Paths, default: str) -> Choice:
    """The name of an activation."""
    return Choice(key, path, default, ACTIVATIONS)


def heads(
    stack: str = "decoder",
    *,
    n: tuple[str, int] = ("num_attention_heads", 32),
    kv: tuple[str, int | None] | None = ("num_key_value_heads", None),
    width: tuple[str, int | None] | None = ("head_dim", None),
) -> tuple[Field, ...]:
    """How many heads, how many keys and values (as many, unless told), how wide (d_model / heads, unless told)."""
    at = f"{stack}.block.attention"
    fields = [Key(n[0], f"{at}.heads", n[1])]
    fields += [Key(kv[0], f"{at}.kv_heads", kv[1])] if kv else []
    fields += [Key(width[0], f"{at}.d_head", width[1])] if width else []
    return tuple(fields)
