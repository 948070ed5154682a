"""Check that the checkpoint and the data of a recipe are given, before a model is loaded."""

from cutaway.errors import InputError
from cutaway.train.data.sources import list_source_files
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.recipe.schema import PretrainedModelConfig, Recipe


def check_recipe_inputs(recipe: Recipe, name: str = "RECIPE") -> None:
    """Raise InputError if the recipe needs a checkpoint or data that were not passed, or if the data does not exist.

    `name` is that of the recipe, for the message.
    """
    needs_base = isinstance(recipe.model, PretrainedModelConfig) and not recipe.model.checkpoint
    empty = [source for source in recipe.data.sources if not source.path]
    needs_reward = isinstance(recipe.objective, GRPOConfig) and not recipe.objective.reward
    if not needs_base and not empty and not needs_reward:
        for source in recipe.data.sources:
            list_source_files(source)
        return
    missing, options = [], []
    if isinstance(recipe.model, PretrainedModelConfig):
        options.append(f"--base {recipe.model.checkpoint or 'SOURCE'}")
    if needs_base:
        missing.append("the recipe fine-tunes a checkpoint, which is not given (model.checkpoint is empty)")
    if empty:
        has_pairs = any(source.target_column is not None for source in empty)
        format_hint = " (.tsv or .jsonl, with a source and a target in each row)" if has_pairs else ""
        missing.append(f"the recipe has no data (data.sources[].path is empty){format_hint}")
    options += [f"--data {source.path or 'FILE'}" for source in recipe.data.sources]
    if needs_reward:
        missing.append(
            "the recipe has no reward (objective.reward is empty), e.g. a function correct(completions, answer) in"
            " rewards.py, or the built-in exact_match"
        )
        options.append("--set objective.reward=rewards.py:correct")
    kinds = "; SOURCE is a model directory, a run, a .gguf file or a Hub id" if needs_base else ""
    raise InputError(f"{', and '.join(missing)}; pass them as in: cutaway train {name} {' '.join(options)}{kinds}")
