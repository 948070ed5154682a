"""From `--vary KEY=a,b` to recipes: which values a key takes, and a recipe with one of them put in its place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.config.transformer import ADAPTER as CONFIGS
from cutaway.errors import ConfigError
from cutaway.train.ablate.shorthands import SHORTHANDS, edited
from cutaway.train.changes import put
from cutaway.train.recipe import ADAPTER as RECIPES
from cutaway.train.recipe import Recipe
from cutaway.train.recipe import recipe as read_recipe

Choice = tuple[str, str]
"""A key and the value it is given, as written."""


@dataclass(frozen=True)
class Varied:
    """A key and the values that it takes."""

    key: str
    values: tuple[str, ...]


def varied(text: str) -> Varied:
    """'KEY=a,b,c'; commas within brackets, braces and quotes part nothing."""
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in parted(rest))
    if not equals or not key.strip() or not all(values):
        raise ConfigError(f"'{text}' varies nothing; give a key and its values, such as norm=layernorm,rmsnorm")
    if len(set(values)) < len(values):
        raise ConfigError(f"'{text}' names a value twice; a variant against itself shows nothing, so leave one out")
    return Varied(key.strip(), values)


def parted(text: str) -> Iterator[str]:
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


def changed(recipe: Recipe, choices: Sequence[Choice]) -> Recipe:
    """The recipe with these values in place, its model written out."""
    data: dict[str, Any] = said(recipe) | {"model": said(recipe.shape)}
    for key, value in choices:
        if key in SHORTHANDS:
            data["model"] = said(edited(read_config(data["model"]), key, value))
        elif "." not in key and key not in Recipe.model_fields:
            raise ConfigError(
                f"'{key}' is no key of a recipe and no short name; give a path such as training.batch, or one of"
                f" {', '.join(SHORTHANDS)}"
            )
        else:
            set_all(data, key, value)
    return read_recipe(data | {"model": to_dict(read_config(data["model"]))})


def said(part: BaseModel) -> dict[str, Any]:
    """What differs from the defaults, and every tag: what another kind of part can take over from this one."""
    tree: dict[str, Any] = {}
    for name, about in type(part).model_fields.items():
        value = getattr(part, name)
        tag = name in ("kind", "form") or isinstance(value, BaseModel)
        if tag or about.is_required() or value != about.default:
            tree[name] = plain(value)
    return {name: value for name, value in tree.items() if value is not None}


def plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return said(value)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def set_all(data: dict[str, Any], key: str, value: str) -> None:
    """Put a value at a path, in every block where the path goes through a pattern of several."""
    *way, last = key.split(".")
    tables = [data]
    for name in way:
        tables = [inner for table in tables for inner in within(table, name, key)]
    for table in tables:
        put(table, f"{last}={value}")
        if last == "kind":
            drop_unknown(data, table, CONFIGS if way[0] == "model" else RECIPES)


def within(table: dict[str, Any], name: str, key: str) -> list[dict[str, Any]]:
    inner = table.setdefault(name, {})
    several = inner if isinstance(inner, list) else [inner]
    if not all(isinstance(each, dict) for each in several):
        raise ConfigError(f"'{key}' goes through '{name}', which is no table; vary that, or another")
    return several


def drop_unknown(data: dict[str, Any], table: dict[str, Any], adapter: TypeAdapter[Any]) -> None:
    """A part of another kind keeps what it knows of what was set for the old one."""
    whole = data["model"] if adapter is CONFIGS else data
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


def differences(before: Config | Recipe, after: Config | Recipe) -> list[str]:
    """What was changed, as 'path: old → new'; a part of another kind is one change."""
    return list(unequal("", tree(before), tree(after)))


def tree(part: Config | Recipe) -> dict[str, Any]:
    return {name: value for name, value in said(part).items() if not (name == "model" and isinstance(part, Recipe))}


def unequal(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old.get("kind") == new.get("kind"):
        for name in old | new:
            yield from unequal(f"{path}.{name}".lstrip("."), old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and old:
        alone = len(old) == 1
        for place, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from unequal(path if alone else f"{path}[{place}]", a, b)
    elif old != new:
        yield f"{path}: {short(old)} → {short(new)}"


def short(value: Any) -> str:
    if isinstance(value, dict):
        plain_ones = {name: each for name, each in value.items() if name != "kind" and not isinstance(each, dict)}
        inside = ", ".join(f"{name} {each}" for name, each in plain_ones.items())
        return str(value.get("kind", "")) + (f" ({inside})" if inside else "")
    return "default" if value is None else str(value)
