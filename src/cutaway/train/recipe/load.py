"""Load recipes by preset name, from a file or from a dict. Single values and the text sources can be overridden."""

import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cutaway.config.node import build_config_error
from cutaway.config.serialization import read_config_file
from cutaway.errors import ConfigError
from cutaway.train.recipe.catalog import describe_unknown_recipe, list_recipes, read_shipped_recipe
from cutaway.train.recipe.key_hints import suggest_key
from cutaway.train.recipe.schema import RECIPE_ADAPTER, Recipe

Table = dict[str, Any]
"""A TOML table: values, lists and tables by key."""
RecipeSource = Recipe | Mapping[str, object] | str | Path
"""A Recipe, a dict with the values of a recipe, a preset name, or the path of a .toml or .json file."""


def apply_override(data: Table, override: str) -> None:
    """Set a value of the recipe dict `data`, in place. `override` is 'path=value', e.g. 'training.max_steps=100'.

    The path is dotted, and items of a list are numbered from 0.
    """
    path, equals, value = override.partition("=")
    *parents, last = path.strip().split(".")
    if not equals or not all([*parents, last]):
        raise ConfigError(f"override '{override}' is not key=value; write for example training.max_steps=100")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a string without quotes
    node: Any = data
    for key in parents:
        node = node[_list_index(node, key, override)] if isinstance(node, list) else node.setdefault(key, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override '{override}': '{key}' is not a table; set '{key}' to a table first")
    node[_list_index(node, last, override) if isinstance(node, list) else last] = parsed


def _list_index(items: Sequence[object], key: str, override: str) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise ConfigError(
            f"override '{override}': '{key}' is not an index of a list of {len(items)} items; use an index that is 0"
            " or more and less than the number of items, or set the whole list"
        )
    return int(key)


def _override_sources(data: Table, texts: Sequence[str | Path], given_columns: Mapping[str, str | None]) -> None:
    """Replace data.sources by the files or directories `texts`, in place. They have the columns of the first source."""
    data_section = data.setdefault("data", {})
    [first, *_] = data_section.get("sources") or [{}]
    columns = {key: first[key] for key in ("text_column", "target_column", "group_column") if key in first}
    columns |= {key: column for key, column in given_columns.items() if column is not None}
    data_section["sources"] = [{"path": str(text), **columns} for text in texts]


def _override_base(data: Table, base: str | Path) -> None:
    """Set model.checkpoint, in place. Other keys of a pretrained model, e.g. the adapter, stay."""
    model = data.get("model")
    data["model"] = (model if isinstance(model, dict) and "checkpoint" in model else {}) | {"checkpoint": str(base)}


def load_recipe(
    source: RecipeSource,
    overrides: Sequence[str] = (),
    texts: Sequence[str | Path] = (),
    base: str | Path | None = None,
    *,
    text_column: str | None = None,
    target_column: str | None = None,
) -> Recipe:
    """Load a recipe from a preset name, a dict, or a .toml or .json file.

    Each override is 'key=value' with a TOML value, e.g. 'training.max_steps=100'. `texts` are files or directories that
    replace the data sources of the recipe, with `text_column` as the column of their texts and `target_column` as that
    of their targets. `base` is a checkpoint to fine-tune, which replaces the recipe's model.
    """
    if isinstance(source, Recipe):
        data = source.model_dump(mode="json", exclude_none=True)
        _drop_defaults(data, source)
    elif isinstance(source, Mapping):
        data = deepcopy(dict(source))  # overrides must not change the caller's dict
    elif Path(source).suffix.lower() in (".toml", ".json"):
        data = read_config_file(Path(source))
    else:
        if str(source) not in list_recipes():
            raise ConfigError(describe_unknown_recipe(str(source)))
        data = read_shipped_recipe(str(source))
    if texts:
        _override_sources(data, texts, {"text_column": text_column, "target_column": target_column})
    if base is not None:
        _override_base(data, base)
    for override in overrides:
        apply_override(data, override)
    try:
        return RECIPE_ADAPTER.validate_python(data)
    except ValidationError as error:
        raise build_config_error(error, data, num_tags=0, suggest_key=suggest_key) from None


def _drop_defaults(data: Table, recipe: Recipe) -> None:
    """Remove step counts that the recipe does not set, in place: set ones take precedence over ratios."""
    for section, key in (("training", "max_steps"), ("schedule", "warmup_steps")):
        if key not in getattr(recipe, section).model_fields_set:
            del data[section][key]
