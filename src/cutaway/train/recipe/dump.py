"""Recipes as tables and as TOML, without default values."""

from typing import Any

from pydantic import BaseModel

from cutaway.config.serialization import format_toml
from cutaway.train.recipe.schema import Recipe


def non_default_values(node: BaseModel) -> dict[str, Any]:
    """Values of a config node that differ from its defaults, and the tags `kind` and `form`.

    If an override changes the kind of a node, defaults of the old kind must not be carried over.
    """
    tree: dict[str, Any] = {}
    for name, field in type(node).model_fields.items():
        value = getattr(node, name)
        is_tag = name in ("kind", "form") or isinstance(value, BaseModel)
        if is_tag or field.is_required() or value != field.default:
            tree[name] = _to_plain(value)
    return {name: value for name, value in tree.items() if value is not None}


def recipe_to_toml(recipe: Recipe) -> str:
    """The recipe as TOML, without default values. `load_recipe` on it returns the same recipe."""
    return format_toml({name: value for name, value in non_default_values(recipe).items() if value != {}})


def _to_plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return non_default_values(value)
    return [_to_plain(item) for item in value] if isinstance(value, tuple) else value
