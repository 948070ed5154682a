"""ConfigTree: a Config as nested dicts with one block per layer, which config fields read and write."""

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeVar

from cutaway.config import Config
from cutaway.config import config as build_config
from cutaway.errors import ConfigError

T = TypeVar("T")
Node = dict[str, Any]
"""A node of the tree: field name → JSON value or another node."""
MISSING = object()


class ConfigTree:
    """A Config as nested dicts, addressed by dotted paths. `block` in a path addresses every layer of the stack."""

    def __init__(self, data: Mapping[str, object]) -> None:
        self.data: Node = deepcopy(dict(data))

    @classmethod
    def from_config(cls, config: Config) -> "ConfigTree":
        """Build the tree of a Config with all defaults and derived values resolved."""
        tree = cls(config.model_dump(mode="json"))
        if config.context is None:
            del tree.data["context"]
        for name, stack in config.stacks.items():
            stack_tree = tree.data[name]
            stack_tree["blocks"] = [block.model_dump(mode="json") for block in stack.blocks]
            if stack.attention_resid_dropout is None:
                stack_tree["attention_resid_dropout"] = stack.dropout
            stack_tree["embedding"]["scale"] = stack.embedding.resolve_scale(config.d_model)
            for block in stack_tree["blocks"]:
                _fill_ffn_defaults(block["ffn"], config.d_model)
                for attention in filter(None, (block["attention"], block.get("cross"))):
                    _fill_attention_defaults(attention, config.d_model)
            for key in ("block", "leading_blocks"):
                del stack_tree[key]
        return tree

    def blocks(self, stack: str) -> list[Node]:
        """The blocks of a stack, one per layer. On first access they are created as copies of the stack's `block`."""
        stack_tree = self.data[stack]
        if "blocks" not in stack_tree:
            layers = stack_tree["layers"]
            if not isinstance(layers, int) or isinstance(layers, bool) or not 1 <= layers <= 10_000:
                raise ConfigError(f"{stack}.layers is {layers!r}; it must be an integer from 1 to 10000")
            block = stack_tree.pop("block")
            stack_tree["blocks"] = [deepcopy(block) for _ in range(layers)]
        return stack_tree["blocks"]

    def set(self, path: str, value: object) -> None:
        """Set the value at a path and create missing dicts on the way."""
        if isinstance(value, list | dict | str) and len(value) > 4096:
            raise ConfigError(f"{path} is a {type(value).__name__} of length {len(value):,}; use at most 4096 items")
        for table, key in self._resolve_path(path, create=True):
            table[key] = deepcopy(value)

    def get(self, path: str) -> Any:
        """Value at a path, or MISSING if there is none. Raises ConfigError if layers have different values."""
        values = [table.get(key, MISSING) for table, key in self._resolve_path(path, create=False)]
        if any(value != values[0] for value in values[1:]):
            raise ConfigError(f"{path} differs between layers, but this family has one value for all layers")
        return values[0] if values else MISSING

    def _resolve_path(self, path: str, *, create: bool) -> list[tuple[Node, str]]:
        *parents, last = path.split(".")
        tables = [self.data]
        for key in parents:
            if key == "block":
                tables = list(self.blocks(parents[0]))
                continue
            if create:
                for table in tables:
                    if not isinstance(table.get(key), dict):
                        table[key] = {}
            tables = [inner if isinstance(inner := table.get(key), dict) else {} for table in tables]
        return [(table, last) for table in tables]

    def to_config(self) -> Config:
        """Convert the tree to a Config. Layers become the shortest `leading_blocks` and repeating `block` pattern."""
        data = dict(self.data)
        for name in {"encoder", "decoder"} & data.keys():
            leading, pattern = shortest_layer_pattern(self.blocks(name))
            stack = {key: value for key, value in data[name].items() if key != "blocks"}
            data[name] = stack | {"leading_blocks": leading, "block": pattern}
        return build_config(data)


def shortest_layer_pattern(blocks: list[T]) -> tuple[list[T], list[T]]:
    """Return the shortest (leading blocks, repeating pattern) of a list of blocks; on a tie, the fewest leading blocks.

    The failure function (Knuth, Morris, Pratt) of the reversed list gives, for every suffix of the list, its shortest
    period.
    """
    ids: dict[str, int] = {}
    reversed_ids = [ids.setdefault(json.dumps(block, sort_keys=True, default=str), len(ids)) for block in blocks][::-1]
    border = [0] * len(reversed_ids)
    for i in range(1, len(reversed_ids)):
        k = border[i - 1]
        while k and reversed_ids[i] != reversed_ids[k]:
            k = border[k - 1]
        border[i] = k + (reversed_ids[i] == reversed_ids[k])
    length = max(range(1, len(reversed_ids) + 1), key=lambda length: (border[length - 1], length))
    num_leading, period = len(reversed_ids) - length, length - border[length - 1]
    return blocks[:num_leading], blocks[num_leading : num_leading + period]


# --------------------------------------------------------------------------------------------------- comparison


def diff_configs(a: Config, b: Config) -> list[str]:
    """List the differences of two Configs as 'path: value in a, not value in b'. `init` and `context` are ignored."""
    left, right = ({**ConfigTree.from_config(config).data, "init": None, "context": None} for config in (a, b))
    left, right = _flatten(left), _flatten(right)
    pairs = [(path, left.get(path), right.get(path)) for path in sorted(left.keys() | right.keys())]
    return [f"{path}: {x!r}, not {y!r}" for path, x, y in pairs if not _values_equal(x, y)]


def _values_equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float | int) and not isinstance(b, bool):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _fill_ffn_defaults(ffn: Node, d_model: int) -> None:
    for layer in (ffn, ffn.get("expert"), ffn.get("shared")):
        if layer is not None and "hidden" in layer and layer["hidden"] is None:
            layer["hidden"] = 4 * d_model if layer["kind"] == "mlp" else -(-8 * d_model // 24) * 8


def _fill_attention_defaults(attention: Node, d_model: int) -> None:
    if attention["kind"] == "latent":
        head_dim = attention["d_rope"]
        attention["scale"] = attention["scale"] or (attention["d_nope"] + head_dim) ** -0.5
    else:
        head_dim = attention["d_head"] = attention["d_head"] or d_model // attention["heads"]
        attention["kv_heads"] = attention["kv_heads"] or attention["heads"]
        num_terms = 1 + len(attention.get("position", {}).get("pos_att_type", ()))  # kinds of scores that are added
        attention["scale"] = attention["scale"] or (num_terms * head_dim) ** -0.5
        attention["bias"] = sorted(attention["bias"])
    position = attention.get("position", {})
    if position.get("kind") == "rope":
        position["rotary_dim"] = position["rotary_dim"] or head_dim
        scaling = position["scaling"]
        if scaling["kind"] == "yarn" and scaling["attention_factor"] is None:
            scaling["attention_factor"] = 0.1 * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0


def _flatten(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{n}]", item) for n, item in enumerate(value)]
    else:
        return {path: value}
    flat: dict[str, object] = {}
    for inner_path, item in items:
        flat |= _flatten(item, inner_path)
    return flat
