"""Parse `--vary KEY=a,b`, apply overrides to recipes, and describe differences between recipes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.config.transformer import CONFIG_ADAPTER
from cutaway.errors import ConfigError
from cutaway.train.ablate.shorthands import SHORTHANDS, apply_shorthand
from cutaway.train.recipe.dump import non_default_values
from cutaway.train.recipe.load import Table, apply_override, load_recipe
from cutaway.train.recipe.schema import RECIPE_ADAPTER, Recipe

Override = tuple[str, str]
"""A recipe key or shorthand, and its value, both as the user wrote them."""


@dataclass(frozen=True)
class Variation:
    """A recipe key or shorthand, and the values of it that are compared."""

    key: str
    values: tuple[str, ...]


def parse_variation(text: str) -> Variation:
    """Parse 'KEY=a,b,c'. Commas within brackets, braces and quotes do not separate values."""
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in _split_values(rest))
    if not equals or not key.strip() or not all(values):
        raise ConfigError(f"--vary '{text}' is not KEY=VALUES; write for example norm=layernorm,rmsnorm")
    if len(set(values)) < len(values):
        raise ConfigError(f"--vary '{text}' has the same value twice; remove one of the two")
    return Variation(key.strip(), values)


def _split_values(text: str) -> Iterator[str]:
    depth, quote, start = 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def apply_overrides(recipe: Recipe, overrides: Sequence[Override]) -> Recipe:
    """Apply overrides to a recipe. In the result, `model` is a full config, even if it was a preset name."""
    data: Table = non_default_values(recipe) | {"model": non_default_values(recipe.transformer_config)}
    for key, value in overrides:
        if key in SHORTHANDS:
            data["model"] = non_default_values(apply_shorthand(read_config(data["model"]), key, value))
        elif "." not in key and key not in Recipe.model_fields:
            raise ConfigError(
                f"'{key}' is neither a recipe key nor a shorthand; use a path such as training.batch_size, or one of"
                f" {', '.join(SHORTHANDS)}"
            )
        else:
            _set_everywhere(data, key, value)
    return load_recipe(data | {"model": to_dict(read_config(data["model"]))})


def _set_everywhere(data: Table, key: str, value: str) -> None:
    """Set a value of the recipe dict `data` at the dotted path `key`, in place.

    If the path contains a list, e.g. of several blocks, set the value in every item.
    """
    *parents, last = key.split(".")
    tables = [data]
    for name in parents:
        tables = [inner for table in tables for inner in _child_tables(table, name, key)]
    for table in tables:
        apply_override(table, f"{last}={value}")
        if last == "kind":
            _drop_unknown_keys(data, table, CONFIG_ADAPTER if parents[0] == "model" else RECIPE_ADAPTER)


def _child_tables(table: Table, name: str, key: str) -> list[Table]:
    child = table.setdefault(name, {})
    children = child if isinstance(child, list) else [child]
    if not all(isinstance(each, dict) for each in children):
        raise ConfigError(f"--vary '{key}': '{name}' is not a table; vary '{name}', or another key")
    return children


def _drop_unknown_keys(data: Table, table: Table, adapter: TypeAdapter[Any]) -> None:
    """Remove the keys of `table` that its kind does not have, after the kind was changed."""
    root = data["model"] if adapter is CONFIG_ADAPTER else data
    while True:
        try:
            adapter.validate_python(root)
        except ValidationError as error:
            unknown_keys = [
                each["ctx"]["key"]
                for each in error.errors()
                if each["type"] == "unknown_key" and each["input"] == table
            ]
            if not unknown_keys:
                return  # other errors are reported when all overrides are applied
            for name in unknown_keys:
                table.pop(name, None)
        else:
            return


def describe_differences(before: Config | Recipe, after: Config | Recipe) -> list[str]:
    """Differences between two configs or two recipes, as 'path: old → new'. The models of recipes are not compared.

    If the kind of a node differs, the whole node is one difference.
    """
    old, new = non_default_values(before), non_default_values(after)
    for recipe in (old, new):
        recipe.pop("model", None)  # the model config of a recipe is compared separately
    return list(_iter_differences("", old, new))


def _iter_differences(path: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind"):
        for name in old | new:
            yield from _iter_differences(f"{path}.{name}".lstrip("."), old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and old:
        has_one_item = len(old) == 1
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _iter_differences(path if has_one_item else f"{path}[{index}]", a, b)
    elif old != new:
        yield f"{path}: {_format_value(old)} → {_format_value(new)}"


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        scalars = {name: item for name, item in value.items() if name != "kind" and not isinstance(item, dict)}
        details = ", ".join(f"{name} {item}" for name, item in scalars.items())
        return str(value.get("kind", "")) + (f" ({details})" if details else "")
    return "default" if value is None else str(value)
