"""Recipes: the description of a training run as data, and loading it. Imports no torch."""

from cutaway.train.recipe.load import list_recipes, load_recipe
from cutaway.train.recipe.schema import Recipe

__all__ = ["Recipe", "list_recipes", "load_recipe"]
