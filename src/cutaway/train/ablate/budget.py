"""Training budgets: compute a variant's cost, and match its number of parameters or FLOPs to the first variant."""

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
"""Relative tolerance within which two numbers of parameters count as equal."""


@dataclass(frozen=True)
class TrainingCost:
    """Cost of training a variant, computed from its config."""

    parameters: int
    flops: int
    """Number of FLOPs of the whole training, forward and backward. Attention counts visible query-key pairs only."""
    tokens: int
    steps: int
    kv_cache_bytes_per_token: int
    """Number of bytes per token of an fp32 KV cache. 0 for encoders."""


def training_cost(recipe: Recipe) -> TrainingCost:
    config, training = recipe.transformer_config, recipe.training
    per_step = training.batch_size * _flops_per_sequence(config, recipe.data.seq_len)
    kv_cache_bytes = 0
    if config.form != "encoder":
        kv_cache_bytes = kv_cache_size(config, batch_size=1, context=1, source_len=1, dtype="fp32").bytes_per_token
    return TrainingCost(
        parameters=count_parameters(config).total,
        flops=training.max_steps * per_step,
        tokens=training.max_steps * training.batch_size * recipe.data.seq_len,
        steps=training.max_steps,
        kv_cache_bytes_per_token=kv_cache_bytes,
    )


def _flops_per_sequence(config: Config, seq_len: int) -> int:
    """Number of FLOPs of training on one sequence, forward and backward."""
    return size(config, batch_size=1, context=seq_len, mode="train", dtype="fp32").flops.total_visible


def match_budget(name: str, recipe: Recipe, baseline: Recipe, match: BudgetKind) -> Recipe:
    """Return the recipe of a variant, changed so that its `match` budget equals the budget of the baseline.

    The FFN width is changed to match parameters, and max_steps to match FLOPs. For tokens, nothing is changed.
    """
    if match == "tokens":
        return recipe
    if match == "parameters":
        model = _match_parameters(name, recipe.transformer_config, count_parameters(baseline.transformer_config).total)
        return recipe.replace(model=to_dict(model))
    return _match_flops(name, recipe, training_cost(baseline).flops)


def _match_parameters(name: str, config: Config, target: int) -> Config:
    """Scale the hidden width of all FFNs by one factor until the model has `target` parameters (bisection)."""

    def scale_ffns(factor: float) -> Config:
        return map_ffns(config, lambda ffn: ffn.replace(hidden=max(1, round(factor * ffn.hidden_dim(config.d_model)))))

    low, high = 0.0, 1.0
    while count_parameters(scale_ffns(high)).total < target and high < 1e6:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if count_parameters(scale_ffns(middle)).total < target else (low, middle)
    closest = min((scale_ffns(low), scale_ffns(high)), key=lambda each: abs(count_parameters(each).total - target))
    num_parameters = count_parameters(closest).total
    if abs(num_parameters - target) > PARAMETER_RTOL * target:
        raise InputError(
            f"no FFN width gives '{name}' the {target:,} parameters of the first variant (the closest is"
            f" {num_parameters:,}); use a value closer to the first variant, or match tokens or flops"
        )
    return closest


def _match_flops(name: str, recipe: Recipe, target: int) -> Recipe:
    """Set max_steps so that the training takes `target` FLOPs, to the nearest step."""
    cost = training_cost(recipe)
    steps = round(target * cost.steps / cost.flops)
    if steps < 1:
        raise InputError(
            f"one step of '{name}' takes more FLOPs than all steps of the first variant; raise training.max_steps"
        )
    return recipe.replace(training=recipe.training.replace(max_steps=steps))
