"""Recipe schema of objective grpo: reward functions, sampling, and the terms of the loss."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat

from cutaway.config.node import ConfigNode, FiniteFloat, PositiveFloat, PositiveInt, Probability


class RewardFunctionConfig(ConfigNode):
    """A reward function and its weight in the sum of the rewards."""

    function: str
    """A Python file and a function in it, as 'rewards.py:correct', or the name of a built-in reward (exact_match,
    last_number). The file is code that runs with your rights when training starts."""
    weight: FiniteFloat = 1.0


def _read_rewards(value: Any) -> Any:
    """Accept one reward instead of a list, and a string instead of a table."""
    items = [value] if isinstance(value, str | Mapping | RewardFunctionConfig) else value
    if not isinstance(items, list | tuple):
        return items
    return tuple({"function": item} if isinstance(item, str) else item for item in items if item != "")


class GRPOConfig(ConfigNode):
    """Group relative policy optimization (GRPO): reinforcement learning from rewards of sampled completions.

    A step samples num_generations completions of each of training.batch_size prompts with the model itself, and rewards
    them. The advantage of a completion is its reward relative to the other completions of the same prompt.
    """

    aux_loss_coef: ClassVar[float] = 0.0
    z_loss_coef: ClassVar[float] = 0.0
    kind: Literal["grpo"] = "grpo"
    reward: Annotated[tuple[RewardFunctionConfig, ...], BeforeValidator(_read_rewards)] = ()
    """Reward functions: 'FILE.py:FUNCTION' or the name of a built-in reward, or a list of them. With weights:
    [{ function = "rewards.py:correct", weight = 1.0 }, …]. The reward of a completion is the weighted sum."""
    num_generations: Annotated[int, Field(strict=True, ge=2, lt=2**16)] = 8
    """Number of completions per prompt (group size)."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens of a completion. Longer prompts than data.seq_len − max_new_tokens are left out."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. The log-probabilities in the loss have the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of the tokens that are sampled from. The loss does not consider it, as in TRL."""
    beta: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the reference model, the checkpoint before training. 0: no reference."""
    clip_epsilon: Probability = 0.2
    """The probability ratio of a token is clipped to 1 − clip_epsilon and 1 + clip_epsilon. It has no effect if
    num_iterations is 1, where the ratio is 1."""
    clip_epsilon_high: NonNegativeFloat | None = None
    """Upper clip range, if it differs from clip_epsilon; 0.28 in DAPO."""
    num_iterations: PositiveInt = 1
    """Number of optimizer steps per batch of completions (μ in the paper)."""
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    """Normalization of the loss. 'grpo': mean over tokens of a completion, then over completions. 'dr_grpo': sum over
    tokens, divided by max_new_tokens and the number of completions. 'dapo': mean over all tokens of the batch."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation by which advantages are divided: that of the rewards of the group, of the batch, or none."""
