"""The training loop, from a recipe to an exported model, and the checks before it."""
