"""RoPE config fields: `rope_parameters`, or the legacy keys `rope_theta` and `rope_scaling`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cutaway.errors import ConfigError
from cutaway.families.config_fields import REQUIRED, HFConfigReader
from cutaway.families.config_tree import ConfigTree, Node

_ROPE_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class RopeField:
    """Config field of the RoPE settings of a family in which all layers with RoPE have the same RoPE."""

    stack: str = "decoder"
    default_theta: float = 10000.0
    default_partial_rotary_factor: float = 1.0
    """Default fraction of the head dimension that is rotated."""
    partial_rotary_factor_key: str = "partial_rotary_factor"
    theta_key: str = "rope_theta"
    layout: str = "half"
    default_max_positions: int = 2048
    original_max_positions_key: str | None = None
    """Top-level key of the context length before scaling; it takes precedence over `rope_parameters`."""
    default_original_max_positions: int | None = None
    rope_type_aliases: tuple[tuple[str, str], ...] = ()
    """Legacy names of scaling types → current names."""
    full_rotary_only: bool = False
    """Whether the rotary dimension must equal the head dimension."""
    default_rope_parameters: Mapping[str, object] | None = None
    """Default of `rope_parameters`."""

    @property
    def keys(self) -> tuple[str, ...]:
        keys = ("rope_parameters", "rope_scaling", self.theta_key, self.partial_rotary_factor_key)
        return (*keys, self.original_max_positions_key) if self.original_max_positions_key else keys

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        rope_parameters = hf_config.get("rope_scaling") or hf_config.get("rope_parameters")
        rope_parameters = rope_parameters or self.default_rope_parameters or {}
        rope = self._rope_from_hf(hf_config, rope_parameters, resolve_head_dim(tree, self.stack))
        for block in tree.blocks(self.stack):
            if block["attention"].get("position", {"kind": "rope"})["kind"] == "rope":
                block["attention"]["position"] = rope

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        ropes = [block["attention"]["position"] for block in tree.blocks(self.stack)]
        ropes = [rope for rope in ropes if rope["kind"] == "rope"]
        if not ropes:
            return
        if any(rope != ropes[0] for rope in ropes[1:]):
            raise ConfigError("layers have different RoPE settings, but this family has one for all layers")
        hf_config["rope_parameters"] = self._rope_to_hf(hf_config, ropes[0], resolve_head_dim(tree, self.stack))

    def write_legacy_keys(self, hf_config: dict[str, object]) -> None:
        """Copy `rope_parameters` to the legacy keys, for older versions of transformers."""
        table = hf_config.get("rope_parameters")
        if not isinstance(table, dict):
            return
        hf_config[self.theta_key] = table["rope_theta"]
        if "partial_rotary_factor" in table:
            hf_config[self.partial_rotary_factor_key] = table["partial_rotary_factor"]
        if table["rope_type"] != "default":
            hf_config["rope_scaling"] = {**table, "type": table["rope_type"]}

    def _rope_from_hf(self, hf_config: HFConfigReader, rope_parameters: Mapping[str, object], head_dim: int) -> Node:
        """Convert `rope_parameters` of one layer type to a Config RoPE."""
        if not isinstance(rope_parameters, Mapping):
            raise ConfigError(f"config.json's RoPE settings are {rope_parameters!r}, not a JSON object; correct them")
        if nested := [key for key, value in rope_parameters.items() if isinstance(value, Mapping)]:
            reason = "but this family has one for all layers"
            raise ConfigError(f"config.json's RoPE settings differ by layer type ('{nested[0]}'), {reason}")
        rope = HFConfigReader(rope_parameters)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        theta = rope.get_number("rope_theta", hf_config.get_number(self.theta_key, self.default_theta))
        default = hf_config.get_number(self.partial_rotary_factor_key, self.default_partial_rotary_factor)
        fraction = rope.get_number("partial_rotary_factor", default)
        if self.full_rotary_only and fraction != 1:
            raise ConfigError(f"config.json's 'partial_rotary_factor' is {fraction!r}; this family supports only 1")
        return {
            "kind": "rope",
            "theta": float(theta),
            "rotary_dim": int(head_dim * fraction),
            "layout": self.layout,
            "scaling": self._scaling_from_hf(hf_config, rope, str(dict(self.rope_type_aliases).get(kind, kind))),
        }

    def _scaling_from_hf(self, hf_config: HFConfigReader, rope: HFConfigReader, rope_type: str) -> Node:
        length = hf_config.get_number("max_position_embeddings", self.default_max_positions)
        original = rope.get_number("original_max_position_embeddings", length)
        if self.original_max_positions_key:
            configured = hf_config.get(self.original_max_positions_key, self.default_original_max_positions)
            if configured is not None:
                original = hf_config.get_number(self.original_max_positions_key, self.default_original_max_positions)
        if rope_type == "default":
            return {"kind": "none"}
        if rope_type not in _ROPE_TYPES:
            supported = ", ".join(_ROPE_TYPES)
            raise ConfigError(f"config.json's 'rope_type' is '{rope_type}'; cutaway supports default, {supported}")
        default = length / original if rope_type in ("yarn", "longrope") else REQUIRED
        factor = float(rope.get_number("factor", default))
        scaling: Node = {"kind": rope_type, "factor": factor, "original_length": original}
        if rope_type == "linear":
            del scaling["original_length"]
        elif rope_type == "dynamic":
            scaling["original_length"] = length
        elif rope_type == "llama3":
            scaling["low_frequency_factor"] = float(rope.get_number("low_freq_factor"))
            scaling["high_frequency_factor"] = float(rope.get_number("high_freq_factor"))
        elif rope_type == "yarn":
            scaling["beta_fast"] = float(rope.get("beta_fast") or 32.0)
            scaling["beta_slow"] = float(rope.get("beta_slow") or 1.0)
            scaling["truncate"] = bool(rope.get("truncate", True))
            scaling["attention_factor"] = _yarn_attention_factor(rope, factor)
        else:
            del scaling["factor"]
            default_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
            scaling["short_factors"], scaling["long_factors"] = rope.get("short_factor"), rope.get("long_factor")
            scaling["attention_factor"] = float(rope.get_number("attention_factor", default_factor))
        return scaling

    def _rope_to_hf(self, hf_config: dict[str, object], rope: Node, head_dim: int) -> Node:
        """Convert a Config RoPE to `rope_parameters`. Related top-level keys are set in `hf_config`."""
        scaling = rope["scaling"]
        kind = scaling["kind"]
        rope_parameters: Node = {"rope_type": "default" if kind == "none" else kind, "rope_theta": rope["theta"]}
        rotary_dim = rope["rotary_dim"] or head_dim
        if self.full_rotary_only and rotary_dim != head_dim:
            raise ConfigError(f"rotary_dim is {rotary_dim}; this family supports only the head dimension {head_dim}")
        if rotary_dim != head_dim or self.default_partial_rotary_factor != 1.0:
            fraction = rotary_dim / head_dim
            is_exact = int(head_dim * fraction) == rotary_dim
            rope_parameters["partial_rotary_factor"] = fraction if is_exact else math.nextafter(fraction, 2.0)
        if kind in ("linear", "dynamic", "yarn", "llama3"):
            rope_parameters["factor"] = scaling["factor"]
        if kind in ("yarn", "llama3", "longrope"):
            rope_parameters["original_max_position_embeddings"] = scaling["original_length"]
            if self.original_max_positions_key:
                hf_config[self.original_max_positions_key] = scaling["original_length"]
        if kind == "dynamic":
            hf_config["max_position_embeddings"] = scaling["original_length"]
        if kind == "llama3":
            rope_parameters["low_freq_factor"] = scaling["low_frequency_factor"]
            rope_parameters["high_freq_factor"] = scaling["high_frequency_factor"]
        if kind == "yarn":
            rope_parameters |= {key: scaling[key] for key in ("beta_fast", "beta_slow", "truncate")}
            if scaling["attention_factor"] is not None:
                rope_parameters["attention_factor"] = scaling["attention_factor"]
        if kind == "longrope":
            rope_parameters["short_factor"] = list(scaling["short_factors"])
            rope_parameters["long_factor"] = list(scaling["long_factors"])
            rope_parameters["attention_factor"] = scaling["attention_factor"]
        return rope_parameters


@dataclass(frozen=True)
class RopeFieldByLayerType(RopeField):
    """Config field of two RoPEs, for sliding-window and full-attention layers: `rope_parameters` by layer type."""

    layer_type_thetas: tuple[tuple[str, float, str], ...] = (
        ("full_attention", 1_000_000.0, "rope_theta"),
        ("sliding_attention", 10_000.0, "rope_local_base_freq"),
    )
    """(layer type, default theta, legacy key of theta). A legacy `rope_scaling` applies to the first type only."""

    @property
    def keys(self) -> tuple[str, ...]:
        legacy_keys = (key for _, _, key in self.layer_type_thetas)
        return ("rope_parameters", "rope_scaling", self.partial_rotary_factor_key, *legacy_keys)

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        rope_parameters = hf_config.get("rope_parameters") or {}
        nested = any(kind in rope_parameters for kind, _, _ in self.layer_type_thetas)
        head_dim = resolve_head_dim(tree, self.stack)
        ropes = {}
        for i, (kind, theta, legacy_key) in enumerate(self.layer_type_thetas):
            inner = {"rope_theta": hf_config.get_number(legacy_key, theta)}
            if nested:
                inner |= rope_parameters.get(kind) or {}
            elif i == 0:
                inner |= hf_config.get("rope_scaling") or rope_parameters
            ropes[kind] = self._rope_from_hf(hf_config, inner, head_dim)
        for block in tree.blocks(self.stack):
            sliding = block["attention"].get("window") is not None
            block["attention"]["position"] = ropes["sliding_attention" if sliding else "full_attention"]

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, object]) -> None:
        head_dim = resolve_head_dim(tree, self.stack)
        ropes: dict[str, Node] = {}
        for block in tree.blocks(self.stack):
            kind = "full_attention" if block["attention"]["window"] is None else "sliding_attention"
            if ropes.setdefault(kind, block["attention"]["position"]) != block["attention"]["position"]:
                raise ConfigError(f"{kind} layers have different RoPE settings; this family has one per layer type")
        by_type: Node = {}
        for kind, theta, _ in self.layer_type_thetas:
            unscaled = {"rope_type": "default", "rope_theta": theta}
            by_type[kind] = self._rope_to_hf(hf_config, ropes[kind], head_dim) if kind in ropes else unscaled
        hf_config["rope_parameters"] = by_type

    def write_legacy_keys(self, hf_config: dict[str, object]) -> None:
        """Copy the theta of each layer type to its legacy key, for older versions of transformers."""
        by_type = hf_config["rope_parameters"]
        assert isinstance(by_type, dict)  # written by to_hf
        for kind, _, legacy_key in self.layer_type_thetas:
            hf_config[legacy_key] = by_type[kind]["rope_theta"]


def resolve_head_dim(tree: ConfigTree, stack: str) -> int:
    """Number of dimensions of a head that RoPE can rotate, in the first layer: d_rope, or the head dimension."""
    attention = tree.blocks(stack)[0]["attention"]
    head_dim = attention.get("d_rope") or attention.get("d_head")
    try:
        return int(head_dim or tree.data["d_model"] // attention["heads"])
    except (TypeError, ValueError, ZeroDivisionError):
        sizes = f"d_model {tree.data.get('d_model')!r} and {attention.get('heads')!r} heads"
        raise ConfigError(f"the head dimension cannot be computed from {sizes}; correct config.json") from None


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN attention factor, by which queries and keys are each multiplied: 0.1 · mscale · ln(factor) + 1, or 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(rope_parameters: HFConfigReader, factor: float) -> float:
    if rope_parameters.get("attention_factor") is not None:
        return float(rope_parameters.get_number("attention_factor"))
    mscale, mscale_all_dim = rope_parameters.get("mscale"), rope_parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)
