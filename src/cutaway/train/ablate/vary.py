"""From `--vary KEY=a,b` to recipes: which values a key takes, and a recipe with one of them put in its place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.config.transformer import CONFIG_ADAPTER
from cutaway.errors import ConfigError
from cutaway.train.ablate.shorthands import SHORTHANDS, apply_shorthand
from cutaway.train.recipe.load import apply_override, load_recipe
from cutaway.train.recipe.schema import RECIPE_ADAPTER, Recipe

Override = tuple[str, str]
"""A key and the value it is given, as written."""


@dataclass(frozen=True)
class Variation:
    """A key and the values that it takes."""

    key: str
    values: tuple[str, ...]


def parse_variation(text: str) -> Variation:
    """'KEY=a,b,c'; commas within brackets, braces and quotes part nothing."""
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in _split_values(rest))
    if not equals or not key.strip() or not all(values):
        raise ConfigError(f"'{text}' varies nothing; give a key and its values, such as norm=layernorm,rmsnorm")
    if len(set(values)) < len(values):
        raise ConfigError(f"'{text}' names a value twice; a variant against itself shows nothing, so leave one out")
    return Variation(key.strip(), values)


def _split_values(text: str) -> Iterator[str]:
    depth, quote, begin = 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        elif sign == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def apply_overrides(recipe: Recipe, overrides: Sequence[Override]) -> Recipe:
    """The recipe with these values in place, its model written out."""
    data: dict[str, Any] = _non_default_values(recipe) | {"model": _non_default_values(recipe.transformer_config)}
    for key, value in overrides:
        if key in SHORTHANDS:
            data["model"] = _non_default_values(apply_shorthand(read_config(data["model"]), key, value))
        elif "." not in key and key not in Recipe.model_fields:
            raise ConfigError(
                f"'{key}' is no key of a recipe and no short name; give a path such as training.batch_size, or one of"
                f" {', '.join(SHORTHANDS)}"
            )
        else:
            _set_everywhere(data, key, value)
    return load_recipe(data | {"model": to_dict(read_config(data["model"]))})


def _non_default_values(node: BaseModel) -> dict[str, Any]:
    """What differs from the defaults, and every tag: what another kind of part can take over from this one."""
    tree: dict[str, Any] = {}
    for name, about in type(node).model_fields.items():
        value = getattr(node, name)
        tag = name in ("kind", "form") or isinstance(value, BaseModel)
        if tag or about.is_required() or value != about.default:
            tree[name] = _to_plain(value)
    return {name: value for name, value in tree.items() if value is not None}


def _to_plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _non_default_values(value)
    return [_to_plain(item) for item in value] if isinstance(value, tuple) else value


def _set_everywhere(data: dict[str, Any], key: str, value: str) -> None:
    """Put a value at a path, in every block where the path goes through a pattern of several."""
    *way, last = key.split(".")
    tables = [data]
    for name in way:
        tables = [inner for table in tables for inner in _child_tables(table, name, key)]
    for table in tables:
        apply_override(table, f"{last}={value}")
        if last == "kind":
            _drop_unknown_keys(data, table, CONFIG_ADAPTER if way[0] == "model" else RECIPE_ADAPTER)


def _child_tables(table: dict[str, Any], name: str, key: str) -> list[dict[str, Any]]:
    inner = table.setdefault(name, {})
    several = inner if isinstance(inner, list) else [inner]
    if not all(isinstance(each, dict) for each in several):
        raise ConfigError(f"'{key}' goes through '{name}', which is no table; vary that, or another")
    return several


def _drop_unknown_keys(data: dict[str, Any], table: dict[str, Any], adapter: TypeAdapter[Any]) -> None:
    """A part of another kind keeps what it knows of what was set for the old one."""
    whole = data["model"] if adapter is CONFIG_ADAPTER else data
    while True:
        try:
            adapter.validate_python(whole)
        except ValidationError as error:
            strange = [
                each["ctx"]["key"]
                for each in error.errors()
                if each["type"] == "unknown_key" and each["input"] == table
            ]
            if not strange:
                return  # another fault, if any, is told when all is in place
            for name in strange:
                table.pop(name, None)
        else:
            return


def describe_differences(before: Config | Recipe, after: Config | Recipe) -> list[str]:
    """What was changed, as 'path: old → new'; a part of another kind is one change."""
    return list(_iter_differences("", _comparable_values(before), _comparable_values(after)))


def _comparable_values(node: Config | Recipe) -> dict[str, Any]:
    return {
        name: value
        for name, value in _non_default_values(node).items()
        if not (name == "model" and isinstance(node, Recipe))
    }


def _iter_differences(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind"):
        for name in old | new:
            yield from _iter_differences(f"{path}.{name}".lstrip("."), old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and old:
        alone = len(old) == 1
        for place, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _iter_differences(path if alone else f"{path}[{place}]", a, b)
    elif old != new:
        yield f"{path}: {_format_value(old)} → {_format_value(new)}"


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        plain_ones = {name: each for name, each in value.items() if name != "kind" and not isinstance(each, dict)}
        inside = ", ".join(f"{name} {each}" for name, each in plain_ones.items())
        return str(value.get("kind", "")) + (f" ({inside})" if inside else "")
    return "default" if value is None else str(value)
