"""Budgets: what a variant costs, and how it is made to cost as much as the first one."""

from dataclasses import dataclass
from typing import Literal

from cutaway.config import Config, to_dict
from cutaway.errors import InputError
from cutaway.size.cache import kv_cache
from cutaway.size.params import count
from cutaway.size.sizing import size
from cutaway.train.ablate.shorthands import ffns
from cutaway.train.recipe import Recipe

Equal = Literal["tokens", "parameters", "flops"]
NEAR = 0.01
"""How far apart two counts of parameters may be that are called equal."""


@dataclass(frozen=True)
class Cost:
    """What a variant's training takes, by its configuration."""

    parameters: int
    flops: int
    """Of the whole training, there and back, over the pairs of tokens that see each other."""
    tokens: int
    steps: int
    cache: int
    """Bytes that one token leaves in an fp32 cache of keys and values; 0 where there is none."""


def cost(recipe: Recipe) -> Cost:
    config, training = recipe.shape, recipe.training
    per_step = training.batch * flops_of(config, recipe.data.length)
    kept = 0
    if config.form != "encoder":
        kept = kv_cache(config, batch=1, context=1, source=1, dtype="fp32").token
    return Cost(
        parameters=count(config).total,
        flops=training.steps * per_step,
        tokens=training.steps * training.batch * recipe.data.length,
        steps=training.steps,
        cache=kept,
    )


def flops_of(config: Config, length: int) -> int:
    """Of training on one sequence."""
    return size(config, batch=1, context=length, mode="train", dtype="fp32").flops.total_seen


def made_equal(name: str, recipe: Recipe, first: Recipe, equal: Equal) -> Recipe:
    """The variant with the first one's budget."""
    if equal == "tokens":
        return recipe
    if equal == "parameters":
        model = same_parameters(name, recipe.shape, count(first.shape).total)
        return recipe.replace(model=to_dict(model))
    return same_flops(name, recipe, cost(first).flops)


def same_parameters(name: str, config: Config, target: int) -> Config:
    """The FFNs, all of them alike, made wider or narrower until the whole has so many parameters."""

    def scaled(factor: float) -> Config:
        return ffns(config, lambda old: old.replace(hidden=max(1, round(factor * old.hidden_width(config.d_model)))))

    low, high = 0.0, 1.0
    while count(scaled(high)).total < target and high < 1e6:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if count(scaled(middle)).total < target else (low, middle)
    found = min((scaled(low), scaled(high)), key=lambda each: abs(count(each).total - target))
    has = count(found).total
    if abs(has - target) > NEAR * target:
        raise InputError(
            f"'{name}' cannot have {target:,} parameters by its FFN's width alone ({has:,} is as near as it comes);"
            " vary less, or compare at equal tokens or flops"
        )
    return found


def same_flops(name: str, recipe: Recipe, target: int) -> Recipe:
    """So many steps that the whole training takes the same FLOPs, to the nearest step."""
    own = cost(recipe)
    steps = round(target * own.steps / own.flops)
    if steps < 1:
        raise InputError(
            f"one step of '{name}' takes more FLOPs than the first variant's whole training; raise training.steps"
        )
    return recipe.replace(training=recipe.training.replace(steps=steps))
