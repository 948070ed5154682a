"""Rollouts of a training step: completions of the batch's prompts by the model itself, with rewards and advantages.

Completions are sampled by the engine (`generate/engine`) from the weights in training, without a copy of them. The
random numbers of a completion depend only on (training.seed, rollout batch, data position, index in the group), so that
a resumed run and a run with other micro-batches have the same completions.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cutaway.eval_mode import eval_mode
from cutaway.generate.engine.config import build_engine_config, reduce_num_seqs_to_fit
from cutaway.generate.engine.engine import Engine
from cutaway.generate.engine.output import Completion
from cutaway.generate.generation_config import GenerationConfig
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer
from cutaway.train.data.prompt_encoder import PromptBatch
from cutaway.train.data.training_data import TrainingData
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.loss.grpo import GRPOLossOptions
from cutaway.train.objectives.grpo import GRPOObjective, grpo, loss_normalizer
from cutaway.train.objectives.reference_model import ReferenceModel
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.recipe.schema import Recipe
from cutaway.train.rollouts.advantages import compute_advantages, reward_metrics, total_rewards
from cutaway.train.rollouts.rewards import compute_rewards, load_reward_functions
from cutaway.train.seeds import derive_seed

MAX_NUM_SEQS = 512
"""Maximum number of completions that are generated at a time. Fewer if their KV cache does not fit in memory."""
NUM_SHOWN = 3
"""Number of completions that are shown at each evaluation."""
ROLLOUT_STREAM = 0x6770
"""Tells the seeds of rollouts apart from other seeds that are derived from training.seed."""


@dataclass
class RolloutBatch:
    """Completions of this rank for the prompts of a step, and their advantages."""

    index: int
    """Number of the rollout batch: step // num_iterations."""
    tokens: Int[Tensor, "N T1"]
    """Prompts and completions, padded on the right."""
    prompt_lengths: Int[Tensor, " N"]
    lengths: Int[Tensor, " N"]
    """Lengths of prompt and completion together."""
    advantages: Float[Tensor, " N"]
    metrics: Metrics
    old_log_probs: Float[Tensor, "N T"] | None = None
    """Log-probabilities in the first iteration; only if there are several."""


@dataclass
class RolloutSampler:
    """Samples completions for training steps and evaluations, and builds the objectives of micro-batches."""

    recipe: Recipe
    model: Transformer
    tokenizer: Tokenizer
    eos_token_ids: Sequence[int]
    data: TrainingData
    reference: ReferenceModel | None = None
    dist_context: DistributedContext = SINGLE_PROCESS
    batch: RolloutBatch | None = field(default=None, init=False)
    """The last rollouts. A step that is retried, or a further iteration, uses them again."""
    timings: Metrics = field(default_factory=dict, init=False)
    """Duration and throughput of the last rollouts."""

    def __post_init__(self) -> None:
        assert isinstance(self.recipe.objective, GRPOConfig)
        self.objective = self.recipe.objective
        self.reward_functions = load_reward_functions(self.objective.reward)
        self.names = [function.name for function in self.reward_functions]
        self.weights = torch.tensor([function.weight for function in self.reward_functions], dtype=torch.float64)
        high = self.objective.clip_epsilon_high
        low = self.objective.clip_epsilon
        self.loss_options = GRPOLossOptions(low, low if high is None else high, self.objective.beta)

    # Training

    def build_micro_batches(self, step: int, ranges: Sequence[tuple[int, int]]) -> list[GRPOObjective]:
        """Objectives of the micro-batches of this rank. A range (low, high) has indices of prompts in the batch.

        Completions are sampled in the first of the `num_iterations` steps that use them.
        """
        index, first, last = step // self.objective.num_iterations, ranges[0][0], ranges[-1][1]
        if self.batch is None or self.batch.index != index:
            self.batch = None
            self.batch = self._sample_batch(index, first, last)
        is_first_iteration = step % self.objective.num_iterations == 0
        if not is_first_iteration:
            self.timings = {}
        return [
            self._build_micro_batch(self.batch, low - first, high - first, is_first_iteration) for low, high in ranges
        ]

    def _build_micro_batch(self, batch: RolloutBatch, low: int, high: int, is_first: bool) -> GRPOObjective:
        loss_type, count = self.objective.loss_type, self.objective.num_generations
        rows = torch.arange(low * count, high * count) if high > low else torch.arange(1)
        weight = loss_normalizer(batch.lengths[rows] - batch.prompt_lengths[rows], loss_type) * (high > low)
        has_loss = high > low
        if not self.objective.beta:  # completions with advantage 0 have loss 0 and gradient 0
            has_loss &= bool(batch.advantages[rows].any())
            rows = rows[batch.advantages[rows] != 0] if has_loss else rows[:1]
        width = int(batch.lengths[rows].max())
        objective = grpo(
            batch.tokens[rows, :width],
            batch.prompt_lengths[rows],
            batch.lengths[rows],
            batch.advantages[rows],
            loss_type=loss_type,
            max_new_tokens=self.objective.max_new_tokens,
            options=self.loss_options,
            temperature=self.objective.temperature,
            reference=self.reference,
        )
        objective = replace(objective, weights=torch.full((1, 1), weight))
        if not has_loss:  # one completion without weight, because all ranks take part in the collectives
            objective = replace(objective, token_weights=torch.zeros_like(objective.token_weights))
        elif self.objective.num_iterations > 1 and is_first:
            objective = replace(objective, record_log_probs=partial(_record_log_probs, batch, rows))
        elif self.objective.num_iterations > 1:
            assert batch.old_log_probs is not None
            objective = replace(objective, old_log_probs=batch.old_log_probs[rows, : width - 1])
        return objective.to(self.model.device)

    def _sample_batch(self, index: int, low: int, high: int) -> RolloutBatch:
        """Sample and reward completions of the prompts low … high − 1 of a rollout batch."""
        objective, seed = self.objective, self.recipe.training.seed
        start = time.perf_counter()
        first = index * self.recipe.training.batch_size + low
        prompts: PromptBatch = self.data.train.get_batch(first, high - low).repeat(objective.num_generations)
        seeds = [
            derive_seed(seed, ROLLOUT_STREAM, index, position, generation)
            for position in range(first, first + high - low)
            for generation in range(objective.num_generations)
        ]
        completions = self.generate(prompts.prompt_ids, seeds, temperature=objective.temperature, top_p=objective.top_p)
        num_tokens = sum(len(completion.tokens) for completion in completions)
        seconds = time.perf_counter() - start
        rewards, totals = self.reward(prompts, completions)
        self.timings = {
            "rollout_seconds": time.perf_counter() - start,
            "reward_seconds": time.perf_counter() - start - seconds,
            "rollout_tokens_per_second": num_tokens / seconds,
        }
        advantages = compute_advantages(totals, objective.num_generations, objective.scale_rewards, self.dist_context)
        metrics = reward_metrics(rewards, totals, self.names, objective.num_generations, self.dist_context)
        sequences = [
            [*ids, *completion.tokens] for ids, completion in zip(prompts.prompt_ids, completions, strict=True)
        ]
        width = max(map(len, sequences))
        return RolloutBatch(
            index,
            torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]),
            torch.tensor([len(ids) for ids in prompts.prompt_ids]),
            torch.tensor([len(sequence) for sequence in sequences]),
            advantages,
            metrics | self._completion_metrics(completions),
            torch.zeros(len(sequences), width - 1, dtype=torch.float64) if self.has_state else None,
        )

    def reward(self, prompts: PromptBatch, completions: Sequence[Completion]) -> tuple[Tensor, Tensor]:
        """Rewards of completions by function (N, F), and their weighted sums (N)."""
        texts = [completion.text or "" for completion in completions]
        tokens = [completion.tokens for completion in completions]
        rewards = compute_rewards(self.reward_functions, prompts.prompts, texts, tokens, prompts.columns)
        return rewards, total_rewards(rewards, self.weights)

    def _completion_metrics(self, completions: Sequence[Completion]) -> Metrics:
        count, length, truncated = (
            self.dist_context.sum_over_dp(float(value))
            for value in (
                len(completions),
                sum(len(completion.tokens) for completion in completions),
                sum(completion.finish_reason == "length" for completion in completions),
            )
        )
        return {"completion_length": length / max(1.0, count), "frac_truncated": truncated / max(1.0, count)}

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float, top_p: float = 1.0
    ) -> list[Completion]:
        """One completion per prompt, by the current weights in eval mode. The KV cache is freed on return.

        Decode steps are not compiled, because fast decode steps would copy the weights. Suppressed tokens, penalties
        and other settings of the checkpoint's generation config are not used: the loss assumes that tokens are sampled
        from softmax(logits / temperature).
        """
        max_new_tokens = self.objective.max_new_tokens
        params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
        config = build_engine_config(
            self.model,
            GenerationConfig(eos_token_ids=tuple(self.eos_token_ids)),
            max_num_seqs=min(MAX_NUM_SEQS, len(prompt_ids)),
            required_len=max(map(len, prompt_ids)) + max_new_tokens,
            compile=False,
        )
        engine = Engine(reduce_num_seqs_to_fit(config), tokenizer=self.tokenizer, max_waiting=len(prompt_ids))
        with eval_mode(self.model):
            requests = [engine.submit(ids, params, seed=seed) for ids, seed in zip(prompt_ids, seeds, strict=True)]
            while engine.step():
                pass
        return [request.result() for request in requests]

    @property
    def step_metrics(self) -> Metrics:
        """Rewards and lengths of the completions of the last step, and the duration of their rollout, if any."""
        return {} if self.batch is None else {**self.batch.metrics, "timing": self.timings}

    # Evaluation

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Mean reward of greedily decoded completions of validation prompts, and a few of them as a sample.

        eval_loss is −eval_reward, for early stopping and the best checkpoint.
        """
        count = min(self.recipe.eval.num_sequences, self.data.num_validation_sequences)
        [(low, high)] = self.dist_context.micro_batch_ranges(count, 1)
        prompts: PromptBatch = self.data.validation.get_batch(low, max(1, high - low))
        completions = self.generate(prompts.prompt_ids, [0] * len(prompts.prompt_ids), temperature=0.0)
        rewards, totals = self.reward(prompts, completions)
        shown = zip(prompts.prompt_ids, completions, totals.tolist(), strict=True)
        sample = "\n".join(
            f"{self.tokenizer.decode(ids)} → {completion.text}  [reward {reward:g}]"
            for ids, completion, reward in list(shown)[:NUM_SHOWN]
        )
        if high == low:  # this rank has no validation prompt
            rewards, totals, completions = rewards[:0], totals[:0], []
        metrics = reward_metrics(rewards, totals, self.names, 1, self.dist_context)
        names = ["reward", *(name for name in metrics if name.startswith("reward/"))]
        metrics = {name: metrics[name] for name in names} | self._completion_metrics(completions)
        return {
            "eval_loss": -metrics["reward"],
            **{f"eval_{name}": value for name, value in metrics.items()},
            "sample": sample,
        }

    # State, for runs with several iterations per rollout batch

    @property
    def has_state(self) -> bool:
        """Whether a step may depend on the completions of an earlier step."""
        return self.objective.num_iterations > 1

    def state_dict(self) -> dict[str, Tensor]:
        """The last rollouts, which the remaining iterations of a resumed run use."""
        batch = self.batch
        if batch is None or batch.old_log_probs is None:
            return {}
        return {
            "index": torch.tensor(batch.index),
            "tokens": batch.tokens,
            "prompt_lengths": batch.prompt_lengths,
            "lengths": batch.lengths,
            "advantages": batch.advantages,
            "old_log_probs": batch.old_log_probs,
            "metrics": torch.tensor([batch.metrics[name] for name in self._metric_names], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not state:
            return
        values: dict[str, Any] = dict(state)
        metrics = dict(zip(self._metric_names, values.pop("metrics").tolist(), strict=True))
        self.batch = RolloutBatch(**values | {"index": int(values["index"])}, metrics=metrics)

    @property
    def _metric_names(self) -> list[str]:
        """Names of the metrics of a rollout batch, in their order in the log."""
        by_function = [f"reward/{name}" for name in self.names] if len(self.names) > 1 else []
        return ["reward", "reward_std", "frac_reward_zero_std", *by_function, "completion_length", "frac_truncated"]


def _record_log_probs(batch: RolloutBatch, rows: Int[Tensor, " n"], log_probs: Tensor) -> None:
    """Store the log-probabilities of the first iteration."""
    assert batch.old_log_probs is not None
    batch.old_log_probs[rows, : log_probs.shape[1]] = log_probs.double().cpu()
