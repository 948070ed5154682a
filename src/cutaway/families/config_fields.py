"""Config fields: two-way mappings between config.json keys and Config paths."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cutaway.errors import ConfigError
from cutaway.families.config_tree import MISSING, ConfigTree

REQUIRED = object()


class HFConfigReader:
    """Reads the keys of a config.json. The caller passes the default of each key."""

    def __init__(self, data: Mapping[str, object]) -> None:
        self.data = data

    def get(self, key: str, default: object = None) -> Any:
        """Value of a key, or `default` if the key is absent. Raises if the key is absent and `default` is REQUIRED."""
        value = self.data.get(key, default)
        if value is REQUIRED:
            raise ConfigError(f"config.json has no '{key}', and this family has no default for it; add the key")
        return value

    def get_number(self, key: str, default: object = REQUIRED) -> Any:
        """Number at a key, or `default` if the key is absent or null. Raises if the value is not a number."""
        value = self.get(key, default)
        value = default if value is None else value
        if value is REQUIRED or isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"config.json's '{key}' is {value!r}, not a number; correct it")
        return value


class ConfigField(Protocol):
    """Two-way mapping between some config.json keys and some Config paths."""

    @property
    def keys(self) -> tuple[str, ...]:
        """config.json keys that this field reads or writes."""

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        """Read config.json keys and set Config values in the tree."""

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        """Read Config values of the tree and set config.json keys."""


ConfigFields = tuple[ConfigField, ...]
Paths = str | tuple[str, ...]


def _as_paths(path: Paths) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else path


def _get_common_value(tree: ConfigTree, path: Paths, key: str) -> object:
    values = [tree.get(p) for p in _as_paths(path)]
    if any(value != values[0] for value in values[1:]):
        raise ConfigError(f"{' and '.join(_as_paths(path))} differ, but config.json has one key for them, '{key}'")
    return values[0]


@dataclass(frozen=True)
class _OneKey:
    key: str

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)


@dataclass(frozen=True)
class Key(_OneKey):
    """One config.json key ↔ one Config path, or several paths with equal values.

    If `default` is callable, it computes the default from the other keys of config.json.
    """

    path: Paths
    default: object = REQUIRED
    decode: Callable[[Any], object] | None = None
    """Convert a config.json value to a Config value; not called for None. `encode` is the inverse."""
    encode: Callable[[Any], object] | None = None

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        default = self.default(hf_config) if callable(self.default) else self.default
        value = hf_config.get(self.key, default)
        if value is None and callable(self.default):  # null means the computed default
            value = default
        if value is not None and self.decode is not None:
            value = self.decode(value)
        for path in _as_paths(self.path):
            tree.set(path, value)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        value = _get_common_value(tree, self.path, self.key)
        if value is not MISSING:
            hf_config[self.key] = self.encode(value) if value is not None and self.encode is not None else value


@dataclass(frozen=True)
class Choice(_OneKey):
    """A config.json key with a fixed set of values. `choices` maps each value to a Config value or subtree."""

    path: Paths
    default: str | bool
    choices: Mapping[str, object] | Mapping[bool, object]

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        value = hf_config.get(self.key, self.default)
        value = self.default if value is None else value
        matches = [target for name, target in self.choices.items() if name == value and type(name) is type(value)]
        if not matches:
            supported = ", ".join(repr(name) for name in self.choices)
            raise ConfigError(
                f"config.json's '{self.key}' is {value!r}, which cutaway does not support; use {supported}"
            )
        for path in _as_paths(self.path):
            tree.set(path, matches[0])

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        value = _get_common_value(tree, self.path, self.key)
        if value is MISSING:
            return
        names = [name for name, target in self.choices.items() if _matches(target, value)]
        if not names:
            raise ConfigError(
                f"{_as_paths(self.path)[0]} is {value!r}, which config.json's '{self.key}' cannot represent"
            )
        hf_config[self.key] = self.default if self.default in names else names[0]


def _matches(expected: object, value: object) -> bool:
    """Whether a Config subtree has the values that `expected` lists; keys that are not listed may have any value."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return all(_matches(inner, value.get(key)) for key, inner in expected.items())
    if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
        return sorted(map(str, expected)) == sorted(map(str, value))
    return bool(expected == value)


def flag(key: str, path: Paths, default: bool, *, on: object = True, off: object = False) -> Choice:
    """Return the field of a boolean config.json key. `on` and `off` are the Config values for true and false."""
    return Choice(key, path, default, {True: on, False: off})


@dataclass(frozen=True)
class SupportedValues(_OneKey):
    """A config.json key that must have one of `values`. Other values raise ConfigError, as they change the model."""

    values: tuple[object, ...]
    """The first value is the default."""
    reason: str

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        value = hf_config.get(self.key, self.values[0])
        if value not in self.values:
            raise ConfigError(f"config.json's '{self.key}' is {value!r}, which cutaway does not support: {self.reason}")

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        """Write nothing: if the key is absent, transformers uses the default, which is a supported value."""


def _do_nothing(source: object, target: object) -> None:
    pass


@dataclass(frozen=True)
class Custom:
    """A ConfigField given by two functions: `from_hf` (config.json keys to Config values) and its inverse `to_hf`."""

    keys: tuple[str, ...]
    from_hf: Callable[[HFConfigReader, ConfigTree], None] = _do_nothing
    to_hf: Callable[[ConfigTree, dict[str, object]], None] = _do_nothing


@dataclass(frozen=True)
class Nested(_OneKey):
    """Applies `fields` to the JSON object at a config.json key."""

    fields: ConfigFields

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        inner = hf_config.get(self.key) or {}
        if not isinstance(inner, Mapping):
            raise ConfigError(f"config.json's '{self.key}' is {inner!r}, not a JSON object; correct it")
        for entry in self.fields:
            entry.from_hf(HFConfigReader(inner), tree)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        inner: dict[str, object] = {}
        for entry in self.fields:
            entry.to_hf(tree, inner)
        hf_config[self.key] = inner


@dataclass(frozen=True)
class SameAs:
    """Sets the Config value at `path` to the value at `source`. `config_to_hf` raises if the two values differ."""

    path: str
    source: str
    keys: tuple[str, ...] = ()

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        tree.set(self.path, tree.get(self.source))

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        """Write nothing: the field of the path `source` writes the value."""


@dataclass(frozen=True)
class IfHead:
    """Applies `field` only to models with an LM head."""

    field: ConfigField

    @property
    def keys(self) -> tuple[str, ...]:
        return self.field.keys

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        if tree.get("head.kind") == "lm":
            self.field.from_hf(hf_config, tree)

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        if tree.get("head.kind") == "lm":
            self.field.to_hf(tree, hf_config)


def clear_out_of_vocab_pad_token(default_pad_token_id: int) -> Custom:
    """Field that saves `pad_token_id` as null if the family's default of it is outside of the vocabulary."""

    def to_hf(tree: ConfigTree, hf_config: dict[str, object]) -> None:
        if tree.data["vocab_size"] <= default_pad_token_id:
            hf_config["pad_token_id"] = None

    return Custom((), to_hf=to_hf)


def four_times(key: str, default: int) -> Callable[[HFConfigReader], int]:
    """Return a function that computes the default of a hidden dimension: four times the config.json value at `key`."""
    return lambda hf_config: 4 * int(hf_config.get_number(key, default))


HF_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick", "gelu_10": "gelu_clipped", "relu": "relu", "relu2": "relu2", "relu6": "relu6",
    "leaky_relu": "leaky_relu", "hardswish": "hardswish", "mish": "mish", "laplace": "laplace",
    "sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "tanh": "tanh", "linear": "identity",
}  # fmt: skip
"""Activation name of transformers → name in Config. If several names mean the same function, `to_hf` writes
the family's default name if that is one of them, else the first of them."""


def activation(key: str, path: Paths, default: str) -> Choice:
    """Return the field of a config.json key whose value is an activation name of transformers."""
    return Choice(key, path, default, HF_ACTIVATIONS)


@dataclass(frozen=True)
class WhereFFN:
    """Applies `fields` only to layers whose FFN has kind `ffn_kind`, in a stack with several kinds of FFN."""

    ffn_kind: str
    fields: ConfigFields
    stack: str = "decoder"

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for entry in self.fields for key in entry.keys)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        for entry in self.fields:
            entry.from_hf(hf_config, self._matching_layers(tree))

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        matching = self._matching_layers(tree)
        for entry in self.fields if matching.blocks(self.stack) else ():
            entry.to_hf(matching, hf_config)

    def _matching_layers(self, tree: ConfigTree) -> ConfigTree:
        blocks = [block for block in tree.blocks(self.stack) if block["ffn"]["kind"] == self.ffn_kind]
        matching = ConfigTree({})
        matching.data = tree.data | {self.stack: tree.data[self.stack] | {"blocks": blocks}}
        return matching


@dataclass(frozen=True)
class LayerTypes:
    """Sliding-window or full attention in each layer: the config.json keys `layer_types` and `window_key`."""

    default: Callable[[HFConfigReader, int], list[str]]
    """Default of `layer_types`, given config.json and the number of layers."""
    stack: str = "decoder"
    window_key: str = "sliding_window"
    default_window: int | None = None
    extra_keys: tuple[str, ...] = ()
    """Legacy keys that `default` reads."""
    is_enabled: Callable[[HFConfigReader], bool] = lambda hf_config: True
    """Whether config.json enables sliding windows."""
    decode: Callable[[int], int] = lambda window: window
    """Convert the window size of config.json to that of Config. `encode` is the inverse."""
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
            raise ConfigError(f"config.json's 'layer_types' must be a list of {len(blocks)} strings; correct it")
        windows = {"full_attention": None, "sliding_attention": None if window is None else self.decode(window)}
        for block, kind in zip(blocks, types, strict=False):
            if kind not in windows:
                raise ConfigError(f"config.json's 'layer_types' has {kind!r}; cutaway supports {' and '.join(windows)}")
            block["attention"]["window"] = windows[kind]

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        windows = [block["attention"]["window"] for block in tree.blocks(self.stack)]
        sizes = sorted({window for window in windows if window is not None})
        if len(sizes) > 1:
            raise ConfigError(f"layers have windows of {sizes}, but this family has one window size for all layers")
        hf_config["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
        if sizes:
            hf_config[self.window_key] = self.encode(sizes[0])


def full_attention_every(default_period: int, key: str | None = None) -> Callable[[HFConfigReader, int], list[str]]:
    """Return a function that computes the default `layer_types`: full attention in every n-th layer, else a window.

    n is the config.json value at `key`, or `default_period` if it is absent.
    """

    def layer_types(hf_config: HFConfigReader, num_layers: int) -> list[str]:
        period = hf_config.get_number(key, default_period) if key else default_period
        return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]

    return layer_types
