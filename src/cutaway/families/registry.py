"""Family registry: families by name, config.json to Config, and the family that can represent a Config."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from cutaway.config import Config
from cutaway.errors import ConfigError
from cutaway.families import tables
from cutaway.families.family import Family
from cutaway.families.head_classes import decoder_head_classes

_PREFERRED_FAMILIES = ("bert", "gpt2", "gptj", "llama", "mistral", "mixtral", "qwen2", "qwen3", "roberta", "t5")
"""Families that most tools support. They are tried first if several families can represent a model."""


_UNSUPPORTED_FAMILIES = {
    "apertus": "its activation xIELU has trained parameters",
    "bamba": "it has state-space layers (Mamba-2)",
    "deberta": "it has other scores and positions than DeBERTa-v2; DeBERTa-v2 and v3 are the family 'deberta-v2'",
    "deepseek_v32": "its sparse attention selects keys with a lightning indexer",
    "falcon_h1": "it has state-space layers (Mamba-2)",
    "granitemoehybrid": "it has state-space layers (Mamba-2)",
    "hunyuan_v1_dense": "it applies QK-norm after RoPE",
    "hunyuan_v1_moe": "it applies QK-norm after RoPE",
    "jamba": "it has state-space layers (Mamba)",
    "lfm2": "it has convolution layers",
    "llama4": "its attention scale depends on the position",
    "mamba": "it is a state-space model, not a Transformer",
    "mamba2": "it is a state-space model, not a Transformer",
    "ministral3": "its attention scale depends on the position",
    "nemotron": "its LayerNorm multiplies by 1 + gain",
    "nemotron_h": "it has state-space layers (Mamba-2)",
    "phimoe": "its router is SparseMixer",
    "qwen3_5": "it has linear attention layers (gated DeltaNet)",
    "qwen3_next": "it has linear attention layers (gated DeltaNet)",
}
"""`model_type` of well-known models that no family can represent → the reason."""


@cache
def families() -> dict[str, Family]:
    """All families by name: the `FAMILY` of each module in `tables/`."""
    modules = [import_module(f"{tables.__name__}.{module.name}") for module in iter_modules(tables.__path__)]
    loaded = [_add_decoder_head_classes(module.FAMILY) for module in modules]
    return {family.name: family for family in sorted(loaded, key=lambda family: family.name)}


def _add_decoder_head_classes(family: Family) -> Family:
    if family.template["form"] != "decoder":
        return family
    return replace(family, head_classes=decoder_head_classes(family.name, family.architecture))


def resolve_family(hf_config: Mapping[str, object]) -> Family:
    """Find the family of a config.json by `model_type`, or by `architectures` if that is absent."""
    name = hf_config.get("model_type")
    known = families()
    if name is None:
        classes = hf_config.get("architectures") or []
        by_architecture = {family.architecture: family for family in known.values()}
        for class_name in classes if isinstance(classes, list) else []:
            if isinstance(class_name, str) and class_name in by_architecture:
                return by_architecture[class_name]
        raise ConfigError(f"config.json has no 'model_type', which names the family; add one of: {', '.join(known)}")
    if isinstance(name, str) and name in _UNSUPPORTED_FAMILIES:
        raise ConfigError(f"model_type '{name}' is not supported: {_UNSUPPORTED_FAMILIES[name]}; use another model")
    if not isinstance(name, str) or name not in known:
        matches = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean '{matches[0]}'?" if matches else f"use one of: {', '.join(known)}"
        raise ConfigError(f"model_type {name!r} is not a supported family; {hint}")
    return known[name]


def config_from_hf(hf_config: Mapping[str, object]) -> Config:
    """Convert a transformers config.json to a Config; `quantization_config` is ignored, as it concerns the weights."""
    unquantized = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    return resolve_family(hf_config).config_from_hf(unquantized)[0]


def find_family(config: Config, name: str | None = None) -> tuple[Family, dict[str, object]]:
    """Return (family, contents of config.json) of a Config: the named family, or the first that can represent it."""
    known = families()
    if name is not None:
        if name not in known:
            raise ConfigError(f"'{name}' is not a supported family; use one of: {', '.join(known)}")
        return known[name], known[name].config_to_hf(config)
    errors = []
    for family in sorted(known.values(), key=lambda family: family.name not in _PREFERRED_FAMILIES):
        try:
            return family, family.config_to_hf(config)
        except ConfigError as error:
            errors.append(str(error))
    nearest = min((text for text in errors if "of form" not in text), key=len, default=errors[0])
    hint = "save it with family='cutaway'"
    raise ConfigError(f"no family can represent this model, so transformers cannot open it; {hint}. {nearest}")
