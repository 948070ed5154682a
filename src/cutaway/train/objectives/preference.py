"""Objectives of preference learning: DPO, IPO and ORPO on pairs of answers, KTO on answers with a label.

The names of the metrics are those of TRL: rewards/chosen is beta times the log ratio to the reference model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cutaway.model import Transformer
from cutaway.train.data.preference_dataset import AnswerBatch, LabeledBatch, PairBatch
from cutaway.train.loss.chunked_cross_entropy import LossSums, LossTargets, MetricSum, select_targets, to_device_async
from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.loss.preference import dpo_losses, ipo_losses, kto_losses, log_odds_ratios
from cutaway.train.loss.token_log_probs import SequenceLogProbs, sequence_log_probs
from cutaway.train.objectives.objective import Objective
from cutaway.train.objectives.reference_model import ReferenceModel, eval_mode
from cutaway.train.recipe.preference_objectives import DPOConfig, KTOConfig, ORPOConfig


@dataclass(frozen=True, kw_only=True)
class AnswersObjective(Objective):
    """Answers with their prompts, one per row. `weights` has one weight per pair or per labeled answer."""

    is_target: Bool[Tensor, "R T"]
    """Whether the target at each position is a token of the answer."""

    @classmethod
    def from_answers(cls, answers: AnswerBatch, num_examples: int, **fields: object) -> Self:
        """Objective whose rows predict the next token. `num_examples`: number of pairs, or of labeled answers."""
        tokens, is_target, _ = answers
        weights = torch.ones(num_examples)
        return cls((tokens[:, :-1],), tokens[:, 1:], weights, is_target=is_target[:, 1:], **fields)  # type: ignore[arg-type]

    def select_targets(self) -> LossTargets:
        return select_targets(self.targets.flatten(), self.is_target.flatten().float())

    @property
    def num_targets(self) -> float:
        return float(self.is_target.sum()) if bool(self.weights.any()) else 0.0

    def log_probs(self, model: Transformer) -> SequenceLogProbs:
        """Log-probabilities of the targets under a model."""
        x = self.hidden_states(model)
        selected = self.loss_targets or self.select_targets().to(x.device)
        assert isinstance(model.head, torch.nn.Module)
        return sequence_log_probs(model.head, x, selected)

    def reference_log_probs(self, reference: ReferenceModel, policy: Transformer) -> SequenceLogProbs:
        """Log-probabilities of the targets under the reference model, without gradient."""
        with reference.use(policy) as model:
            return self.log_probs(model)


@dataclass(frozen=True, kw_only=True)
class DPOObjective(AnswersObjective):
    """Pairs: the first half of the rows are chosen answers, the second half are the rejected ones."""

    config: DPOConfig
    reference: ReferenceModel

    def loss(self, model: Transformer, options: CrossEntropyOptions = CrossEntropyOptions()) -> LossSums:
        policy, reference = self.log_probs(model), self.reference_log_probs(self.reference, model)
        log_ratios = policy.sums - reference.sums
        beta, (chosen, rejected) = self.config.beta, log_ratios.chunk(2)
        if self.config.loss_type == "ipo":
            chosen_mean, rejected_mean = (policy.means - reference.means).chunk(2)
            losses = ipo_losses(chosen_mean, rejected_mean, beta)
        else:
            losses = dpo_losses(chosen, rejected, beta)
        weights = to_device_async(self.weights, losses.device).to(losses.dtype)
        metrics = _pair_metrics(beta * log_ratios, policy.sums, weights)
        return _loss_sums((weights * losses).sum(), weights, metrics)


@dataclass(frozen=True, kw_only=True)
class ORPOObjective(AnswersObjective):
    """Pairs as in DPOObjective. The chosen answers and their prompts are also targets of the cross-entropy."""

    config: ORPOConfig
    is_token: Bool[Tensor, "R T"]
    """Whether the target at each position is not padding."""
    sums: Mapping[str, Tensor] | None = None
    """Numbers of pairs and of tokens of the cross-entropy in the whole batch."""

    def select_targets(self) -> LossTargets:
        """All tokens of chosen answers and their prompts, and the rejected answers."""
        chosen, rejected = self.is_token.chunk(2)[0], self.is_target.chunk(2)[1]
        return select_targets(self.targets.flatten(), torch.cat([chosen, rejected]).flatten().float())

    def batch_sums(self, module: Callable[[Objective], LossSums]) -> dict[str, Tensor]:
        counts = self.is_token.chunk(2)[0].sum(-1)
        return {"num_pairs": self.weights.double().sum(), "num_nll_tokens": (self.weights.double() * counts).sum()}

    def with_batch_sums(self, sums: Mapping[str, Tensor]) -> Self:
        return replace(self, sums=sums)

    def loss(self, model: Transformer, options: CrossEntropyOptions = CrossEntropyOptions()) -> LossSums:
        log_probs = self.log_probs(model).tokens  # (R, T)
        device, dtype = log_probs.device, log_probs.dtype
        is_target = to_device_async(self.is_target, device)
        means = (log_probs * is_target).sum(-1) / is_target.sum(-1).clamp(min=1)
        log_odds = log_odds_ratios(*means.chunk(2))
        log_sigmoids = torch.nn.functional.logsigmoid(log_odds)
        weights = to_device_async(self.weights, device).to(dtype)
        sums = self.sums or self.batch_sums(lambda objective: objective.loss(model, options))
        nll = -(weights * log_probs.chunk(2)[0].sum(-1)).sum()
        # The step divides by the number of pairs, but the cross-entropy is a mean over tokens.
        loss = (
            nll * float(sums["num_pairs"] / sums["num_nll_tokens"].clamp(min=1))
            - self.config.beta * (weights * log_sigmoids).sum()
        )
        num_micro_batch_tokens = to_device_async(self.is_token.chunk(2)[0].sum(-1), device)
        metrics = _pair_metrics(self.config.beta * means, means, weights) | {
            "nll_loss": MetricSum(nll.detach(), (weights * num_micro_batch_tokens).sum()),
            "log_odds_ratio": _weighted(log_sigmoids, weights),
            "log_odds_chosen": _weighted(log_odds, weights),
        }
        return _loss_sums(loss, weights, metrics)


@dataclass(frozen=True, kw_only=True)
class KLObjective(AnswersObjective):
    """Prompts with answers to other prompts, for KTO's estimate of the divergence from the reference model."""

    reference: ReferenceModel

    @torch.no_grad()
    def loss(self, model: Transformer, options: CrossEntropyOptions = CrossEntropyOptions()) -> LossSums:
        """Log ratios, as the metric kl. There is no loss."""
        with eval_mode(model):
            log_ratios = self.log_probs(model).sums
        log_ratios = log_ratios - self.reference_log_probs(self.reference, model).sums
        weights = to_device_async(self.weights, log_ratios.device).to(log_ratios.dtype)
        return _loss_sums(log_ratios.new_zeros(()), weights, {"kl": _weighted(log_ratios, weights)})


@dataclass(frozen=True, kw_only=True)
class KTOObjective(AnswersObjective):
    """Answers that are desirable or undesirable."""

    config: KTOConfig
    reference: ReferenceModel
    is_desirable: Bool[Tensor, " B"]
    mismatched: KLObjective
    sums: Mapping[str, Tensor] | None = None
    """Sums over the whole batch: log ratios of the mismatched answers, and numbers of answers."""

    def to(self, device: torch.device | str) -> Self:
        return replace(super().to(device), mismatched=self.mismatched.to(device))

    def batch_sums(self, module: Callable[[Objective], LossSums]) -> dict[str, Tensor]:
        mismatched = replace(self.mismatched, weights=self.weights)
        [kl] = module(mismatched).metrics.values()
        weights, is_desirable = (to_device_async(each, kl.total.device) for each in (self.weights, self.is_desirable))
        return {
            "kl": kl.total,
            "num_desirable": (weights * is_desirable).sum().double(),
            "num_undesirable": (weights * ~is_desirable).sum().double(),
        }

    def with_batch_sums(self, sums: Mapping[str, Tensor]) -> Self:
        return replace(self, sums=sums)

    def loss(self, model: Transformer, options: CrossEntropyOptions = CrossEntropyOptions()) -> LossSums:
        sums = self.sums or self.batch_sums(lambda objective: objective.loss(model, options))
        log_probs = self.log_probs(model).sums
        log_ratios = log_probs - self.reference_log_probs(self.reference, model).sums
        device, dtype, config = log_ratios.device, log_ratios.dtype, self.config
        weights, is_desirable = to_device_async(self.weights, device).to(dtype), self.is_desirable.to(device)
        num_desirable, num_undesirable = sums["num_desirable"], sums["num_undesirable"]
        num_answers = num_desirable + num_undesirable
        kl = (sums["kl"] / num_answers.clamp(min=1)).clamp(min=0).to(device, dtype)
        losses = kto_losses(
            log_ratios, is_desirable, kl, config.beta, config.desirable_weight, config.undesirable_weight
        )
        rewards, chosen, rejected = config.beta * log_ratios, weights * is_desirable, weights * ~is_desirable
        # The margin is a difference of two means. The rewards are scaled so that it is their mean over all answers.
        scale = torch.where(is_desirable, num_answers / num_desirable, -num_answers / num_undesirable)
        metrics = {
            "rewards/chosen": _weighted(rewards, chosen),
            "rewards/rejected": _weighted(rewards, rejected),
            "rewards/margins": _weighted(rewards * scale, weights * (num_desirable * num_undesirable > 0)),
            "logps/chosen": _weighted(log_probs, chosen),
            "logps/rejected": _weighted(log_probs, rejected),
            "kl": _weighted(kl, weights),
        }
        return _loss_sums((weights * losses).sum(), weights, metrics)


def dpo(batch: PairBatch, config: DPOConfig, reference: ReferenceModel) -> DPOObjective:
    """DPO or IPO on a batch of pairs."""
    return DPOObjective.from_answers(batch.answers, batch.num_pairs, config=config, reference=reference)


def orpo(batch: PairBatch, config: ORPOConfig) -> ORPOObjective:
    """ORPO on a batch of pairs."""
    is_token = batch.answers.is_token[:, 1:]
    return ORPOObjective.from_answers(batch.answers, batch.num_pairs, config=config, is_token=is_token)


def kto(batch: LabeledBatch, config: KTOConfig, reference: ReferenceModel) -> KTOObjective:
    """KTO on a batch of labeled answers."""
    num_answers = len(batch.is_desirable)
    return KTOObjective.from_answers(
        batch.answers,
        num_answers,
        config=config,
        reference=reference,
        is_desirable=batch.is_desirable,
        mismatched=KLObjective.from_answers(batch.mismatched, num_answers, reference=reference),
    )


def _pair_metrics(
    rewards: Float[Tensor, " R"], log_probs: Float[Tensor, " R"], weights: Float[Tensor, " B"]
) -> dict[str, MetricSum]:
    chosen, rejected = rewards.detach().chunk(2)
    chosen_log_probs, rejected_log_probs = log_probs.chunk(2)
    return {
        "rewards/chosen": _weighted(chosen, weights),
        "rewards/rejected": _weighted(rejected, weights),
        "rewards/accuracies": _weighted((chosen > rejected).to(weights.dtype), weights),
        "rewards/margins": _weighted(chosen - rejected, weights),
        "logps/chosen": _weighted(chosen_log_probs, weights),
        "logps/rejected": _weighted(rejected_log_probs, weights),
    }


def _weighted(values: Tensor, weights: Tensor) -> MetricSum:
    return MetricSum((values.detach() * weights).sum(), weights.sum())


def _loss_sums(loss: Tensor, weights: Tensor, metrics: Mapping[str, MetricSum]) -> LossSums:
    return LossSums(loss, weights.sum(), loss.detach(), metrics)
