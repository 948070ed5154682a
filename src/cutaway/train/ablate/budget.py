"""Budgets: what a variant costs, and how it is made to cost as much as the first one."""

from dataclasses import dataclass
from typing import Literal

from cutaway.config import Config, to_dict
from cutaway.errors import InputError
from cutaway.size.estimate import size
from cutaway.size.kv_cache import kv_cache_size
from cutaway.size.parameters import count_parameters
from cutaway.train.ablate.shorthands import map_ffns
from cutaway.train.recipe.schema import Recipe

BudgetKind = Literal["tokens", "parameters", "flops"]
PARAMETER_RTOL = 0.01
"""How far apart two counts of parameters may be that are called equal."""


@dataclass(frozen=True)
class TrainingCost:
    """What a variant's training takes, by its configuration."""

    parameters: int
    flops: int
    """Of the whole training, there and back, over the pairs of tokens that see each other."""
    tokens: int
    steps: int
    kv_cache_bytes_per_token: int
    """Bytes that one token leaves in an fp32 cache of keys and values; 0 where there is none."""


def training_cost(recipe: Recipe) -> TrainingCost:
    config, training = recipe.transformer_config, recipe.training
    per_step = training.batch_size * flops_per_sequence(config, recipe.data.seq_len)
    kept = 0
    if config.form != "encoder":
        kept = kv_cache_size(config, batch_size=1, context=1, source_len=1, dtype="fp32").bytes_per_token
    return TrainingCost(
        parameters=count_parameters(config).total,
        flops=training.max_steps * per_step,
        tokens=training.max_steps * training.batch_size * recipe.data.seq_len,
        steps=training.max_steps,
        kv_cache_bytes_per_token=kept,
    )


def flops_per_sequence(config: Config, seq_len: int) -> int:
    """Of training on one sequence."""
    return size(config, batch_size=1, context=seq_len, mode="train", dtype="fp32").flops.total_visible


def match_budget(name: str, recipe: Recipe, baseline: Recipe, match: BudgetKind) -> Recipe:
    """The variant with the first one's budget."""
    if match == "tokens":
        return recipe
    if match == "parameters":
        model = _match_parameters(name, recipe.transformer_config, count_parameters(baseline.transformer_config).total)
        return recipe.replace(model=to_dict(model))
    return _match_flops(name, recipe, training_cost(baseline).flops)


def _match_parameters(name: str, config: Config, target: int) -> Config:
    """The FFNs, all of them alike, made wider or narrower until the whole has so many parameters."""

    def scaled(factor: float) -> Config:
        return map_ffns(config, lambda old: old.replace(hidden=max(1, round(factor * old.hidden_dim(config.d_model)))))

    low, high = 0.0, 1.0
    while count_parameters(scaled(high)).total < target and high < 1e6:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if count_parameters(scaled(middle)).total < target else (low, middle)
    found = min((scaled(low), scaled(high)), key=lambda each: abs(count_parameters(each).total - target))
    has = count_parameters(found).total
    if abs(has - target) > PARAMETER_RTOL * target:
        raise InputError(
            f"'{name}' cannot have {target:,} parameters by its FFN's width alone ({has:,} is as near as it comes);"
            " vary less, or compare at equal tokens or flops"
        )
    return found


def _match_flops(name: str, recipe: Recipe, target: int) -> Recipe:
    """So many steps that the whole training takes the same FLOPs, to the nearest step."""
    own = training_cost(recipe)
    steps = round(target * own.steps / own.flops)
    if steps < 1:
        raise InputError(
            f"one step of '{name}' takes more FLOPs than the first variant's whole training; raise training.max_steps"
        )
    return recipe.replace(training=recipe.training.replace(max_steps=steps))
