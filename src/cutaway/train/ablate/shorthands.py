"""Shorthands for common variations (norm, position, heads, …): edits of every stack of a config."""

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
"""Activations of gated FFNs (three matrices), and the activation of the gate."""


def map_stacks(config: Config, edit: Callable[[Stack], Stack]) -> Config:
    return config.replace(**{name: edit(stack) for name, stack in config.stacks.items()})


def map_blocks(config: Config, edit: Callable[[Any], Any]) -> Config:
    """Edit every block of every stack."""
    return map_stacks(
        config,
        lambda stack: stack.replace(
            block=tuple(edit(block) for block in stack.block),
            leading_blocks=tuple(edit(block) for block in stack.leading_blocks),
        ),
    )


def map_attention(config: Config, edit: Callable[[Any], Any]) -> Config:
    """Edit every self-attention and cross-attention."""

    def edit_block(block: Block) -> Block:
        cross = {"cross": edit(block.cross)} if hasattr(block, "cross") else {}
        return block.replace(attention=edit(block.attention), **cross)

    return map_blocks(config, edit_block)


def map_ffns(config: Config, edit: Callable[[Any], Any]) -> Config:
    """Edit every dense FFN, and the experts of every mixture."""

    def edit_block(block: Block) -> Block:
        if not isinstance(block.ffn, Moe):
            return block.replace(ffn=edit(block.ffn))
        shared = None if block.ffn.shared is None else edit(block.ffn.shared)
        return block.replace(ffn=block.ffn.replace(expert=edit(block.ffn.expert), shared=shared))

    return map_blocks(config, edit_block)


def _parse_count(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{name}={value} is not a positive integer; use integers, as in {name}=1,2,4")
    return int(value)


def _parse_choice(name: str, value: str, table: dict[str, Any]) -> Any:
    if value not in table:
        raise ConfigError(f"{name}={value} is unknown; use values of {', '.join(table)}")
    return table[value]


def set_heads(config: Config, value: str) -> Config:
    """Set the number of query heads, and of key-value heads where it was the same (MHA)."""
    count = _parse_count("heads", value)

    def edit(attention: Any) -> Any:
        is_mha = getattr(attention, "kv_heads", None) == attention.heads
        return attention.replace(heads=count, **({"kv_heads": count} if is_mha else {}))

    return map_attention(config, edit)


def set_kv_heads(config: Config, value: str) -> Config:
    count = _parse_count("kv-heads", value)

    def edit(attention: Any) -> Any:
        if not hasattr(attention, "kv_heads"):
            raise ConfigError("kv-heads: latent attention has no KV heads; vary another key, or use multi-head")
        return attention.replace(kv_heads=count)

    return map_attention(config, edit)


def set_ffn_width(config: Config, value: str) -> Config:
    """Set the hidden width of the FFNs."""
    return map_ffns(config, lambda ffn: ffn.replace(hidden=_parse_count("ffn", value)))


def set_depth(config: Config, value: str) -> Config:
    return map_stacks(config, lambda stack: stack.replace(layers=_parse_count("depth", value)))


def set_norm(config: Config, value: str) -> Config:
    return map_stacks(config, lambda stack: stack.replace(norm=_parse_choice("norm", value, NORMS)))


def set_norm_placement(config: Config, value: str) -> Config:
    return map_stacks(config, lambda stack: stack.replace(placement=_parse_choice("placement", value, PLACEMENTS)))


def set_position(config: Config, value: str) -> Config:
    """Set the position method, and remove all others from embeddings and attention."""
    embedding_positions = {
        "sinusoidal": SinusoidalPosition(),
        "learned": LearnedPosition(length=config.context or 1024),
    }
    _parse_choice("position", value, dict.fromkeys((*ATTENTION_POSITIONS, *embedding_positions, "none")))
    position = embedding_positions.get(value, NoPosition())

    def edit_attention(attention: Attention) -> Attention:
        if isinstance(attention, MultiHead):
            return attention.replace(position=ATTENTION_POSITIONS.get(value, NoPosition()))
        if "kv_rank" in type(attention).model_fields:
            raise ConfigError("position: latent attention always uses RoPE; vary a model with multi-head attention")
        return attention  # cross-attention has no positions

    edited = map_stacks(config, lambda stack: stack.replace(embedding=stack.embedding.replace(position=position)))
    return map_attention(edited, edit_attention)


def set_activation(config: Config, value: str) -> Config:
    """Set the activation. swiglu, geglu and reglu have three matrices, others two; the width keeps the size equal."""
    d_model = config.d_model

    def edit(ffn: Any) -> Any:
        width, is_gated = ffn.hidden_dim(d_model), not isinstance(ffn, Mlp)
        if value in GATED_ACTIVATIONS:
            return Gated(
                activation=GATED_ACTIVATIONS[value],
                hidden=width if is_gated else max(1, round(width * 2 / 3)),
                bias=ffn.bias,
                dropout=ffn.dropout,
            )
        return Mlp(
            activation=value,
            hidden=round(width * 3 / 2) if is_gated else width,
            bias=ffn.bias,
            dropout=ffn.dropout,
        )

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
    """Apply one shorthand to a config."""
    try:
        return SHORTHANDS[name](config, str(value))
    except ValidationError as error:
        raise build_config_error(error, {}, num_tags=0) from None
