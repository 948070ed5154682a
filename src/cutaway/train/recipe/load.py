"""Loading recipes by name, from a file or a dict, with overrides of single values and of the text sources."""

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cutaway.config.node import build_config_error
from cutaway.config.serialization import read_config_file
from cutaway.errors import ConfigError
from cutaway.train.recipe.schema import RECIPE_ADAPTER, Recipe


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one value, by its path; places in a list are counted from 0."""
    path, equals, value = override.partition("=")
    *way, last = path.strip().split(".")
    if not equals or not all([*way, last]):
        raise ConfigError(f"'{override}' changes nothing; give a key and a value, such as training.max_steps=100")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a word without quotes
    here: Any = data
    for key in way:
        here = here[_list_index(here, key, override)] if isinstance(here, list) else here.setdefault(key, {})
        if not isinstance(here, dict | list):
            raise ConfigError(f"'{override}' goes through '{key}', which is no table; set that first")
    here[_list_index(here, last, override) if isinstance(here, list) else last] = parsed


def _list_index(items: list[Any], key: str, override: str) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise ConfigError(
            f"'{override}' asks for '{key}' of a list of {len(items)}; count from 0, or set the whole list"
        )
    return int(key)


def override_sources(data: dict[str, Any], texts: Sequence[str | Path]) -> None:
    """Put a user's own texts in the place of a recipe's; which columns are read stays as it is."""
    read = data.setdefault("data", {})
    old = read.get("sources")
    columns = (
        {key: old[0][key] for key in ("text_column", "target_column", "group_column") if key in old[0]} if old else {}
    )
    read["sources"] = [{"path": str(text), **columns} for text in texts]


def load_recipe(
    source: Recipe | Mapping[str, Any] | str | Path, overrides: Sequence[str] = (), texts: Sequence[str | Path] = ()
) -> Recipe:
    """A Recipe from a shipped one's name, a dict, or a .toml or .json file.

    Each override is 'a.b=value', as in TOML; `texts` are read in the place of the recipe's own.
    """
    if isinstance(source, Recipe):
        data = source.model_dump(mode="json", exclude_none=True)
    elif isinstance(source, Mapping):
        data = deepcopy(dict(source))  # changes are not the caller's
    elif Path(source).suffix in (".toml", ".json"):
        data = read_config_file(Path(source))
    else:
        data = read_preset_recipe(str(source))
    if texts:
        override_sources(data, texts)
    for override in overrides:
        apply_override(data, override)
    try:
        return RECIPE_ADAPTER.validate_python(data)
    except ValidationError as error:
        raise build_config_error(error, data, num_tags=0) from None


def list_recipes() -> list[str]:
    """The names of those that come with cutaway."""
    return sorted(
        file.name[:-5] for file in files("cutaway.train.recipe.presets").iterdir() if file.name.endswith(".toml")
    )


def read_preset_recipe(name: str) -> dict[str, Any]:
    if name not in list_recipes():
        raise ConfigError(f"there is no recipe '{name}'; give a .toml file, or one of {', '.join(list_recipes())}")
    return tomllib.loads((files("cutaway.train.recipe.presets") / f"{name}.toml").read_text(encoding="utf-8"))
