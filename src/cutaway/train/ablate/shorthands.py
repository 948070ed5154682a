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
    Learned,
    Mlp,
    Moe,
    MultiHead,
    NoNorm,
    NoPosition,
    Output,
    Parallel,
    Post,
    Pre,
    RelativeBias,
    RMSNorm,
    Rope,
    Sandwich,
    Sinusoidal,
    Stack,
)
from cutaway.config.part import explain
from cutaway.errors import ConfigError

Edit = Callable[[Config, str], Config]

NORMS = {"layernorm": LayerNorm(), "rmsnorm": RMSNorm(), "none": NoNorm()}
PLACEMENTS = {"pre": Pre(), "post": Post(), "sandwich": Sandwich(), "output": Output(), "parallel": Parallel()}
IN_ATTENTION = {"rope": Rope(), "alibi": Alibi(), "relative-bias": RelativeBias()}
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Activations whose FFN has three matrices, and what they put on the gate."""


def stacks(config: Config, edit: Callable[[Stack], Stack]) -> Config:
    return config.replace(**{name: edit(stack) for name, stack in config.stacks.items()})


def blocks(config: Config, edit: Callable[[Any], Any]) -> Config:
    """Every block of every pattern edited."""
    return stacks(
        config, lambda s: s.replace(block=tuple(edit(b) for b in s.block), lead=tuple(edit(b) for b in s.lead))
    )


def attentions(config: Config, edit: Callable[[Any], Any]) -> Config:
    def block(old: Block) -> Block:
        cross = {"cross": edit(old.cross)} if hasattr(old, "cross") else {}
        return old.replace(attention=edit(old.attention), **cross)

    return blocks(config, block)


def ffns(config: Config, edit: Callable[[Any], Any]) -> Config:
    """Every dense FFN edited; of a mixture, its experts."""

    def block(old: Block) -> Block:
        if not isinstance(old.ffn, Moe):
            return old.replace(ffn=edit(old.ffn))
        shared = None if old.ffn.shared is None else edit(old.ffn.shared)
        return old.replace(ffn=old.ffn.replace(expert=edit(old.ffn.expert), shared=shared))

    return blocks(config, block)


def whole(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{name}={value} is no count; give whole numbers, such as {name}=1,2,4")
    return int(value)


def one_of(name: str, value: str, table: dict[str, Any]) -> Any:
    if value not in table:
        raise ConfigError(f"{name}={value} is unknown; give some of {', '.join(table)}")
    return table[value]


def heads(config: Config, value: str) -> Config:
    """So many query heads; as many for keys and values where each had its own."""
    count = whole("heads", value)

    def edit(old: Any) -> Any:
        each_its_own = getattr(old, "kv_heads", None) == old.heads
        return old.replace(heads=count, **({"kv_heads": count} if each_its_own else {}))

    return attentions(config, edit)


def kv_heads(config: Config, value: str) -> Config:
    count = whole("kv-heads", value)

    def edit(old: Any) -> Any:
        if not hasattr(old, "kv_heads"):
            raise ConfigError("kv-heads: latent attention has none; vary another part, or give it multi-head attention")
        return old.replace(kv_heads=count)

    return attentions(config, edit)


def ffn(config: Config, value: str) -> Config:
    """The FFN's width in the middle."""
    return ffns(config, lambda old: old.replace(hidden=whole("ffn", value)))


def depth(config: Config, value: str) -> Config:
    return stacks(config, lambda old: old.replace(layers=whole("depth", value)))


def norm(config: Config, value: str) -> Config:
    return stacks(config, lambda old: old.replace(norm=one_of("norm", value, NORMS)))


def placement(config: Config, value: str) -> Config:
    return stacks(config, lambda old: old.replace(placement=one_of("placement", value, PLACEMENTS)))


def position(config: Config, value: str) -> Config:
    """One method for all: what was added to the embedding or acted in attention before is gone."""
    added = {"sinusoidal": Sinusoidal(), "learned": Learned(length=config.context or 1024)}
    one_of("position", value, dict.fromkeys((*IN_ATTENTION, *added, "none")))

    def attention(old: Attention) -> Attention:
        if isinstance(old, MultiHead):
            return old.replace(position=IN_ATTENTION.get(value, NoPosition()))
        if "kv_rank" in type(old).model_fields:
            raise ConfigError("position: latent attention turns its keys by RoPE; give it multi-head attention to vary")
        return old  # cross-attention has no positions

    changed = stacks(
        config, lambda s: s.replace(embedding=s.embedding.replace(position=added.get(value, NoPosition())))
    )
    return attentions(changed, attention)


def activation(config: Config, value: str) -> Config:
    """swiglu, geglu and reglu have three matrices, all others two; the width changes so that both weigh the same."""
    d_model = config.d_model

    def edit(old: Any) -> Any:
        width, three = old.hidden_width(d_model), not isinstance(old, Mlp)
        kept = {"bias": old.bias, "dropout": old.dropout}
        if value in GATED:
            return Gated(activation=GATED[value], hidden=width if three else max(1, round(width * 2 / 3)), **kept)
        return Mlp(activation=value, hidden=round(width * 3 / 2) if three else width, **kept)

    return ffns(config, edit)


SHORTHANDS: dict[str, Edit] = {
    "activation": activation,
    "depth": depth,
    "ffn": ffn,
    "heads": heads,
    "kv-heads": kv_heads,
    "norm": norm,
    "placement": placement,
    "position": position,
}


def edited(config: Config, name: str, value: Any) -> Config:
    """The configuration with one thing varied."""
    try:
        return SHORTHANDS[name](config, str(value))
    except ValidationError as error:
        raise explain(error, {}, tags=0) from None
