"""RoPE's settings as other libraries write them: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.config_fields import HFConfigReader
from cutaway.families.config_tree import ConfigTree


@dataclass(frozen=True)
class RopeField:
    """One RoPE for all layers that have one."""

    stack: str = "decoder"
    default_theta: float = 10000.0
    default_partial_rotary_factor: float = 1.0
    """The part of a head that turns, unless the file says otherwise."""
    partial_rotary_factor_key: str = "partial_rotary_factor"
    theta_key: str = "rope_theta"
    layout: str = "half"
    max_positions_key: str = "max_position_embeddings"
    default_max_positions: int = 2048
    original_max_positions_key: str | None = None
    """A key beside `rope_parameters` that holds the length before scaling, and goes before the one inside."""
    default_original_max_positions: int | None = None
    rope_type_aliases: tuple[tuple[str, str], ...] = ()
    """Old words for a scaling."""
    full_rotary_only: bool = False
    """All of a head turns, and nothing else can be said."""
    default_rope_parameters: tuple[tuple[str, Any], ...] = ()
    """The table that a file without one means."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (
            "rope_parameters",
            "rope_scaling",
            self.theta_key,
            self.partial_rotary_factor_key,
            *filter(None, [self.original_max_positions_key]),
        )

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        given = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or dict(self.default_rope_parameters)
        rope = rope_from_hf(self, hf_config, given, resolve_head_dim(tree, self.stack))
        for block in tree.blocks(self.stack):
            if block["attention"].get("position", {"kind": "rope"})["kind"] == "rope":
                block["attention"]["position"] = rope

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        ropes = [block["attention"]["position"] for block in tree.blocks(self.stack)]
        ropes = [rope for rope in ropes if rope["kind"] == "rope"]
        if not ropes:
            return
        if any(rope != ropes[0] for rope in ropes[1:]):
            raise ConfigError("layers turn by different angles, and this family has one RoPE for all of them")
        hf_config["rope_parameters"] = rope_to_hf(self, hf_config, ropes[0], resolve_head_dim(tree, self.stack))

    def write_legacy_keys(self, hf_config: dict[str, Any]) -> None:
        """The finished table once more, for readers that know only the older keys."""
        table = hf_config.get("rope_parameters")
        if table is None:
            return
        hf_config[self.theta_key] = table["rope_theta"]
        if "partial_rotary_factor" in table:
            hf_config[self.partial_rotary_factor_key] = table["partial_rotary_factor"]
        if table["rope_type"] != "default":
            hf_config["rope_scaling"] = {**table, "type": table["rope_type"]}


@dataclass(frozen=True)
class RopeFieldByLayerType(RopeField):
    """A RoPE for near layers and one for far ones, nested in `rope_parameters` under the layer type."""

    layer_type_thetas: tuple[tuple[str, float, str], ...] = (
        ("full_attention", 1_000_000.0, "rope_theta"),
        ("sliding_attention", 10_000.0, "rope_local_base_freq"),
    )
    """Layer type, theta unless given, and the older key for it. An older `rope_scaling` is for the first type alone."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (
            "rope_parameters",
            "rope_scaling",
            self.partial_rotary_factor_key,
            *(old for _, _, old in self.layer_type_thetas),
        )

    def from_hf(self, hf_config: HFConfigReader, tree: ConfigTree) -> None:
        given = hf_config.get("rope_parameters") or {}
        nested = any(kind in given for kind, _, _ in self.layer_type_thetas)
        width = resolve_head_dim(tree, self.stack)
        ropes = {}
        for n, (kind, theta, old) in enumerate(self.layer_type_thetas):
            inner = given.get(kind) if nested else ((hf_config.get("rope_scaling") or given) if n == 0 else {})
            inner = {"rope_theta": hf_config.get_number(old, theta)} | dict(inner or {})
            ropes[kind] = rope_from_hf(self, hf_config, inner, width)
        for block in tree.blocks(self.stack):
            near = block["attention"].get("window") is not None
            block["attention"]["position"] = ropes["sliding_attention" if near else "full_attention"]

    def to_hf(self, tree: ConfigTree, hf_config: dict[str, Any]) -> None:
        width = resolve_head_dim(tree, self.stack)
        found: dict[str, Any] = {}
        for block in tree.blocks(self.stack):
            kind = "full_attention" if block["attention"]["window"] is None else "sliding_attention"
            if found.setdefault(kind, block["attention"]["position"]) != block["attention"]["position"]:
                raise ConfigError(f"layers of type {kind} turn by different angles, and this family has one for them")
        hf_config["rope_parameters"] = {
            kind: rope_to_hf(self, hf_config, found[kind], width)
            if kind in found
            else {"rope_type": "default", "rope_theta": theta}
            for kind, theta, _ in self.layer_type_thetas
        }

    def write_legacy_keys(self, hf_config: dict[str, Any]) -> None:
        """One older key a theta; the older scaling is for the first type alone."""
        for kind, _, old in self.layer_type_thetas:
            hf_config[old] = hf_config["rope_parameters"][kind]["rope_theta"]


def resolve_head_dim(tree: ConfigTree, stack: str) -> int:
    """Width of a head, which all layers share."""
    attention = tree.blocks(stack)[0]["attention"]
    width = attention.get("d_rope") or attention.get("d_head")
    try:
        return int(width or tree.data["d_model"] // attention["heads"])
    except (TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(
            f"the width of a head cannot be told from d_model {tree.data.get('d_model')!r} and"
            f" {attention.get('heads')!r} heads"
        ) from None


def rope_from_hf(
    field: RopeField, hf_config: HFConfigReader, rope_parameters: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    """Our Rope from one of their tables."""
    if not isinstance(rope_parameters, Mapping):
        raise ConfigError(f"config.json's rope settings are {rope_parameters!r}, not a table")
    if nested := [key for key, value in rope_parameters.items() if isinstance(value, Mapping)]:
        raise ConfigError(
            f"config.json's rope settings differ by layer ('{nested[0]}'), and this family has one for all"
        )
    table = HFConfigReader(rope_parameters)
    kind = table.get("rope_type") or table.get("type") or "default"
    kind = dict(field.rope_type_aliases).get(kind, kind)
    theta = table.get_number("rope_theta", hf_config.get_number(field.theta_key, field.default_theta))
    share = table.get_number(
        "partial_rotary_factor",
        hf_config.get_number(field.partial_rotary_factor_key, field.default_partial_rotary_factor),
    )
    if field.full_rotary_only and share != 1:
        raise ConfigError(f"config.json's 'partial_rotary_factor' is {share!r}; this family turns whole heads")
    return {
        "kind": "rope",
        "theta": float(theta),
        "rotary_dim": int(head_dim * share),
        "layout": field.layout,
        "scaling": _scaling_from_hf(field, hf_config, table, str(kind)),
    }


def _scaling_from_hf(
    field: RopeField, hf_config: HFConfigReader, rope_parameters: HFConfigReader, rope_type: str
) -> dict[str, Any]:
    length = hf_config.get_number(field.max_positions_key, field.default_max_positions)
    original = rope_parameters.get_number("original_max_position_embeddings", length)
    if (
        field.original_max_positions_key
        and hf_config.get(field.original_max_positions_key, field.default_original_max_positions) is not None
    ):
        original = hf_config.get_number(field.original_max_positions_key, field.default_original_max_positions)
    if rope_type == "default":
        return {"kind": "none"}
    if rope_type == "linear":
        return {"kind": "linear", "factor": float(rope_parameters.get_number("factor"))}
    if rope_type == "dynamic":
        return {"kind": "dynamic", "factor": float(rope_parameters.get_number("factor")), "original_length": length}
    if rope_type == "llama3":
        return {
            "kind": "llama3",
            "factor": float(rope_parameters.get_number("factor")),
            "low_frequency_factor": float(rope_parameters.get_number("low_freq_factor")),
            "high_frequency_factor": float(rope_parameters.get_number("high_freq_factor")),
            "original_length": original,
        }
    if rope_type == "yarn":
        factor = float(rope_parameters.get_number("factor", length / original))
        return {
            "kind": "yarn",
            "factor": factor,
            "original_length": original,
            "beta_fast": float(rope_parameters.get("beta_fast") or 32.0),
            "beta_slow": float(rope_parameters.get("beta_slow") or 1.0),
            "truncate": bool(rope_parameters.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(rope_parameters, factor),
        }
    if rope_type == "longrope":
        factor = rope_parameters.get_number("factor", length / original)
        grown = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return {
            "kind": "longrope",
            "short_factors": rope_parameters.get("short_factor"),
            "long_factors": rope_parameters.get("long_factor"),
            "original_length": original,
            "attention_factor": float(rope_parameters.get_number("attention_factor", grown)),
        }
    raise ConfigError(
        f"config.json's rope type is '{rope_type}'; cutaway has default, linear, dynamic, yarn, longrope and llama3"
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much louder YaRN makes scores: 0.1 · weight · ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(rope_parameters: HFConfigReader, factor: float) -> float:
    if rope_parameters.get("attention_factor") is not None:
        return float(rope_parameters.get_number("attention_factor"))
    one, all_dims = rope_parameters.get("mscale"), rope_parameters.get("mscale_all_dim")
    if one and all_dims:
        return yarn_mscale(factor, one) / yarn_mscale(factor, all_dims)
    return yarn_mscale(factor)


def rope_to_hf(field: RopeField, hf_config: dict[str, Any], rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """One of their tables from our Rope."""
    scaling = rope["scaling"]
    kind = scaling["kind"]
    table: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": rope["theta"]}
    rotary_dim = rope["rotary_dim"] or head_dim
    if field.full_rotary_only and rotary_dim != head_dim:
        raise ConfigError(f"{rotary_dim} of a head's {head_dim} dimensions turn, and this family turns whole heads")
    if rotary_dim != int(head_dim * field.default_partial_rotary_factor) or field.default_partial_rotary_factor != 1.0:
        share = rotary_dim / head_dim
        table["partial_rotary_factor"] = share if int(head_dim * share) == rotary_dim else math.nextafter(share, 2.0)
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        table["factor"] = scaling["factor"]
    if kind in ("yarn", "llama3", "longrope"):
        table["original_max_position_embeddings"] = scaling["original_length"]
        if field.original_max_positions_key:
            hf_config[field.original_max_positions_key] = scaling["original_length"]
    if kind == "dynamic":
        hf_config[field.max_positions_key] = scaling["original_length"]
    if kind == "llama3":
        table["low_freq_factor"] = scaling["low_frequency_factor"]
        table["high_freq_factor"] = scaling["high_frequency_factor"]
    if kind == "yarn":
        table |= {key: scaling[key] for key in ("beta_fast", "beta_slow", "truncate")}
        if scaling["attention_factor"] is not None:
            table["attention_factor"] = scaling["attention_factor"]
    if kind == "longrope":
        table["short_factor"] = list(scaling["short_factors"])
        table["long_factor"] = list(scaling["long_factors"])
        table["attention_factor"] = scaling["attention_factor"]
    return table
