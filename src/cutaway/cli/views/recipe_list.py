"""List of the shipped recipes by purpose, for `cutaway train --list` and `--help`."""

from collections.abc import Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from cutaway.cli.json_output import print_json
from cutaway.cli.views.terminal import borderless_table, build_console, indent
from cutaway.train.recipe.catalog import PURPOSE_TITLES, RecipeInfo, describe_recipes


def print_recipe_list(*, as_json: bool = False) -> None:
    """Print the shipped recipes, grouped by purpose."""
    recipes = describe_recipes()
    if as_json:
        print_json([recipe._asdict() for recipe in recipes])
        return
    console = build_console()
    for renderable in _render(recipes):
        console.print(renderable)


def _render(recipes: list[RecipeInfo]) -> Iterator[RenderableType]:
    width = max(len(_command(recipe)) for recipe in recipes)
    for purpose, group in groupby(recipes, key=lambda recipe: recipe.purpose):
        yield Text(PURPOSE_TITLES.get(purpose, "other"), "bold")
        table = borderless_table("lL")
        table.columns[0].min_width = width
        for recipe in group:
            table.add_row(_command(recipe), Text(recipe.description))
        yield indent(table)


def _command(recipe: RecipeInfo) -> str:
    """Name of a recipe, with the options that it requires."""
    return recipe.name + " --base SOURCE" * recipe.needs_base + " --data FILE" * recipe.needs_data
