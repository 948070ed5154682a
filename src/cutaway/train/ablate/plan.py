"""Ablation plan: variants of a recipe with the same budget and the same seeds."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from cutaway.config import to_dict
from cutaway.errors import ConfigError, InputError
from cutaway.train.ablate.budget import BudgetKind, TrainingCost, match_budget, training_cost
from cutaway.train.ablate.vary import Override, Variation, apply_overrides, describe_differences
from cutaway.train.data.training_data import build_tokenizer
from cutaway.train.recipe.schema import BPETokenizerConfig, PretrainedTokenizerConfig, Recipe, TokenizerConfig


@dataclass(frozen=True)
class Variant:
    """A variant of the base recipe. An ablation trains all variants and compares them."""

    name: str
    recipe: Recipe
    changes: tuple[str, ...]
    """Differences from the base recipe."""
    cost: TrainingCost
    edits: tuple[Override, ...] = ()
    """Structural edits of the built model that a config cannot express, as (target, operation) of `ct.edit`."""


@dataclass(frozen=True)
class AblationPlan:
    """All variants and seeds of an ablation. The first variant is the baseline."""

    name: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    match: BudgetKind
    measurement: str | None = None
    """Name in `measurements.MEASUREMENTS` of a measurement of the trained models, or None."""

    def run_directory(self, output_dir: Path, variant: Variant, seed: int) -> Path:
        return output_dir / "runs" / f"{_slugify(variant.name)}-seed-{seed}"

    def run_recipe(self, variant: Variant, seed: int) -> Recipe:
        return variant.recipe.replace(training=variant.recipe.training.replace(seed=seed))


@dataclass(frozen=True)
class VariantSpec:
    """Name, overrides and edits of a variant, from which `build_plan` builds the `Variant`."""

    name: str
    overrides: tuple[Override, ...] = ()
    edits: tuple[Override, ...] = ()


def combine_variations(variations: Sequence[Variation]) -> list[VariantSpec]:
    """Variants for all combinations of the values of several keys."""
    keys = [variation.key for variation in variations]
    if len(set(keys)) < len(keys):
        raise ConfigError("a key is in --vary twice; pass all of its values at once, as in norm=layernorm,rmsnorm")
    if "training.seed" in keys:
        raise ConfigError("training.seed cannot be varied: every variant is trained with all seeds; use --num-seeds")
    # Each key is shortened to the last component of its path, if the last components of all keys are distinct.
    ends = [key.removesuffix(".kind").rpartition(".")[2] for key in keys]
    names = ends if len(set(ends)) == len(ends) else keys
    specs = []
    for values in product(*(variation.values for variation in variations)):
        name = ", ".join(f"{key}={value}" for key, value in zip(names, values, strict=True))
        specs.append(VariantSpec(name, tuple(zip(keys, values, strict=True))))
    return specs


def build_plan(
    name: str,
    recipe: Recipe,
    specs: Sequence[VariantSpec],
    output_dir: Path,
    *,
    num_seeds: int = 3,
    match: BudgetKind = "tokens",
    measurement: str | None = None,
) -> AblationPlan:
    """Build the plan of an ablation. BPE tokenizers are trained and saved in `output_dir`; models are not trained yet.

    Raises ConfigError or InputError if a variant is invalid, or if two variants are identical.
    """
    if len(specs) < 2 and measurement is None:
        raise ConfigError("there is only one variant, so there is nothing to compare; vary a key, as in depth=2,4")
    if num_seeds < 1:
        raise InputError(f"num_seeds is {num_seeds}; pass 1 or more, and 3 or more for a useful confidence interval")
    first_seed = recipe.training.seed
    # samples and snapshots are not used
    recipe = recipe.replace(
        eval=recipe.eval.replace(sample_prompts=()), checkpoint=recipe.checkpoint.replace(num_snapshots=0)
    )
    tokenizers = _TokenizerCache(output_dir)
    base = tokenizers.resolve_recipe(recipe)
    variants: list[Variant] = []
    for spec in specs:
        try:
            variant_recipe = tokenizers.resolve_recipe(apply_overrides(recipe, spec.overrides))
        except ConfigError as error:
            raise ConfigError(f"{spec.name}: {error}") from None
        if variants:
            variant_recipe = match_budget(spec.name, variant_recipe, variants[0].recipe, match)
        for other in variants:
            if (other.recipe, other.edits) == (variant_recipe, spec.edits):
                raise InputError(
                    f"'{other.name}' and '{spec.name}' are identical at equal {match}; vary another key, or compare at"
                    " another budget"
                )
        changes = _describe_changes(base, variant_recipe, spec.edits)
        variants.append(Variant(spec.name, variant_recipe, changes, training_cost(variant_recipe), spec.edits))
    seeds = tuple(range(first_seed, first_seed + num_seeds))
    return AblationPlan(name, tuple(variants), seeds, match, measurement)


def _describe_changes(base: Recipe, variant: Recipe, edits: Sequence[Override]) -> tuple[str, ...]:
    model = describe_differences(base.transformer_config, variant.transformer_config)
    return (
        *model,
        *describe_differences(base, variant),
        *(f"edit of the built model: {target}={op}" for target, op in edits),
    )


class _TokenizerCache:
    """Trains each tokenizer once, for all variants that use it."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self._tokenizers: dict[str, tuple[int, TokenizerConfig | None]] = {}

    def resolve_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with a trained tokenizer, and with the tokenizer's vocab_size in the model config."""
        key = recipe.data.model_dump_json(include={"sources", "tokenizer"})
        if key not in self._tokenizers:
            self._tokenizers[key] = self._prepare_tokenizer(recipe, hashlib.sha256(key.encode()).hexdigest()[:12])
        size, tokenizer = self._tokenizers[key]
        model = recipe.transformer_config.replace(vocab_size=size)
        return recipe.replace(model=to_dict(model), data=recipe.data.replace(tokenizer=tokenizer))

    def _prepare_tokenizer(self, recipe: Recipe, key: str) -> tuple[int, TokenizerConfig | None]:
        if not isinstance(recipe.data.tokenizer, BPETokenizerConfig):
            return build_tokenizer(recipe.data, recipe.objective).vocab_size, recipe.data.tokenizer
        path, temporary = (self.output_dir / "tokenizers" / name for name in (key, f".{key}"))
        if not path.is_dir():
            build_tokenizer(recipe.data, recipe.objective).save(temporary)
            temporary.replace(path)  # so that the directory is always complete
        config = PretrainedTokenizerConfig(path=str(path.resolve()))
        return build_tokenizer(recipe.data.replace(tokenizer=config), recipe.objective).vocab_size, config


def _slugify(name: str) -> str:
    """Directory name for a variant, which is valid on every file system and different for each variant."""
    slug = re.sub(r"[^a-z0-9=.-]+", "-", name.lower()).strip("-.")[:60] or "variant"
    return slug if slug == name else f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
