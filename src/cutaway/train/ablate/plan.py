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
from cutaway.train.ablate.equal import Cost, Equal, cost, made_equal
from cutaway.train.ablate.varying import Choice, Varied, changed, differences
from cutaway.train.ingredients import Bpe, Ready
from cutaway.train.reading import tokenizer_of
from cutaway.train.recipe import Recipe


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared."""

    name: str
    recipe: Recipe
    changed: tuple[str, ...]
    """In what it differs from the recipe that was given."""
    cost: Cost
    surgery: str | None = None
    """What is done to the built model, where no configuration says it: a name in `surgery.py`."""


@dataclass(frozen=True)
class Plan:
    """Every variant from every seed; the first variant is what the others are measured against."""

    name: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    equal: Equal
    measure: str | None = None
    """What is measured of a model when it is trained: a name in `studies.py`."""

    def directory(self, out: Path, variant: Variant, seed: int) -> Path:
        return out / "runs" / f"{slug(variant.name)}-seed-{seed}"

    def recipe(self, variant: Variant, seed: int) -> Recipe:
        return variant.recipe.replace(training=variant.recipe.training.replace(seed=seed))


@dataclass(frozen=True)
class Asked:
    """A variant as it is asked for."""

    name: str
    choices: tuple[Choice, ...] = ()
    surgery: str | None = None


def combinations(varied: Sequence[Varied]) -> list[Asked]:
    """Every value of each with every value of the others."""
    keys = [each.key for each in varied]
    if len(set(keys)) < len(keys):
        raise ConfigError("a key is varied twice; give all of its values at once, as in norm=layernorm,rmsnorm")
    if "training.seed" in keys:
        raise ConfigError("training.seed is what every variant is repeated over; say how often with --seeds")
    ways = [tuple(zip(keys, values, strict=True)) for values in product(*(each.values for each in varied))]
    names = brief(keys)
    return [Asked(", ".join(f"{names[key]}={value}" for key, value in way), way) for way in ways]


def brief(keys: Sequence[str]) -> dict[str, str]:
    """The end of each path, where no two have the same."""
    ends = {key: key.removesuffix(".kind").rpartition(".")[2] for key in keys}
    return ends if len(set(ends.values())) == len(ends) else {key: key for key in keys}


def make(
    name: str,
    recipe: Recipe,
    asked: Sequence[Asked],
    out: Path,
    *,
    seeds: int = 3,
    equal: Equal = "tokens",
    measure: str | None = None,
) -> Plan:
    """The plan; every variant is checked here, before anything is trained."""
    if len(asked) < 2 and measure is None:
        raise ConfigError("one variant alone shows nothing; give a key at least two values, as in depth=2,4")
    if seeds < 1:
        raise InputError(f"{seeds} seeds train nothing; give 3 or more for an interval")
    first = recipe.training.seed
    recipe = recipe.replace(watching=recipe.watching.replace(sample=None))  # nobody reads them
    known = Tokenizers(out)
    base = known.told(recipe)
    variants: list[Variant] = []
    for each in asked:
        try:
            own = known.told(changed(recipe, each.choices))
        except ConfigError as error:
            raise ConfigError(f"{each.name}: {error}") from None
        if variants:
            own = made_equal(each.name, own, variants[0].recipe, equal)
        for other in variants:
            if (other.recipe, other.surgery) == (own, each.surgery):
                raise InputError(
                    f"'{other.name}' and '{each.name}' come out the same at equal {equal}; vary something else, or"
                    " compare at another budget"
                )
        variants.append(Variant(each.name, own, told_changes(base, own, each.surgery), cost(own), each.surgery))
    return Plan(name, tuple(variants), tuple(range(first, first + seeds)), equal, measure)


def told_changes(base: Recipe, own: Recipe, surgery: str | None) -> tuple[str, ...]:
    model = differences(base.shape, own.shape)
    return (*model, *differences(base, own), *([f"the built model: {surgery}"] if surgery else []))


class Tokenizers:
    """A tokenizer that is trained on the data is trained once for all variants that share it."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.known: dict[str, tuple[int, Any]] = {}

    def told(self, recipe: Recipe) -> Recipe:
        """The recipe with its tokenizer ready and its model's vocabulary in place."""
        key = recipe.data.model_dump_json(include={"sources", "tokenizer"})
        if key not in self.known:
            self.known[key] = self.ready(recipe, hashlib.sha256(key.encode()).hexdigest()[:12])
        size, tokenizer = self.known[key]
        model = recipe.shape.replace(vocab_size=size)
        return recipe.replace(model=to_dict(model), data=recipe.data.replace(tokenizer=tokenizer))

    def ready(self, recipe: Recipe, key: str) -> tuple[int, Any]:
        if not isinstance(recipe.data.tokenizer, Bpe):
            return tokenizer_of(recipe).vocab_size, recipe.data.tokenizer
        kept, draft = (self.out / "tokenizers" / name for name in (key, f".{key}"))
        if not kept.is_dir():
            tokenizer_of(recipe).save(draft)
            draft.replace(kept)  # what has the name is whole
        part = Ready(path=str(kept.resolve()))
        return tokenizer_of(recipe.replace(data=recipe.data.replace(tokenizer=part))).vocab_size, part


def slug(name: str) -> str:
    """A name that every file system takes, and no two variants share."""
    plain = re.sub(r"[^a-z0-9=.-]+", "-", name.lower()).strip("-.")[:60] or "variant"
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
