"""Fields: how one key of another library's config.json and one path of a configuration say the same, both ways."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cutaway.errors import ConfigError
from cutaway.families.config_tree import MISSING, ConfigTree

REQUIRED: Any = object()


class HFConfigReader:
    """A config.json being read. Whoever asks for a key says what its absence means."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; null counts as absent where the default is not None."""
        value = self.data.get(key, default)
        if value is REQUIRED:
            raise ConfigError(f"config.json has no '{key}', and this family has no default for it; add it")
        return value

    def get_number(self, key: str, default: Any = REQUIRED) -> Any:
        """A number (null counts as absent)."""
        value = self.get(key, default)
        value = default if value is None else value
        if value is REQUIRED or isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"config.json's '{key}' is {value!r}, not a number; correct it")
        return value


class ConfigField(Protocol):
    """Part of the table between their config.json and our configuration."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys it accounts for."""

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        """From their keys into our tree."""

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        """From our tree into their keys."""


Paths = str | tuple[str, ...]


def _as_paths(path: Paths) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else path


def _get_common_value(tree: ConfigTree, path: Paths, key: str) -> Any:
    values = [tree.get(one) for one in _as_paths(path)]
    if any(value != values[0] for value in values[1:]):
        raise ConfigError(f"{' and '.join(_as_paths(path))} differ, and '{key}' is one for both")
    return values[0]


@dataclass(frozen=True)
class Key:
    """The same value under another name. A default may be computed from the other keys."""

    key: str
    path: Paths
    default: Any = REQUIRED
    decode: Callable[[Any], Any] | None = None
    """Theirs into ours, where they differ; None stays None."""
    encode: Callable[[Any], Any] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        default = self.default(hf_config) if callable(self.default) else self.default
        value = hf_config.get(self.key, default)
        if value is None and callable(self.default):  # null means "work it out"
            value = default
        if value is not None and self.decode is not None:
            value = self.decode(value)
        for path in _as_paths(self.path):
            tree.set(path, value)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        value = _get_common_value(tree, self.path, self.key)
        if value is not MISSING:
            hf_config[self.key] = self.encode(value) if value is not None and self.encode is not None else value


@dataclass(frozen=True)
class Choice:
    """A word of theirs for a value (or a whole part) of ours."""

    key: str
    path: Paths
    default: Any
    choices: Mapping[Any, Any]

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        word = hf_config.get(self.key, self.default)
        word = self.default if word is None else word
        known = [value for name, value in self.choices.items() if name == word and type(name) is type(word)]
        if not known:
            words = ", ".join(repr(name) for name in self.choices)
            raise ConfigError(f"config.json's '{self.key}' is {word!r}, which cutaway does not have; it has {words}")
        for path in _as_paths(self.path):
            tree.set(path, known[0])

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        value = _get_common_value(tree, self.path, self.key)
        words = [word for word, meaning in self.choices.items() if _matches(meaning, value)]
        if not words:
            raise ConfigError(f"{_as_paths(self.path)[0]} is {value!r}, for which '{self.key}' has no word")
        hf_config[self.key] = self.default if self.default in words else words[0]


def _matches(expected: Any, value: Any) -> bool:
    """Whether a written-out part is the one that a table names briefly."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return all(_matches(inner, value.get(key)) for key, inner in expected.items())
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        return sorted(map(str, expected)) == sorted(map(str, value))
    return bool(expected == value)


def flag(key: str, path: Paths, default: bool, *, on: Any = True, off: Any = False) -> Choice:
    """True and False, and what they mean."""
    return Choice(key, path, default, {True: on, False: off})


@dataclass(frozen=True)
class SupportedValues:
    """A key that is honoured at these values alone; any other is refused, for the model would be another one."""

    key: str
    values: tuple[Any, ...]
    """The first is the default, and is what is written."""
    reason: str
    always_write: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        value = hf_config.get(self.key, self.values[0])
        if value not in self.values:
            raise ConfigError(f"config.json's '{self.key}' is {value!r}, which cutaway does not honour: {self.reason}")

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        if self.always_write:
            hf_config[self.key] = self.values[0]


@dataclass(frozen=True)
class Custom:
    """What no table can say: two functions that undo each other."""

    keys: tuple[str, ...]
    from_hf: Callable[[HFConfigReader, ConfigTree], None]
    to_hf: Callable[[ConfigTree, dict[str, Any]], None]


@dataclass(frozen=True)
class SameAs:
    """A path of ours that always says what another one says; where it does not, the way out and back shows it."""

    path: str
    source: str
    keys: tuple[str, ...] = ()

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        tree.set(self.path, tree.get(self.source))

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class IfHead:
    """A field about the head, passed over where there is none."""

    field: ConfigField

    @property
    def keys(self) -> tuple[str, ...]:
        return self.field.keys

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        if tree.get("head.kind") != "none":
            self.field.from_hf(hf_config, tree)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        if tree.get("head.kind") != "none":
            self.field.to_hf(tree, hf_config)


def clear_out_of_vocab_pad_token(default_pad_token_id: int) -> Custom:
    """Where a vocabulary is too small for the padding token that an absent key would mean, none is written."""

    def to_hf(tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        if tree.data["vocab_size"] <= default_pad_token_id:
            hf_config["pad_token_id"] = None

    return Custom((), lambda hf_config, tree: None, to_hf)


HF_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick", "gelu_10": "gelu_clipped", "relu": "relu", "relu2": "relu2", "relu6": "relu6",
    "leaky_relu": "leaky_relu", "hardswish": "hardswish", "mish": "mish", "laplace": "laplace",
    "sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "tanh": "tanh", "linear": "identity",
}  # fmt: skip
"""Their word → ours. Several of theirs are one function; the first that is the family's default is written."""


def activation(key: str, path: Paths, default: str) -> Choice:
    """The name of an activation."""
    return Choice(key, path, default, HF_ACTIVATIONS)


def attention_heads(
    stack: str = "decoder",
    *,
    num_heads: tuple[str, int] = ("num_attention_heads", 32),
    num_kv_heads: tuple[str, int | None] | None = ("num_key_value_heads", None),
    head_dim: tuple[str, int | None] | None = ("head_dim", None),
) -> tuple[ConfigField, ...]:
    """How many heads, how many keys and values (as many, unless told), how wide (d_model / heads, unless told)."""
    at = f"{stack}.block.attention"
    fields = [Key(num_heads[0], f"{at}.heads", num_heads[1])]
    fields += [Key(num_kv_heads[0], f"{at}.kv_heads", num_kv_heads[1])] if num_kv_heads else []
    fields += [Key(head_dim[0], f"{at}.d_head", head_dim[1])] if head_dim else []
    return tuple(fields)


@dataclass(frozen=True)
class WhereFFN:
    """Fields of those layers alone whose FFN is of one kind, in a stack that mixes them."""

    ffn_kind: str
    fields: tuple[ConfigField, ...]
    stack: str = "decoder"

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for entry in self.fields for key in entry.keys)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        for entry in self.fields:
            entry.from_hf(hf_config, self._matching_layers(tree))

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        part = self._matching_layers(tree)
        for entry in self.fields if part.blocks(self.stack) else ():
            entry.to_hf(part, hf_config)

    def _matching_layers(self, tree: ConfigTree) -> ConfigTree:
        blocks = [block for block in tree.blocks(self.stack) if block["ffn"]["kind"] == self.ffn_kind]
        part = ConfigTree({})
        part.data = tree.data | {self.stack: tree.data[self.stack] | {"blocks": blocks}}
        return part


@dataclass(frozen=True)
class LayerTypes:
    """Which layers look near and which far: `layer_types` and the window's width."""

    default: Callable[[HFConfigReader, int], list[str]]
    """What an absent list means, for so many layers."""
    stack: str = "decoder"
    window_key: str = "sliding_window"
    default_window: int | None = None
    extra_keys: tuple[str, ...] = ()
    """Older keys that the default reads."""
    is_enabled: Callable[[HFConfigReader], bool] = lambda hf_config: True
    """Whether windows are used at all."""
    decode: Callable[[int], int] = lambda window: window
    encode: Callable[[int], int] = lambda window: window

    @property
    def keys(self) -> tuple[str, ...]:
        return ("layer_types", self.window_key, *self.extra_keys)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        blocks = tree.blocks(self.stack)
        types = hf_config.get("layer_types")
        types = self.default(hf_config, len(blocks)) if types is None else types
        window = hf_config.get(self.window_key, self.default_window) if self.is_enabled(hf_config) else None
        if not isinstance(types, list) or len(types) < len(blocks):
            raise ConfigError(f"config.json's 'layer_types' must be a list of {len(blocks)} words, one a layer")
        for block, kind in zip(blocks, types, strict=False):
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(
                    f"config.json's 'layer_types' has {kind!r}; cutaway has full_attention and sliding_attention"
                )
            near = window if kind == "sliding_attention" else None
            block["attention"]["window"] = None if near is None else self.decode(near)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        windows = [block["attention"]["window"] for block in tree.blocks(self.stack)]
        near = {window for window in windows if window is not None}
        if len(near) > 1:
            raise ConfigError(f"layers have windows of {sorted(near)}, and this family has one width for all")
        hf_config["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
        if near:
            hf_config[self.window_key] = self.encode(near.pop())


def full_attention_every(
    default_period: int, period_key: str | None = None
) -> Callable[[HFConfigReader, int], list[str]]:
    """Each n-th layer looks far and the others near; n may stand under an older key."""

    def layer_types(hf_config: HFConfigReader, num_layers: int) -> list[str]:
        period = hf_config.get_number(period_key, default_period) if period_key else default_period
        return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]

    return layer_types
