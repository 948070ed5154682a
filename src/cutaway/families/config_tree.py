"""A configuration as a plain tree with one block a layer: what the fields of a family read into and write from."""

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from cutaway.config import Config
from cutaway.config import config as validated
from cutaway.errors import ConfigError

MISSING: Any = object()


class ConfigTree:
    """Nested dicts by dotted path. A path through `block` means every layer of that stack."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = deepcopy(dict(data))

    @classmethod
    def from_config(cls, config: Config) -> "ConfigTree":
        """A finished configuration, with every default, and every value that follows from others, written out."""
        tree = cls(config.model_dump(mode="json"))
        if config.context is None:
            del tree.data["context"]
        for name, stack in config.stacks.items():
            inside = tree.data[name]
            inside["blocks"] = [block.model_dump(mode="json") for block in stack.blocks]
            own = stack.attention_resid_dropout
            inside["attention_resid_dropout"] = stack.dropout if own is None else own
            inside["embedding"]["scale"] = stack.embedding.resolve_scale(config.d_model)
            for block in inside["blocks"]:
                _fill_ffn_defaults(block["ffn"], config.d_model)
                for attention in filter(None, (block["attention"], block.get("cross"))):
                    _fill_attention_defaults(attention, config.d_model)
            for gone in ("block", "leading_blocks"):
                del inside[gone]
        return tree

    def blocks(self, stack: str) -> list[dict[str, Any]]:
        """The layers' blocks, made from the one written as `block` when first asked for."""
        inside = self.data[stack]
        if "blocks" not in inside:
            layers = inside["layers"]
            if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= 10_000:
                raise ConfigError(f"the {stack} has {layers!r} layers; a whole number from 1 to 10000 is needed")
            one = inside.pop("block")
            inside["blocks"] = [deepcopy(one) for _ in range(layers)]
        return inside["blocks"]

    def set(self, path: str, value: Any) -> None:
        """Write a value, making the tables on the way."""
        if isinstance(value, list | dict | str) and len(value) > 4096:
            raise ConfigError(f"{path} is given a {type(value).__name__} of {len(value):,}, which is no setting")
        for table, key in self._resolve_path(path, create=True):
            table[key] = deepcopy(value)

    def get(self, path: str) -> Any:
        """The value at a path, MISSING if there is none. Layers must agree."""
        values = [table.get(key, MISSING) for table, key in self._resolve_path(path, create=False)]
        if any(value != values[0] for value in values[1:]):
            raise ConfigError(f"{path} differs between layers, and this family has one for all of them")
        return values[0] if values else MISSING

    def _resolve_path(self, path: str, *, create: bool) -> list[tuple[dict[str, Any], str]]:
        *way, last = path.split(".")
        tables = [self.data]
        for key in way:
            if key == "block":
                tables = list(self.blocks(way[0]))
                continue
            if create:
                for table in tables:
                    if not isinstance(table.get(key), dict):
                        table[key] = {}
            tables = [inner if isinstance(inner := table.get(key), dict) else {} for table in tables]
        return [(table, last) for table in tables]

    def to_config(self) -> Config:
        """The configuration, its layers written as the shortest leading blocks and pattern."""
        data = deepcopy(self.data)
        for name in ("encoder", "decoder"):
            if name in data:
                blocks = ConfigTree(data).blocks(name) if "blocks" not in data[name] else data[name].pop("blocks")
                data[name].pop("block", None)
                data[name]["leading_blocks"], data[name]["block"] = shortest_layer_pattern(blocks)
        return validated(data)


def shortest_layer_pattern(blocks: list[Any]) -> tuple[list[Any], list[Any]]:
    """The shortest (leading blocks, pattern) that give these blocks; of equally short ones, that with fewer leading.

    What follows the leading blocks repeats itself: the borders of the blocks, read backwards, tell how (Knuth, Morris
    and Pratt).
    """
    kinds: dict[str, int] = {}
    number = [kinds.setdefault(json.dumps(block, sort_keys=True, default=str), len(kinds)) for block in blocks][::-1]
    border = [0] * len(number)
    for i in range(1, len(number)):
        k = border[i - 1]
        while k and number[i] != number[k]:
            k = border[k - 1]
        border[i] = k + (number[i] == number[k])
    length = max(range(1, len(number) + 1), key=lambda length: (border[length - 1], length))
    num_leading, period = len(number) - length, length - border[length - 1]
    return blocks[:num_leading], blocks[num_leading : num_leading + period]


# ------------------------------------------------------------------------------------------------ are two the same?


def diff_configs(a: Config, b: Config) -> list[str]:
    """Where two configurations describe different models, as 'path: this, not that'; spelling apart."""
    left, right = (
        _flatten(
            {key: value for key, value in ConfigTree.from_config(one).data.items() if key not in ("init", "context")}
        )
        for one in (a, b)
    )
    return [
        f"{path}: {left.get(path)!r}, not {right.get(path)!r}"
        for path in sorted(left.keys() | right.keys())
        if not _values_equal(left.get(path), right.get(path))
    ]


def _values_equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float | int) and not isinstance(b, bool):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _fill_ffn_defaults(ffn: dict[str, Any], d_model: int) -> None:
    for part in (ffn, ffn.get("expert"), ffn.get("shared")):
        if part is not None and "hidden" in part and part["hidden"] is None:
            part["hidden"] = 4 * d_model if part["kind"] == "mlp" else -(-8 * d_model // 24) * 8


def _fill_attention_defaults(attention: dict[str, Any], d_model: int) -> None:
    if attention["kind"] == "latent":
        width = attention["d_rope"]
        attention["scale"] = attention["scale"] or (attention["d_nope"] + width) ** -0.5
    else:
        width = attention["d_head"] = attention["d_head"] or d_model // attention["heads"]
        attention["kv_heads"] = attention["kv_heads"] or attention["heads"]
        attention["scale"] = attention["scale"] or width**-0.5
        attention["bias"] = sorted(attention["bias"])
    position = attention.get("position", {})
    if position.get("kind") == "rope":
        position["rotary_dim"] = position["rotary_dim"] or width
        scaling = position["scaling"]
        if scaling["kind"] == "yarn" and scaling["attention_factor"] is None:
            scaling["attention_factor"] = 0.1 * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            k: v for key, item in value.items() for k, v in _flatten(item, f"{path}.{key}" if path else key).items()
        }
    if isinstance(value, list | tuple):
        return {k: v for n, item in enumerate(value) for k, v in _flatten(item, f"{path}[{n}]").items()}
    return {path: value}
