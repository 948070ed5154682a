"""Recipes, which describe a training run, and functions to load them. This package does not import torch."""

from cutaway.train.recipe.catalog import list_recipes
from cutaway.train.recipe.load import load_recipe
from cutaway.train.recipe.schema import Recipe

__all__ = ["Recipe", "list_recipes", "load_recipe"]
