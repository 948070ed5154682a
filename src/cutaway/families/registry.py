"""Every family by name, and the road from a config.json to a configuration."""

import difflib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from cutaway.config import Config
from cutaway.errors import ConfigError
from cutaway.families import tables
from cutaway.families.family import Family

PREFERRED_FAMILIES = ("bert", "gpt2", "llama", "t5")
"""Families that most tools open: tried before the others where several could describe a model."""


@cache
def families() -> dict[str, Family]:
    """All families. A module in `tables/` is one: its `FAMILY`."""
    found = [import_module(f"{tables.__name__}.{module.name}").FAMILY for module in iter_modules(tables.__path__)]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


def resolve_family(hf_config: Mapping[str, Any]) -> Family:
    """The family that a config.json belongs to."""
    name = hf_config.get("model_type")
    known = families()
    if name is None:
        classes = hf_config.get("architectures") or []
        names = {family.architecture: family for family in known.values()}
        for one in classes if isinstance(classes, list) else []:
            if isinstance(one, str) and one in names:
                return names[one]
        raise ConfigError(
            "config.json has no 'model_type', so it cannot be told whose model this is; add one of: " + ", ".join(known)
        )
    if not isinstance(name, str) or name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise ConfigError(f"model_type {name!r} is no family of cutaway's{hint}; it has: {', '.join(known)}")
    return known[name]


def config_from_hf(hf_config: Mapping[str, Any]) -> Config:
    """The configuration that another library's config.json describes; how its weights are packed is no part of it."""
    return resolve_family(hf_config).config_from_hf(
        {key: value for key, value in hf_config.items() if key != "quantization_config"}
    )[0]


def find_family(config: Config, name: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family (the named one, or the first that can) which can describe a configuration, and its config.json."""
    known = families()
    if name is not None:
        if name not in known:
            raise ConfigError(f"'{name}' is no family of cutaway's; it has: {', '.join(known)}")
        return known[name], known[name].config_to_hf(config)
    refusals = []
    for family in sorted(known.values(), key=lambda family: family.name not in PREFERRED_FAMILIES):
        try:
            return family, family.config_to_hf(config)
        except ConfigError as error:
            refusals.append(str(error))
    nearest = min((text for text in refusals if "of form" not in text), key=len, default=refusals[0])
    raise ConfigError(f"no published family can describe this model, so no other library would open it. {nearest}")
