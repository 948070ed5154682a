"""adapter_config.json of PEFT: conversion from and to a LoRA configuration, and checks of unsupported fields."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cutaway.config.lora import LoRA
from cutaway.errors import ConfigError
from cutaway.model.adapters.adapter_methods import read_lora_config

MERGE_ADVICE = "merge it with PEFT (merge_and_unload), save the merged model, and pass that"
_UNSUPPORTED_FIELDS = {
    "layer_replication": "it repeats layers of the base model",
    "lora_bias": "it adds a bias to B",
    "target_parameters": "its targets are parameters (experts as one tensor) instead of modules; here, each expert has"
    " an adapter of its own (targets 'experts.*')",
    "trainable_token_indices": "it replaces rows of the embedding",
    "alora_invocation_tokens": "it is applied only after certain tokens (activated LoRA)",
    "use_qalora": "it averages groups of inputs (QA-LoRA)",
    "use_bdlora": "its matrices are block diagonal",
    "arrow_config": "it selects between several adapters",
    "kasa_config": "it changes the weights of the base model",
    "velora_config": "it compresses activations",
    "monteclora_config": "it samples its weights",
    "ensure_weight_tying": "it adapts the output matrix together with the embedding",
}
"""Fields of adapter_config.json that change what the adapter computes, and that are not supported."""
_INIT_THAT_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of init_lora_weights with which training starts from other base weights than those of the base model."""

MAX_PATTERN_LENGTH, MAX_QUANTIFIERS = 500, 3
"""Limits of a regular expression in alpha_pattern: an adapter may come from anyone, and backtracking is exponential."""
_QUANTIFIER, _REPEATED_GROUP = re.compile(r"(?<!\\)[*+{]"), re.compile(r"\)[*+{]")


def check_peft_config(peft_config: Mapping[str, Any]) -> None:
    """Raise ConfigError if an adapter is not LoRA, or if it has a field that is not supported."""
    kind = peft_config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"adapter_config.json: peft_type is {kind!r}; only LORA (with DoRA, rsLoRA) is supported")
    if peft_config.get("bias", "none") != "none":
        raise ConfigError(
            f"adapter_config.json: bias is '{peft_config['bias']}', which changes biases of the base model; only 'none'"
            " is supported"
        )
    for field, reason in _UNSUPPORTED_FIELDS.items():
        if peft_config.get(field):
            raise ConfigError(f"adapter_config.json: {field} is not supported, because {reason}; {MERGE_ADVICE}")
    init = peft_config.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(_INIT_THAT_CHANGES_THE_BASE):
        raise ConfigError(
            f"adapter_config.json: init_lora_weights is '{init}', with which the adapter was trained on changed weights"
            " of the base model; save it again with PEFT's path_initial_model_for_weight_conversion, or merge it"
        )


def _pattern_value(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Value of PEFT's alpha_pattern for a module: keys are regular expressions for the end of the name."""
    for pattern, value in (patterns or {}).items():
        quantifiers = _QUANTIFIER.findall(pattern)
        if len(pattern) > MAX_PATTERN_LENGTH or len(quantifiers) > MAX_QUANTIFIERS or _REPEATED_GROUP.search(pattern):
            raise ConfigError(
                f"adapter_config.json: alpha_pattern has '{pattern[:60]}', whose search could take very long; use at"
                f" most {MAX_PATTERN_LENGTH} characters and {MAX_QUANTIFIERS} of * + {{, and no repeated groups"
            )
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ConfigError(
                f"adapter_config.json: alpha_pattern has '{pattern}', which is not a regular expression: {error}"
            ) from None
    return default


def peft_scaling(peft_config: Mapping[str, Any], module: str, tensors: Mapping[str, Tensor]) -> float:
    rank = len(tensors["lora_A.weight"] if "lora_A.weight" in tensors else tensors["lora_embedding_A"])
    alpha = _pattern_value(peft_config.get("alpha_pattern"), module, peft_config.get("lora_alpha", 8))
    if not isinstance(alpha, int | float):
        raise ConfigError(f"adapter_config.json: lora_alpha of '{module}' is {alpha!r}; it must be a number")
    return alpha / (math.sqrt(rank) if peft_config.get("use_rslora") else rank)


def to_lora_config(peft_config: Mapping[str, Any], ranks: Mapping[str, int]) -> LoRA:
    """LoRA configuration whose targets are the sites of an adapter."""
    rank = peft_config.get("r", 8)
    return read_lora_config(
        {
            "rank": rank,
            "alpha": peft_config.get("lora_alpha", 8),
            "dropout": peft_config.get("lora_dropout", 0.0),
            "targets": tuple(ranks),
            "use_dora": bool(peft_config.get("use_dora")),
            "use_rslora": bool(peft_config.get("use_rslora")),
            "rank_pattern": {site: each for site, each in ranks.items() if each != rank},
        }
    )


def to_peft_config(
    config: LoRA, modules: list[str], all_modules: list[str], ranks: Mapping[str, int], scalings: Mapping[str, float]
) -> dict[str, Any]:
    """Contents of adapter_config.json."""
    leaves = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    is_complete = {
        leaf: all(each in modules for each in all_modules if each.rpartition(".")[2] == leaf) for leaf in leaves
    }
    targets = [leaf for leaf in leaves if is_complete[leaf]]
    targets += [module for module in modules if not is_complete[module.rpartition(".")[2]]]
    rank = config.rank

    def alpha_of(module: str) -> float:
        factor = math.sqrt(ranks[module]) if config.use_rslora else ranks[module]
        return round(scalings[module] * factor, 9)

    alpha = 2.0 * rank if config.alpha is None else config.alpha
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
        "rank_pattern": {module: ranks[module] for module in modules if ranks[module] != rank},
        "alpha_pattern": {module: alpha_of(module) for module in modules if alpha_of(module) != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
    }
