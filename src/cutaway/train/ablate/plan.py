"""What is trained: variants of a recipe, each at the same budget and from the same seeds."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from cutaway.config import to_dict
from cutaway.errors import ConfigError, InputError
from cutaway.train.ablate.budget import BudgetKind, TrainingCost, match_budget, training_cost
from cutaway.train.ablate.vary import Override, Variation, apply_overrides, describe_differences
from cutaway.train.data.data_loader import build_tokenizer
from cutaway.train.recipe.schema import BPETokenizerConfig, PretrainedTokenizerConfig, Recipe


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared."""

    name: str
    recipe: Recipe
    changes: tuple[str, ...]
    """In what it differs from the recipe that was given."""
    cost: TrainingCost
    surgery: str | None = None
    """What is done to the built model, where no configuration says it: a name in `model_surgery.SURGERIES`."""


@dataclass(frozen=True)
class AblationPlan:
    """Every variant from every seed; the first variant is what the others are measured against."""

    name: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    match: BudgetKind
    measurement: str | None = None
    """What is measured of a model when it is trained: a name in `measurements.MEASUREMENTS`."""

    def run_directory(self, output_dir: Path, variant: Variant, seed: int) -> Path:
        return output_dir / "runs" / f"{_slugify(variant.name)}-seed-{seed}"

    def run_recipe(self, variant: Variant, seed: int) -> Recipe:
        return variant.recipe.replace(training=variant.recipe.training.replace(seed=seed))


@dataclass(frozen=True)
class VariantSpec:
    """A variant as it is asked for."""

    name: str
    overrides: tuple[Override, ...] = ()
    surgery: str | None = None


def combine_variations(variations: Sequence[Variation]) -> list[VariantSpec]:
    """Every value of each with every value of the others."""
    keys = [each.key for each in variations]
    if len(set(keys)) < len(keys):
        raise ConfigError("a key is varied twice; give all of its values at once, as in norm=layernorm,rmsnorm")
    if "training.seed" in keys:
        raise ConfigError("training.seed is what every variant is repeated over; say how often with --num-seeds")
    ways = [tuple(zip(keys, values, strict=True)) for values in product(*(each.values for each in variations))]
    names = _short_keys(keys)
    return [VariantSpec(", ".join(f"{names[key]}={value}" for key, value in way), way) for way in ways]


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The end of each path, where no two have the same."""
    ends = {key: key.removesuffix(".kind").rpartition(".")[2] for key in keys}
    return ends if len(set(ends.values())) == len(ends) else {key: key for key in keys}


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
    """The plan; every variant is checked here, before anything is trained."""
    if len(specs) < 2 and measurement is None:
        raise ConfigError("one variant alone shows nothing; give a key at least two values, as in depth=2,4")
    if num_seeds < 1:
        raise InputError(f"{num_seeds} seeds train nothing; give 3 or more for an interval")
    first = recipe.training.seed
    recipe = recipe.replace(eval=recipe.eval.replace(sample_prompt=None))  # nobody reads them
    known = TokenizerCache(output_dir)
    base = known.resolve_recipe(recipe)
    variants: list[Variant] = []
    for each in specs:
        try:
            own = known.resolve_recipe(apply_overrides(recipe, each.overrides))
        except ConfigError as error:
            raise ConfigError(f"{each.name}: {error}") from None
        if variants:
            own = match_budget(each.name, own, variants[0].recipe, match)
        for other in variants:
            if (other.recipe, other.surgery) == (own, each.surgery):
                raise InputError(
                    f"'{other.name}' and '{each.name}' come out the same at equal {match}; vary something else, or"
                    " compare at another budget"
                )
        variants.append(
            Variant(each.name, own, _describe_changes(base, own, each.surgery), training_cost(own), each.surgery)
        )
    return AblationPlan(name, tuple(variants), tuple(range(first, first + num_seeds)), match, measurement)


def _describe_changes(base: Recipe, variant: Recipe, surgery: str | None) -> tuple[str, ...]:
    model = describe_differences(base.transformer_config, variant.transformer_config)
    return (*model, *describe_differences(base, variant), *([f"the built model: {surgery}"] if surgery else []))


class TokenizerCache:
    """A tokenizer that is trained on the data is trained once for all variants that share it."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self._tokenizers: dict[str, tuple[int, Any]] = {}

    def resolve_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with its tokenizer ready and its model's vocabulary in place."""
        key = recipe.data.model_dump_json(include={"sources", "tokenizer"})
        if key not in self._tokenizers:
            self._tokenizers[key] = self._prepare_tokenizer(recipe, hashlib.sha256(key.encode()).hexdigest()[:12])
        size, tokenizer = self._tokenizers[key]
        model = recipe.transformer_config.replace(vocab_size=size)
        return recipe.replace(model=to_dict(model), data=recipe.data.replace(tokenizer=tokenizer))

    def _prepare_tokenizer(self, recipe: Recipe, key: str) -> tuple[int, Any]:
        if not isinstance(recipe.data.tokenizer, BPETokenizerConfig):
            return build_tokenizer(recipe).vocab_size, recipe.data.tokenizer
        kept, draft = (self.output_dir / "tokenizers" / name for name in (key, f".{key}"))
        if not kept.is_dir():
            build_tokenizer(recipe).save(draft)
            draft.replace(kept)  # what has the name is whole
        part = PretrainedTokenizerConfig(path=str(kept.resolve()))
        return build_tokenizer(recipe.replace(data=recipe.data.replace(tokenizer=part))).vocab_size, part


def _slugify(name: str) -> str:
    """A name that every file system takes, and no two variants share."""
    plain = re.sub(r"[^a-z0-9=.-]+", "-", name.lower()).strip("-.")[:60] or "variant"
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
