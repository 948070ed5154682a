"""Changed values of config fields: for each field that affects the logits, a value that must change them."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import count_parameters
from cutaway.check.module_state import MAX_PERTURBED_PARAMS

T = TypeVar("T")
Node = dict[str, Any]
"""A config node as JSON."""
Path = tuple[str | int, ...]
"""Keys and indices from the root to a field."""
TransformersConfig = Any
"""A PreTrainedConfig."""
_LARGE_EPS = 0.5
"""An eps large enough to change the output of any norm."""


def _pick_other(value: object, *choices: T) -> T:
    """The first choice that differs from `value`."""
    return next(choice for choice in choices if choice != value)


def _scale_number(value: object, factor: float) -> float | None:
    """`value` times `factor`; None if `value` is not a number."""
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value * factor


def _random_state_dict(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """A random state dict in which every parameter affects the logits. Tied parameters stay tied.

    Weights have the scale of a usual initialization, biases are not 0, and gains are not 1.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[int, Tensor] = {}
    state = {}
    trainable = {id(param) for param in module.parameters() if param.requires_grad}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in trainable:
            state[name] = tensor.detach()
            continue
        if id(tensor) not in drawn:
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim < 2:
                value = tensor.detach().float().cpu() + 0.3 * noise
            elif any(part in name.lower() for part in ("emb", "wte", "wpe", "shared.", "relative", "table")):
                value = 0.7 * noise
            else:
                value = noise * 1.2 / math.sqrt(min(tensor.shape[-2:]))
            drawn[id(tensor)] = value.to(tensor.device, tensor.dtype)
        state[name] = drawn[id(tensor)]
    return state


def variant_state_dict(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights for config variants: those of `_random_state_dict` if the model is small, otherwise the model's own."""
    if count_parameters(module) <= MAX_PERTURBED_PARAMS:
        return _random_state_dict(module, seed)
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def validate_same_shapes(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the module's tensors have other shapes than those in `state_dict`.

    A config field that changes tensor shapes needs no further test, because the model cannot ignore it.
    """
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in state_dict.items()}:
        raise ValueError("the changed value gives tensors of other shapes, so the field cannot be ignored")


def iter_config_changes(node: Node | list[Any], path: Path, d_model: int) -> Iterator[tuple[Path, object]]:
    """Yield (path, changed value) for each field under `node` that affects the logits. `path` leads to `node`."""
    ineffective = _ineffective_keys(node, d_model) if isinstance(node, dict) else ()
    for key, value in enumerate(node) if isinstance(node, list) else node.items():
        if key in ineffective:
            continue
        if isinstance(value, dict | list):
            yield from iter_config_changes(value, (*path, key), d_model)
        elif isinstance(node, dict) and (changed := _changed_cutaway_value(node, str(key), value)) is not None:
            yield (*path, key), changed


def _ineffective_keys(node: Node, d_model: int) -> tuple[str, ...]:
    """Keys of a config node that the check does not vary, because they need not affect the logits.

    If the window is 1, the softmax has one key, so the scores do not matter. If a head has at most 4 dimensions, its
    positions hardly matter. In all other nodes, these are the keys of initialization and RoPE scaling.
    """
    if node.get("window") == 1:
        return "position", "scale", "softcap", "qk_norm"
    if "heads" in node and (node.get("d_rope") or node.get("d_head") or d_model // node["heads"]) <= 4:
        return ("position",)
    return "init", "scaling"


def _changed_cutaway_value(node: Node, key: str, value: Any) -> object:
    """Another value for `node[key]` that must change the logits; None if the field need not affect them."""
    kind = node.get("kind")
    changed: dict[str, object] = {
        "eps": _pick_other(value, _LARGE_EPS, 1.0),
        "activation": _pick_other(value, "tanh", "relu"),
        "residual_scale": _scale_number(value, 3),
        "skip_scale": _scale_number(value, 3),
        "unit_offset": not value,
        "limit": 0.1,
        "alpha": _scale_number(value, 3),
    }
    if kind in ("multi-head", "cross") or "kv_rank" in node:
        has_one_dim = (node.get("d_head") or node.get("d_rope")) == 1
        changed = {
            "scale": 0.7 if value is None else _scale_number(value, 2),
            "softcap": _pick_other(value, 0.5, 1.0),
            "clip_qkv": _pick_other(value, 0.1, 0.2),
            "window": _pick_other(value, 2, 3),
        }
        return None if has_one_dim else changed.get(key)
    if kind == "rope":
        narrow = node["rotary_dim"] is not None and node["rotary_dim"] <= 4
        changed = {"theta": _scale_number(value, 0.01), "layout": _pick_other(value, "half", "interleaved")}
        return None if narrow or node["scaling"]["kind"] != "none" else changed.get(key)
    if kind == "alibi":
        changed = dict.fromkeys(("max_bias", "scale"), _scale_number(value, 0.3))
    elif kind == "sinusoidal" and node["table_length"] is None:
        changed = {"base": _scale_number(value, 0.01), "layout": _pick_other(value, "interleaved", "halves")}
    elif kind == "lm":
        changed = {"scale": _scale_number(value, 2), "softcap": _pick_other(value, 0.5, 1.0)}
    elif "top_k" in node:
        changed = {"scale": _scale_number(value, 2)}
    return changed.get(key)


def find_config_values(config: TransformersConfig, key: str) -> list[tuple[str, TransformersConfig, object]]:
    """Return the triple (path, config that has the field, value) of the field `key`; no triple if it is not set.

    If the value is itself a config, return one triple for each field of that config.
    """
    value: Any = getattr(config, key, None)
    if hasattr(value, "to_dict"):
        return [(f"{key}.{name}", value, item) for name, item in value.to_dict().items() if item is not None]
    return [] if value is None else [(key, config, value)]  # an optional field may be missing


def changed_transformers_value(config: TransformersConfig, key: str, value: object) -> object:
    """Another value for the config field `key` that must change the logits; None if it need not affect them."""
    score_fields = ("rope_parameters", "attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier")
    if getattr(config, "sliding_window", None) == 1 and key in score_fields:
        return None  # softmax over one key ignores the scores
    if key == "rope_parameters" and isinstance(value, dict):
        return None if getattr(config, "alibi", False) else _changed_rope_parameters(config, value)
    if key == "sliding_window":
        types = getattr(config, "layer_types", None)
        slides = "sliding_attention" in types if types else getattr(config, "use_sliding_window", True)
        return _pick_other(value, 2, 3) if slides and isinstance(value, int) else None
    table: dict[str, object] = {
        "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon": _LARGE_EPS,
        "hidden_act activation_function hidden_activation": _pick_other(value, "tanh", "relu"),
        "attn_logit_softcapping final_logit_softcapping": _pick_other(value, 0.5, 1.0),
        "logit_scale residual_multiplier attention_multiplier logits_scaling": _scale_number(value, 3),
        "routed_scaling_factor embedding_multiplier swiglu_alpha softmax_scale": _scale_number(value, 3),
        "query_pre_attn_scalar": _scale_number(value, 9),
        "scale_attn_weights use_parallel_residual scale_embedding": not value,
        "clip_qkv swiglu_limit": _pick_other(value, 0.1, 0.2),
        "alibi_bias_max": _scale_number(value, 4) if getattr(config, "alibi", False) else None,
    }
    return next((changed for keys, changed in table.items() if key in keys.split()), None)


def _changed_rope_parameters(config: TransformersConfig, value: Node) -> Node | None:
    """RoPE parameters with another theta in every layer type without RoPE scaling; None if there is no such layer type,
    or if at most 4 dimensions are rotated."""
    head_dim = getattr(config, "head_dim", None) or getattr(config, "qk_rope_head_dim", None)
    head_dim = head_dim or config.hidden_size // getattr(config, "num_attention_heads", 1)
    changed = deepcopy(value)
    for rope in (changed, *(nested for nested in changed.values() if isinstance(nested, dict))):
        unscaled = rope.get("rope_type", "default") == "default"
        if "rope_theta" in rope and unscaled and head_dim * rope.get("partial_rotary_factor", 1.0) > 4:
            rope["rope_theta"] = rope["rope_theta"] * 0.01
    return changed if changed != value else None
