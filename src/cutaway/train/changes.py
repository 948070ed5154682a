"""What a user wants otherwise than a recipe has it: single values, and texts of their own."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutaway.errors import ConfigError


def put(data: dict[str, Any], change: str) -> None:
    """Set one value, by its path; places in a list are counted from 0."""
    path, equals, value = change.partition("=")
    *way, last = path.strip().split(".")
    if not equals or not all([*way, last]):
        raise ConfigError(f"'{change}' changes nothing; give a key and a value, such as training.steps=100")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a word without quotes
    here: Any = data
    for key in way:
        here = here[place(here, key, change)] if isinstance(here, list) else here.setdefault(key, {})
        if not isinstance(here, dict | list):
            raise ConfigError(f"'{change}' goes through '{key}', which is no table; set that first")
    here[place(here, last, change) if isinstance(here, list) else last] = parsed


def place(here: list[Any], key: str, change: str) -> int:
    if not key.isdecimal() or int(key) >= len(here):
        raise ConfigError(f"'{change}' asks for '{key}' of a list of {len(here)}; count from 0, or set the whole list")
    return int(key)


def name_texts(data: dict[str, Any], texts: Sequence[str | Path]) -> None:
    """Put a user's own texts in the place of a recipe's; which columns are read stays as it is."""
    read = data.setdefault("data", {})
    old = read.get("sources")
    columns = {key: old[0][key] for key in ("field", "target", "group") if key in old[0]} if old else {}
    read["sources"] = [{"path": str(text), **columns} for text in texts]
