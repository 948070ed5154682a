"""The cutaway `Config` of a checked model: a cutaway model, or a transformers model of a supported family."""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from cutaway.check.checked_model import CheckedModel
from cutaway.config import Config
from cutaway.errors import CutawayError
from cutaway.families import config_from_hf
from cutaway.model import Transformer

_CONFIG_ATTRIBUTES = ("config", "cfg", "args", "params", "hparams", "model_args")
_THETA_FIELDS = ("rope_theta", "rope_base", "rotary_base", "rotary_emb_base", "rope_freq_base")
_TIE_FIELDS = (
    "tie_word_embeddings",
    "tie_embeddings",
    "tied_embeddings",
    "tie_weights",
    "weight_tying",
    "share_embeddings",
    "share_input_output_embeddings",
)
_SCALING_FIELDS = (
    "rope_scaling",
    "rope_adjustments",
    "rope_freq",
    "use_scaled_rope",
    "rope_scaling_factor",
    "rope_condense_ratio",
)
_FURTHER_FIELDS = ("rotary_scaling_factor", "rotary_base_local", "rope_local_base_freq", "rope_theta_local")
"""A linear scaling, which is 1 if there is none, or the theta of other layers."""
_SCALING_FLAG = re.compile("(yarn|ntk|scaled).*(rope|rotary)|(rope|rotary).*(yarn|ntk|scal)")
"""Names of Booleans that enable a scaling, such as `use_yarn_rope`."""


def get_config(model: CheckedModel) -> Config | None:
    """The cutaway configuration of a checked model; None if it is unknown."""
    return None if model.module is None else get_module_config(model.module)


def get_module_config(module: nn.Module) -> Config | None:
    """The cutaway configuration of a module, converted from transformers if necessary; None if it is unknown."""
    if isinstance(module, Transformer):
        return module.config
    hf_config: Any = getattr(module, "config", None)
    if not hasattr(hf_config, "to_dict"):
        return None
    try:
        return config_from_hf(hf_config.to_dict())
    except (CutawayError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_declared_theta(module: nn.Module) -> float | None:
    """The RoPE base that a module of another library states in its configuration; None if it states none or a scaling.

    The configuration is an attribute such as `config` or `args`: an object or a mapping.
    """
    for attribute in _CONFIG_ATTRIBUTES:
        config = getattr(module, attribute, None)
        values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        if _declares_scaling(values):
            return None
        theta = next((values[name] for name in _THETA_FIELDS if isinstance(values.get(name), int | float)), None)
        if theta:
            return float(theta)
    return None


def _declares_scaling(values: Mapping[str, Any]) -> bool:
    """Whether a configuration has a RoPE scaling, or layers with another theta."""
    if any(values.get(name) for name in _SCALING_FIELDS):
        return True
    if any(values.get(name) not in (None, False, 1) for name in _FURTHER_FIELDS):
        return True
    return any(value is True and _SCALING_FLAG.search(str(name).lower()) for name, value in values.items())


def find_declared_tie(module: nn.Module) -> bool | None:
    """Whether a module of another library states in its configuration that the embeddings are tied; None if unknown.

    Configurations of transformers are not read: their default is True, whatever the module does.
    """
    for attribute in _CONFIG_ATTRIBUTES:
        config = getattr(module, attribute, None)
        values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        if hasattr(config, "to_dict"):
            continue
        for name in _TIE_FIELDS:
            if isinstance(values.get(name), bool):
                return bool(values[name])
    return None


def self_attention_configs(config: Config) -> list[Any]:
    """Self-attention configurations in order of computation: of the decoder, or of an encoder-only model's encoder."""
    stack = config.stacks.get("decoder") or config.stacks["encoder"]
    return [block.attention for block in stack.blocks]


def attention_configs(config: Config) -> list[Any]:
    """All attention configurations in order of computation: encoder, then self- and cross-attention per block."""
    attentions: list[Any] = []
    for name in ("encoder", "decoder"):
        for block in config.stacks[name].blocks if name in config.stacks else ():
            attentions += [block.attention, *([block.cross] if hasattr(block, "cross") else [])]
    return attentions


def set_attention_properties(checked: CheckedModel, config: Config) -> None:
    """Set the position and window properties of `checked` from the configuration."""
    stack = config.stacks.get("decoder") or config.stacks["encoder"]
    layers = self_attention_configs(config)
    windows = {getattr(layer, "window", None) for layer in layers}
    checked.windows = tuple(sorted(window for window in windows if window is not None))
    checked.window = windows.pop() if len(windows) == 1 else None
    has_absolute = stack.embedding.position.kind != "none"
    attention_kinds = {layer.position.kind for layer in layers} - {"none"}
    checked.has_positions = has_absolute or bool(attention_kinds)
    checked.relative_positions = bool(attention_kinds) and not has_absolute
