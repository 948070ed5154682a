"""The shipped recipes: names, purposes, descriptions and required inputs, read from the files in `presets/`."""

import difflib
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_args

from cutaway.config.presets import presets
from cutaway.config.serialization import path_satisfies
from cutaway.pretrained import find_pretrained
from cutaway.train.recipe.schema import Purpose

PRESETS = files("cutaway.train.recipe.presets")
PURPOSE_TITLES: dict[str, str] = {
    "pretrain": "train from scratch",
    "fine-tune": "fine-tune a checkpoint",
    "align": "align with preferences and rewards",
    "classify": "classify texts and tokens",
    "embed": "sentence embeddings",
}
"""Heading of each purpose in lists, in their order."""


class RecipeInfo(NamedTuple):
    """What a shipped recipe is for, and which arguments it needs."""

    name: str
    purpose: str
    description: str
    needs_base: bool
    """Whether the checkpoint must be passed with --base."""
    needs_data: bool
    """Whether the data must be passed with --data or --text."""


def list_recipes() -> list[str]:
    """Names of the shipped recipes."""
    names = [file.name for file in PRESETS.iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read_shipped_recipe(name: str) -> dict[str, Any]:
    """A shipped recipe as a table."""
    return tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))


def describe_unknown_recipe(name: str) -> str:
    """Error message for a name that is not a shipped recipe: a text, a model, or a misspelled name."""
    path = Path(name).expanduser()
    if path_satisfies(path, Path.is_dir):
        what = "run" if path_satisfies(path / "run.json", Path.is_file) else "model" if _is_model(path) else "directory"
        use = {
            "run": f"continue it with: cutaway train --resume {name}",
            "model": f"fine-tune it with --base {name}, see `cutaway train --list`",
            "directory": f"train on its files with: cutaway train --text {name}",
        }[what]
        return f"'{name}' is a {what}, not a recipe; {use}"
    if path_satisfies(path, Path.is_file):
        if path.suffix in (".gguf", ".safetensors"):
            return f"'{name}' is a model, not a recipe; fine-tune it with --base {name}, see `cutaway train --list`"
        if path.suffix in (".yaml", ".yml"):
            return f"'{name}' is YAML, but recipes are .toml or .json files; convert it"
        return f"'{name}' is not a recipe; train on its text with: cutaway train --text {name}"
    names = list_recipes()
    if find_pretrained(name) is not None:
        return f"'{name}' is a trained model, not a recipe; fine-tune it with --base {name}, see `cutaway train --list`"
    if name in presets():
        return f"'{name}' is a model, not a recipe; train it with: cutaway train python-stdlib --set model={name}"
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"there is no recipe '{name}'{hint}; pass a .toml file, or one of {', '.join(names)}"


def describe_recipes() -> list[RecipeInfo]:
    """The shipped recipes, ordered by purpose and name."""
    recipes = [_describe(name, read_shipped_recipe(name)) for name in list_recipes()]
    order = [*get_args(Purpose), ""]
    return sorted(recipes, key=lambda each: (order.index(each.purpose), each.name))


def _describe(name: str, table: dict[str, Any]) -> RecipeInfo:
    model, sources = table.get("model"), table.get("data", {}).get("sources", [])
    needs_base = isinstance(model, dict) and model.get("checkpoint") == ""
    needs_data = any(source.get("path") == "" for source in sources)
    return RecipeInfo(name, table.get("purpose", ""), table.get("description", ""), needs_base, needs_data)


def _is_model(directory: Path) -> bool:
    return any(path_satisfies(directory / name, Path.is_file) for name in ("config.json", "cutaway.json"))
