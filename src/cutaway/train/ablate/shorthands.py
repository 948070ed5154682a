"""Shorthands for common variations (norm, position, heads, …). Each changes every stack of a config."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from pydantic import ValidationError

import cutaway.config as cfg
from cutaway.config import Config, DenseFFN
from cutaway.config.node import build_config_error
from cutaway.errors import ConfigError

ValueT = TypeVar("ValueT")
AttentionEdit = Callable[[cfg.MultiHeadBase | cfg.LatentAttention], cfg.MultiHeadBase | cfg.LatentAttention]

NORMS = {"layernorm": cfg.LayerNorm(), "rmsnorm": cfg.RMSNorm(), "none": cfg.NoNorm()}
PLACEMENTS = {
    "pre": cfg.PreNorm(),
    "post": cfg.PostNorm(),
    "sandwich": cfg.SandwichNorm(),
    "output": cfg.OutputNorm(),
    "parallel": cfg.ParallelResidual(),
}
ATTENTION_POSITIONS = {"rope": cfg.Rope(), "alibi": cfg.Alibi(), "relative-bias": cfg.RelativeBias()}
GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""Activation of the gate, by the name of a gated FFN. Gated FFNs have three matrices."""


def _map_stacks(config: Config, edit: Callable[[cfg.Stack], cfg.Stack]) -> Config:
    return config.replace(**{name: edit(stack) for name, stack in config.stacks.items()})


def _map_attention(config: Config, edit: AttentionEdit) -> Config:
    """Return the config with every self-attention and cross-attention changed by `edit`."""
    return _map_stacks(config, lambda stack: stack.edit_layers(attention=edit))


def map_ffns(config: Config, edit: Callable[[DenseFFN], DenseFFN]) -> Config:
    """Return the config with every dense FFN, and the experts of every mixture of experts, changed by `edit`."""
    return _map_stacks(config, lambda stack: stack.edit_layers(ffn=edit))


def _parse_count(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{name}={value} is not a positive integer; use integers, as in {name}=1,2,4")
    return int(value)


def _parse_choice(name: str, value: str, table: Mapping[str, ValueT]) -> ValueT:
    if value not in table:
        raise ConfigError(f"{name}={value} is unknown; use one of {', '.join(table)}")
    return table[value]


def _set_heads(config: Config, value: str) -> Config:
    """Set the number of query heads. In MHA, set the number of key-value heads to the same value."""
    count = _parse_count("heads", value)

    def edit(attention: cfg.MultiHeadBase | cfg.LatentAttention) -> cfg.MultiHeadBase | cfg.LatentAttention:
        is_mha = isinstance(attention, cfg.MultiHeadBase) and attention.kv_heads == attention.heads
        return attention.replace(heads=count, kv_heads=count) if is_mha else attention.replace(heads=count)

    return _map_attention(config, edit)


def _set_kv_heads(config: Config, value: str) -> Config:
    count = _parse_count("kv-heads", value)

    def edit(attention: cfg.MultiHeadBase | cfg.LatentAttention) -> cfg.MultiHeadBase:
        if not isinstance(attention, cfg.MultiHeadBase):
            raise ConfigError("kv-heads: latent attention has no KV heads; vary another key, or use multi-head")
        return attention.replace(kv_heads=count)

    return _map_attention(config, edit)


def _set_ffn_width(config: Config, value: str) -> Config:
    """Set the hidden width of the FFNs."""
    return map_ffns(config, lambda ffn: ffn.replace(hidden=_parse_count("ffn", value)))


def _set_depth(config: Config, value: str) -> Config:
    return _map_stacks(config, lambda stack: stack.replace(layers=_parse_count("depth", value)))


def _set_norm(config: Config, value: str) -> Config:
    return _map_stacks(config, lambda stack: stack.replace(norm=_parse_choice("norm", value, NORMS)))


def _set_norm_placement(config: Config, value: str) -> Config:
    return _map_stacks(config, lambda stack: stack.replace(placement=_parse_choice("placement", value, PLACEMENTS)))


def _set_position(config: Config, value: str) -> Config:
    """Set the position method, and remove all other position methods from embeddings and attention."""
    learned = cfg.LearnedPosition(length=config.context or 1024)
    embedding_positions = {"sinusoidal": cfg.SinusoidalPosition(), "learned": learned}
    _parse_choice("position", value, dict.fromkeys((*ATTENTION_POSITIONS, *embedding_positions, "none")))
    position = embedding_positions.get(value, cfg.NoPosition())

    def edit(attention: cfg.MultiHeadBase | cfg.LatentAttention) -> cfg.MultiHeadBase | cfg.LatentAttention:
        if isinstance(attention, cfg.LatentAttention):
            raise ConfigError("position: latent attention always uses RoPE; vary a model with multi-head attention")
        if isinstance(attention, cfg.MultiHead):
            return attention.replace(position=ATTENTION_POSITIONS.get(value, cfg.NoPosition()))
        return attention  # cross-attention has no positions

    edited = _map_stacks(config, lambda stack: stack.replace(embedding=stack.embedding.replace(position=position)))
    return _map_attention(edited, edit)


def _set_activation(config: Config, value: str) -> Config:
    """Set the activation of all FFNs.

    swiglu, geglu and reglu need three matrices, other activations two. When the number of matrices changes, the width
    is changed so that the number of parameters stays about the same.
    """

    def edit(ffn: DenseFFN) -> DenseFFN:
        width, is_gated = ffn.hidden_dim(config.d_model), not isinstance(ffn, cfg.Mlp)
        kwargs = {"bias": ffn.bias, "dropout": ffn.dropout}
        if value in GATED_ACTIVATIONS:
            hidden = width if is_gated else max(1, round(width * 2 / 3))
            return cfg.Gated.model_validate({"activation": GATED_ACTIVATIONS[value], "hidden": hidden, **kwargs})
        hidden = round(width * 3 / 2) if is_gated else width
        return cfg.Mlp.model_validate({"activation": value, "hidden": hidden, **kwargs})

    return map_ffns(config, edit)


SHORTHANDS: dict[str, Callable[[Config, str], Config]] = {
    "activation": _set_activation,
    "depth": _set_depth,
    "ffn": _set_ffn_width,
    "heads": _set_heads,
    "kv-heads": _set_kv_heads,
    "norm": _set_norm,
    "placement": _set_norm_placement,
    "position": _set_position,
}


def apply_shorthand(config: Config, name: str, value: str) -> Config:
    """Return the config with a shorthand applied, e.g. depth=4. Raises ConfigError if the value is invalid."""
    try:
        return SHORTHANDS[name](config, value)
    except ValidationError as error:
        raise build_config_error(error, {}, num_tags=0) from None
