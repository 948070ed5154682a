"""The things that people vary, by short names: each is an edit of every stack of a configuration."""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from cutaway.config import (
    Alibi,
    Attention,
    Block,
    Config,
    Gated,
    LayerNorm,
    LearnedPosition,
    Mlp,
    Moe,
    MultiHead,
    NoNorm,
    NoPosition,
    OutputNorm,
    ParallelResidual,
    PostNorm,
    PreNorm,
    RelativeBias,
    RMSNorm,
    Rope,
    SandwichNorm,
    SinusoidalPosition,
    Stack,
)
from cutaway.config.node import build_config_error
from cutaway.errors import ConfigError

ConfigEdit = Callable[[Config, str], Config]

NORMS = {"layernorm": LayerNorm(), "rmsnorm": RMSNorm(), "none": NoNorm()}
PLACEMENTS = {
    "pre": PreNorm(),
    "post": PostNorm(),
    "sandwich": SandwichNorm(),
    "output": OutputNorm(),
    "parallel": ParallelResidual(),
}
ATTENTION_POSITIONS = {"rope": Rope(), "alibi": Alibi(), "relative-bias": RelativeBias()}
GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Activations whose FFN has three matrices, and what they put on the gate."""


def map_stacks(config: Config, edit: Callable[[Stack], Stack]) -> Config:
    return config.replace(**{name: edit(stack) for name, stack in config.stacks.items()})


def map_blocks(config: Config, edit: Callable[[Any], Any]) -> Config:
    """Every block of every pattern edited."""
    return map_stacks(
        config,
        lambda s: s.replace(
            block=tuple(edit(b) for b in s.block), leading_blocks=tuple(edit(b) for b in s.leading_blocks)
        ),
    )


def map_attention(config: Config, edit: Callable[[Any], Any]) -> Config:
    def block(old: Block) -> Block:
        cross = {"cross": edit(old.cross)} if hasattr(old, "cross") else {}
        return old.replace(attention=edit(old.attention), **cross)

    return map_blocks(config, block)


def map_ffns(config: Config, edit: Callable[[Any], Any]) -> Config:
    """Every dense FFN edited; of a mixture, its experts."""

    def block(old: Block) -> Block:
        if not isinstance(old.ffn, Moe):
            return old.replace(ffn=edit(old.ffn))
        shared = None if old.ffn.shared is None else edit(old.ffn.shared)
        return old.replace(ffn=old.ffn.replace(expert=edit(old.ffn.expert), shared=shared))

    return map_blocks(config, block)


def _parse_count(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{name}={value} is no count; give whole numbers, such as {name}=1,2,4")
    return int(value)


def _parse_choice(name: str, value: str, table: dict[str, Any]) -> Any:
    if value not in table:
        raise ConfigError(f"{name}={value} is unknown; give some of {', '.join(table)}")
    return table[value]


def set_heads(config: Config, value: str) -> Config:
    """So many query heads; as many for keys and values where each had its own."""
    count = _parse_count("heads", value)

    def edit(old: Any) -> Any:
        each_its_own = getattr(old, "kv_heads", None) == old.heads
        return old.replace(heads=count, **({"kv_heads": count} if each_its_own else {}))

    return map_attention(config, edit)


def set_kv_heads(config: Config, value: str) -> Config:
    count = _parse_count("kv-heads", value)

    def edit(old: Any) -> Any:
        if not hasattr(old, "kv_heads"):
            raise ConfigError("kv-heads: latent attention has none; vary another part, or give it multi-head attention")
        return old.replace(kv_heads=count)

    return map_attention(config, edit)


def set_ffn_width(config: Config, value: str) -> Config:
    """The FFN's width in the middle."""
    return map_ffns(config, lambda old: old.replace(hidden=_parse_count("ffn", value)))


def set_depth(config: Config, value: str) -> Config:
    return map_stacks(config, lambda old: old.replace(layers=_parse_count("depth", value)))


def set_norm(config: Config, value: str) -> Config:
    return map_stacks(config, lambda old: old.replace(norm=_parse_choice("norm", value, NORMS)))


def set_norm_placement(config: Config, value: str) -> Config:
    return map_stacks(config, lambda old: old.replace(placement=_parse_choice("placement", value, PLACEMENTS)))


def set_position(config: Config, value: str) -> Config:
    """One method for all: what was added to the embedding or acted in attention before is gone."""
    added = {"sinusoidal": SinusoidalPosition(), "learned": LearnedPosition(length=config.context or 1024)}
    _parse_choice("position", value, dict.fromkeys((*ATTENTION_POSITIONS, *added, "none")))

    def attention(old: Attention) -> Attention:
        if isinstance(old, MultiHead):
            return old.replace(position=ATTENTION_POSITIONS.get(value, NoPosition()))
        if "kv_rank" in type(old).model_fields:
            raise ConfigError("position: latent attention turns its keys by RoPE; give it multi-head attention to vary")
        return old  # cross-attention has no positions

    changed = map_stacks(
        config, lambda s: s.replace(embedding=s.embedding.replace(position=added.get(value, NoPosition())))
    )
    return map_attention(changed, attention)


def set_activation(config: Config, value: str) -> Config:
    """swiglu, geglu and reglu have three matrices, all others two; the width changes so that both weigh the same."""
    d_model = config.d_model

    def edit(old: Any) -> Any:
        width, three = old.hidden_dim(d_model), not isinstance(old, Mlp)
        kept = {"bias": old.bias, "dropout": old.dropout}
        if value in GATED_ACTIVATIONS:
            return Gated(
                activation=GATED_ACTIVATIONS[value], hidden=width if three else max(1, round(width * 2 / 3)), **kept
            )
        return Mlp(activation=value, hidden=round(width * 3 / 2) if three else width, **kept)

    return map_ffns(config, edit)


SHORTHANDS: dict[str, ConfigEdit] = {
    "activation": set_activation,
    "depth": set_depth,
    "ffn": set_ffn_width,
    "heads": set_heads,
    "kv-heads": set_kv_heads,
    "norm": set_norm,
    "placement": set_norm_placement,
    "position": set_position,
}


def apply_shorthand(config: Config, name: str, value: Any) -> Config:
    """The configuration with one thing varied."""
    try:
        return SHORTHANDS[name](config, str(value))
    except ValidationError as error:
        raise build_config_error(error, {}, num_tags=0) from None
