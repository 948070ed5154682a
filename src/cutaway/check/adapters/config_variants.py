"""Other values for settings: for each that is known to act, one so different that the logits must show it."""

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

LARGE_EPS = 0.5
"""An epsilon that no norm fails to notice."""


def pick_other(value: Any, *choices: Any) -> Any:
    """The first choice that is not the value."""
    return next(each for each in choices if each != value)


def scale_number(value: Any, factor: float) -> Any:
    """A number, so many times; none where there is no number."""
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value * factor


def random_state_dict(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """A state for this module in which every part is alive: weights of usual size, no bias of zeros, no gain of one.
    Names of one tensor share one."""
    draw = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    state = {}
    trained = {id(each) for each in module.parameters() if each.requires_grad}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in trained:
            state[name] = tensor.detach()
            continue
        if id(tensor) not in made:
            noise = torch.randn(tensor.shape, generator=draw)
            if tensor.ndim < 2:
                value = tensor.detach().float().cpu() + 0.3 * noise
            elif any(word in name.lower() for word in ("emb", "wte", "wpe", "shared.", "relative", "table")):
                value = 0.7 * noise
            else:
                value = noise * 1.2 / math.sqrt(min(tensor.shape[-2:]))
            made[id(tensor)] = value.to(tensor.device, tensor.dtype)
        state[name] = made[id(tensor)]
    return state


def validate_same_shapes(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Refuse a setting that is seen in the shapes already."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in state_dict.items()}:
        raise ValueError("it makes tensors of other shapes, so that it cannot be overlooked")


def iter_config_changes(node: Any, path: tuple[Any, ...], d_model: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The paths of settings, each with another value."""
    hidden = _ineffective_keys(node, d_model) if isinstance(node, dict) else ()
    for key, value in enumerate(node) if isinstance(node, list) else node.items():
        if key in hidden:
            continue
        if isinstance(value, dict | list):
            yield from iter_config_changes(value, (*path, key), d_model)
        elif isinstance(node, dict) and (other := _changed_cutaway_value(node, str(key), value)) is not None:
            yield (*path, key), other


def _ineffective_keys(node: dict[str, Any], d_model: int) -> tuple[str, ...]:
    """Keys whose settings need not be seen: scores where a token sees only itself, angles where few dimensions turn."""
    if node.get("window") == 1:
        return "position", "scale", "softcap", "qk_norm"
    if "heads" in node and (node.get("d_rope") or node.get("d_head") or d_model // node["heads"]) <= 4:
        return ("position",)
    return "init", "scaling"


def _changed_cutaway_value(node: dict[str, Any], key: str, value: Any) -> Any:
    """Another value for a setting that must then be seen; none where it need not be."""
    kind = node.get("kind")
    if kind in ("multi-head", "cross") or "kv_rank" in node:
        width = node.get("d_head") or node.get("d_rope")
        return {
            "scale": 0.7 if value is None else value * 2,
            "softcap": pick_other(value, 0.5, 1.0),
            "clip_qkv": pick_other(value, 0.1, 0.2),
            "window": pick_other(value, 2, 3),
        }.get(key) if width != 1 and key in node else None  # fmt: skip
    if kind == "rope":
        narrow = node["rotary_dim"] is not None and node["rotary_dim"] <= 4
        wanted = {"theta": scale_number(value, 0.01), "layout": pick_other(value, "half", "interleaved")}
        return None if narrow or node["scaling"]["kind"] != "none" else wanted.get(key)
    if kind == "alibi":
        return scale_number(value, 0.3) if key in ("max_bias", "scale") else None
    if kind == "sinusoidal" and node["table_length"] is None:
        return {"base": scale_number(value, 0.01), "layout": pick_other(value, "interleaved", "halves")}.get(key)
    if kind == "lm":
        return {"scale": scale_number(value, 2), "softcap": pick_other(value, 0.5, 1.0)}.get(key)
    if "top_k" in node:
        return scale_number(value, 2) if key == "scale" else None
    return {
        "eps": LARGE_EPS if value != LARGE_EPS else 1.0,
        "activation": pick_other(value, "tanh", "relu"),
        "residual_scale": scale_number(value, 3),
        "skip_scale": scale_number(value, 3),
        "unit_offset": not value,
        "limit": 0.1,
        "alpha": scale_number(value, 3),
    }.get(key)


def find_config_values(config: Any, key: str) -> list[tuple[str, Any, Any]]:
    """A setting's path, the configuration that holds it, and its value; of one that holds others, theirs."""
    value: Any = getattr(config, key, None)
    if hasattr(value, "to_dict"):
        return [(f"{key}.{name}", value, each) for name, each in value.to_dict().items() if each is not None]
    return [] if value is None else [(key, config, value)]  # what is not asked for need not be there


def changed_transformers_value(config: Any, key: str, value: Any) -> Any:
    """Another value for a setting that must then be seen; none where it need not be."""
    alone = getattr(config, "sliding_window", None) == 1  # a token that sees only itself has no use for scores
    if alone and key in ("rope_parameters", "attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"):
        return None
    if key == "rope_parameters" and isinstance(value, dict):
        return None if getattr(config, "alibi", False) else _changed_rope_parameters(config, value)
    if key == "sliding_window":
        types = getattr(config, "layer_types", None)
        slides = "sliding_attention" in types if types else getattr(config, "use_sliding_window", True)
        return pick_other(value, 2, 3) if slides and isinstance(value, int) else None
    table = {
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"): LARGE_EPS,
        ("hidden_act", "activation_function", "hidden_activation"): pick_other(value, "tanh", "relu"),
        ("attn_logit_softcapping", "final_logit_softcapping"): pick_other(value, 0.5, 1.0),
        ("logit_scale", "residual_multiplier", "attention_multiplier", "logits_scaling"): scale_number(value, 3),
        ("routed_scaling_factor", "embedding_multiplier"): scale_number(value, 3),
        ("query_pre_attn_scalar",): scale_number(value, 9),
        ("scale_attn_weights", "use_parallel_residual", "scale_embedding"): not value,
        ("clip_qkv", "swiglu_limit"): pick_other(value, 0.1, 0.2),
        ("swiglu_alpha", "softmax_scale"): scale_number(value, 3),
        ("alibi_bias_max",): scale_number(value, 4) if getattr(config, "alibi", False) else None,
    }
    return next((other for keys, other in table.items() if key in keys), None)


def _changed_rope_parameters(config: Any, value: dict[str, Any]) -> Any:
    """RoPE with another base, for all kinds of layers; none where so few dimensions turn that it need not be seen."""
    width = getattr(config, "head_dim", None) or getattr(config, "qk_rope_head_dim", None)
    width = width or config.hidden_size // getattr(config, "num_attention_heads", 1)
    other = deepcopy(value)
    for each in (other, *(inner for inner in other.values() if isinstance(inner, dict))):
        plain = each.get("rope_type", "default") == "default"
        if "rope_theta" in each and plain and width * each.get("partial_rotary_factor", 1.0) > 4:
            each["rope_theta"] = each["rope_theta"] * 0.01
    return other if other != value else None
