"""Objective of GRPO: the tokens of sampled completions, with their advantages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.model import Transformer
from cutaway.train.loss.chunked_cross_entropy import (
    LossSums,
    LossTargets,
    MetricSum,
    select_targets,
    to_device_async,
)
from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.loss.grpo import GRPOLossOptions, grpo_token_loss
from cutaway.train.loss.token_log_probs import token_log_probs
from cutaway.train.objectives.objective import Objective
from cutaway.train.objectives.reference_model import ReferenceModel

LossType = Literal["grpo", "dr_grpo", "dapo"]


@dataclass(frozen=True, kw_only=True)
class GRPOObjective(Objective):
    """Completions with their prompts, padded on the right. The targets are the tokens of the completions.

    The loss of a step is the sum of `token_weights` · loss over all targets, divided by the sum of `weights`, which
    has one number for the whole micro-batch.
    """

    token_weights: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B 1"]
    options: GRPOLossOptions
    temperature: float = 1.0
    old_log_probs: Float[Tensor, "B T"] | None = None
    """Log-probabilities when the completions were sampled. None in the first iteration, where they are those of this
    forward pass, so that the ratio is exactly 1."""
    reference: ReferenceModel | None = None
    record_log_probs: Callable[[Tensor], None] | None = None
    """Called with the log-probabilities (B, T) of a forward pass with gradients."""

    def loss(self, model: Transformer, options: CrossEntropyOptions = CrossEntropyOptions()) -> LossSums:
        """Run the model, and return the loss summed over the tokens of the completions."""
        selected = self.loss_targets or self.select_targets().to(model.device)
        log_probs = self.log_probs(model, selected)
        if self.record_log_probs is not None and torch.is_grad_enabled():
            self.record_log_probs(log_probs.detach())
        reference_log_probs = None
        if self.reference is not None:
            with self.reference.use(model) as reference:
                reference_log_probs = self.log_probs(reference, selected)
        old = self.old_log_probs
        old_log_probs = log_probs.detach() if old is None else old.to(log_probs.dtype)
        advantages = self.advantages.to(log_probs.dtype)
        tokens = grpo_token_loss(log_probs, old_log_probs, advantages, reference_log_probs, self.options)
        weights, is_target = self.token_weights.to(log_probs.dtype), (self.token_weights != 0).to(log_probs.dtype)
        loss, count = (weights * tokens.loss).sum(), is_target.sum()
        metrics = {
            "entropy": MetricSum(-(is_target * log_probs.detach()).sum(), count),
            "clip_ratio": MetricSum((is_target * tokens.is_clipped).sum(), count),
        }
        if tokens.kl is not None:
            metrics["kl"] = MetricSum((is_target * tokens.kl).sum(), count)
        return LossSums(loss, selected.total_weight, loss.detach(), metrics)

    def log_probs(self, model: Transformer, selected: LossTargets) -> Float[Tensor, "B T"]:
        """Log-probabilities of the tokens of the completions at the sampling temperature; 0 at other positions."""
        assert isinstance(model.head, nn.Module)
        x = self.hidden_states(model)
        return token_log_probs(model.head, x.flatten(0, 1), selected, temperature=self.temperature).view(x.shape[:2])

    @property
    def num_targets(self) -> float:
        return float((self.token_weights != 0).sum())

    def select_targets(self) -> LossTargets:
        return select_targets(self.targets.flatten(), self.token_weights.flatten())

    def to(self, device: torch.device | str) -> Self:
        old = self.old_log_probs
        return replace(
            super().to(device),
            token_weights=to_device_async(self.token_weights, device),
            advantages=to_device_async(self.advantages, device),
            old_log_probs=None if old is None else to_device_async(old, device),
        )


def loss_normalizer(num_tokens: Int[Tensor, " B"], loss_type: LossType) -> float:
    """Number by which the loss of completions with these lengths is divided: of tokens ('dapo'), or of completions."""
    return float(num_tokens.sum()) if loss_type == "dapo" else float(len(num_tokens))


def grpo(
    tokens: Int[Tensor, "B T1"],
    prompt_lengths: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    advantages: Float[Tensor, " B"],
    *,
    loss_type: LossType,
    max_new_tokens: int,
    options: GRPOLossOptions,
    temperature: float = 1.0,
    reference: ReferenceModel | None = None,
) -> GRPOObjective:
    """Objective of completions, which are the tokens from `prompt_lengths[b]` to `lengths[b]` of row b.

    Each completion has at least one token. Padding is on the right, where causal attention masks it for all tokens that
    have targets.
    """
    position = torch.arange(1, tokens.shape[1])
    is_target = ((position >= prompt_lengths[:, None]) & (position < lengths[:, None])).double()
    num_tokens = lengths - prompt_lengths
    token_weight = {
        "dapo": torch.ones(1),
        "grpo": 1 / num_tokens.double(),
        "dr_grpo": torch.ones(1).double() / max_new_tokens,
    }
    return GRPOObjective(
        (tokens[:, :-1],),
        tokens[:, 1:],
        torch.tensor([[loss_normalizer(num_tokens, loss_type)]]),
        token_weights=is_target * token_weight[loss_type].double()[:, None],
        advantages=advantages[:, None],
        options=options,
        temperature=temperature,
        reference=reference,
    )
