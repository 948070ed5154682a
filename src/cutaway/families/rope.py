"""RoPE's settings as other libraries write them: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cutaway.errors import ConfigError
from cutaway.families.fields import Theirs
from cutaway.families.tree import Tree


@dataclass(frozen=True)
class Rope:
    """One RoPE for all layers that have one."""

    stack: str = "decoder"
    theta: float = 10000.0
    share: float = 1.0
    """The part of a head that turns, unless the file says otherwise."""
    share_key: str = "partial_rotary_factor"
    theta_key: str = "rope_theta"
    layout: str = "half"
    length: str = "max_position_embeddings"
    length_default: int = 2048
    original: str | None = None
    """A key beside `rope_parameters` that holds the length before scaling, and goes before the one inside."""
    original_default: int | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    """Old words for a scaling."""
    whole: bool = False
    """All of a head turns, and nothing else can be said."""
    absent: tuple[tuple[str, Any], ...] = ()
    """The table that a file without one means."""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("rope_parameters", "rope_scaling", self.theta_key, self.share_key, *filter(None, [self.original]))

    def read(self, theirs: Theirs, ours: Tree) -> None:
        given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or dict(self.absent)
        rope = read_rope(self, theirs, given, head_width(ours, self.stack))
        for block in ours.blocks(self.stack):
            if block["attention"].get("position", {"kind": "rope"})["kind"] == "rope":
                block["attention"]["position"] = rope

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        ropes = [block["attention"]["position"] for block in ours.blocks(self.stack)]
        ropes = [rope for rope in ropes if rope["kind"] == "rope"]
        if not ropes:
            return
        if any(rope != ropes[0] for rope in ropes[1:]):
            raise ConfigError("layers turn by different angles, and this family has one RoPE for all of them")
        theirs["rope_parameters"] = write_rope(self, theirs, ropes[0], head_width(ours, self.stack))

    def repeat(self, theirs: dict[str, Any]) -> None:
        """The finished table once more, for readers that know only the older keys."""
        table = theirs.get("rope_parameters")
        if table is None:
            return
        theirs[self.theta_key] = table["rope_theta"]
        if "partial_rotary_factor" in table:
            theirs[self.share_key] = table["partial_rotary_factor"]
        if table["rope_type"] != "default":
            theirs["rope_scaling"] = {**table, "type": table["rope_type"]}


@dataclass(frozen=True)
class RopeByLayerType(Rope):
    """A RoPE for near layers and one for far ones, nested in `rope_parameters` under the layer type."""

    thetas: tuple[tuple[str, float, str], ...] = (
        ("full_attention", 1_000_000.0, "rope_theta"),
        ("sliding_attention", 10_000.0, "rope_local_base_freq"),
    )
    """Layer type, theta unless given, and the older key for it. An older `rope_scaling` is for the first type alone."""

    @property
    def keys(self) -> tuple[str, ...]:
        return ("rope_parameters", "rope_scaling", self.share_key, *(old for _, _, old in self.thetas))

    def read(self, theirs: Theirs, ours: Tree) -> None:
        given = theirs.get("rope_parameters") or {}
        nested = any(kind in given for kind, _, _ in self.thetas)
        width = head_width(ours, self.stack)
        ropes = {}
        for n, (kind, theta, old) in enumerate(self.thetas):
            inner = given.get(kind) if nested else ((theirs.get("rope_scaling") or given) if n == 0 else {})
            inner = {"rope_theta": theirs.number(old, theta)} | dict(inner or {})
            ropes[kind] = read_rope(self, theirs, inner, width)
        for block in ours.blocks(self.stack):
            near = block["attention"].get("window") is not None
            block["attention"]["position"] = ropes["sliding_attention" if near else "full_attention"]

    def write(self, ours: Tree, theirs: dict[str, Any]) -> None:
        width = head_width(ours, self.stack)
        found: dict[str, Any] = {}
        for block in ours.blocks(self.stack):
            kind = "full_attention" if block["attention"]["window"] is None else "sliding_attention"
            if found.setdefault(kind, block["attention"]["position"]) != block["attention"]["position"]:
                raise ConfigError(f"layers of type {kind} turn by different angles, and this family has one for them")
        theirs["rope_parameters"] = {
            kind: write_rope(self, theirs, found[kind], width)
            if kind in found
            else {"rope_type": "default", "rope_theta": theta}
            for kind, theta, _ in self.thetas
        }

    def repeat(self, theirs: dict[str, Any]) -> None:
        """One older key a theta; the older scaling is for the first type alone."""
        for kind, _, old in self.thetas:
            theirs[old] = theirs["rope_parameters"][kind]["rope_theta"]


def head_width(ours: Tree, stack: str) -> int:
    """Width of a head, which all layers share."""
    attention = ours.blocks(stack)[0]["attention"]
    width = attention.get("d_rope") or attention.get("d_head")
    try:
        return int(width or ours.data["d_model"] // attention["heads"])
    except (TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(
            f"the width of a head cannot be told from d_model {ours.data.get('d_model')!r} and"
            f" {attention.get('heads')!r} heads"
        ) from None


def read_rope(field: Rope, theirs: Theirs, given: Mapping[str, Any], head: int) -> dict[str, Any]:
    """Our Rope from one of their tables."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"config.json's rope settings are {given!r}, not a table")
    if nested := [key for key, value in given.items() if isinstance(value, Mapping)]:
        raise ConfigError(
            f"config.json's rope settings differ by layer ('{nested[0]}'), and this family has one for all"
        )
    table = Theirs(given)
    kind = table.get("rope_type") or table.get("type") or "default"
    kind = dict(field.renamed).get(kind, kind)
    theta = table.number("rope_theta", theirs.number(field.theta_key, field.theta))
    share = table.number("partial_rotary_factor", theirs.number(field.share_key, field.share))
    if field.whole and share != 1:
        raise ConfigError(f"config.json's 'partial_rotary_factor' is {share!r}; this family turns whole heads")
    return {
        "kind": "rope",
        "theta": float(theta),
        "width": int(head * share),
        "layout": field.layout,
        "scaling": _read_scaling(field, theirs, table, str(kind)),
    }


def _read_scaling(field: Rope, theirs: Theirs, table: Theirs, kind: str) -> dict[str, Any]:
    length = theirs.number(field.length, field.length_default)
    original = table.number("original_max_position_embeddings", length)
    if field.original and theirs.get(field.original, field.original_default) is not None:
        original = theirs.number(field.original, field.original_default)
    if kind == "default":
        return {"kind": "none"}
    if kind == "linear":
        return {"kind": "linear", "factor": float(table.number("factor"))}
    if kind == "dynamic":
        return {"kind": "dynamic", "factor": float(table.number("factor")), "original_length": length}
    if kind == "llama3":
        return {
            "kind": "llama3",
            "factor": float(table.number("factor")),
            "low_frequency_factor": float(table.number("low_freq_factor")),
            "high_frequency_factor": float(table.number("high_freq_factor")),
            "original_length": original,
        }
    if kind == "yarn":
        factor = float(table.number("factor", length / original))
        return {
            "kind": "yarn",
            "factor": factor,
            "original_length": original,
            "beta_fast": float(table.get("beta_fast") or 32.0),
            "beta_slow": float(table.get("beta_slow") or 1.0),
            "truncate": bool(table.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(table, factor),
        }
    if kind == "longrope":
        factor = table.number("factor", length / original)
        grown = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
        return {
            "kind": "longrope",
            "short_factors": table.get("short_factor"),
            "long_factors": table.get("long_factor"),
            "original_length": original,
            "attention_factor": float(table.number("attention_factor", grown)),
        }
    raise ConfigError(
        f"config.json's rope type is '{kind}'; cutaway has default, linear, dynamic, yarn, longrope and llama3"
    )


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much louder YaRN makes scores: 0.1 · weight · ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(table: Theirs, factor: float) -> float:
    if table.get("attention_factor") is not None:
        return float(table.number("attention_factor"))
    one, all_dims = table.get("mscale"), table.get("mscale_all_dim")
    if one and all_dims:
        return yarn_mscale(factor, one) / yarn_mscale(factor, all_dims)
    return yarn_mscale(factor)


def write_rope(field: Rope, theirs: dict[str, Any], rope: dict[str, Any], head: int) -> dict[str, Any]:
    """One of their tables from our Rope."""
    scaling = rope["scaling"]
    kind = scaling["kind"]
    table: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": rope["theta"]}
    width = rope["width"] or head
    if field.whole and width != head:
        raise ConfigError(f"{width} of a head's {head} dimensions turn, and this family turns whole heads")
    if width != int(head * field.share) or field.share != 1.0:
        share = width / head
        table["partial_rotary_factor"] = share if int(head * share) == width else math.nextafter(share, 2.0)
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        table["factor"] = scaling["factor"]
    if kind in ("yarn", "llama3", "longrope"):
        table["original_max_position_embeddings"] = scaling["original_length"]
        if field.original:
            theirs[field.original] = scaling["original_length"]
    if kind == "dynamic":
        theirs[field.length] = scaling["original_length"]
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
