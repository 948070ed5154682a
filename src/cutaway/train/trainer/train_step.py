"""One training step, which depends only on the weights, the optimizer state and the step number."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cutaway.train.data.datasets import Dataset
from cutaway.train.data.training_data import TrainingData
from cutaway.train.distributed.parallelize import no_sync_until_last
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.kernels.compile import compile_for_training
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.loss.chunked_cross_entropy import LossSums
from cutaway.train.objectives.objective import Objective, ObjectiveFn
from cutaway.train.optim.lr_scheduler import lr_factor
from cutaway.train.optim.mixed_precision import GradScaler
from cutaway.train.optim.optimizer import OptimizersContainer, total_grad_norm
from cutaway.train.recipe.schema import Recipe
from cutaway.train.rollouts.sampler import RolloutSampler
from cutaway.train.seeds import derive_seed
from cutaway.train.trainer.bad_step_policy import BadStepPolicy, TrainingError, is_out_of_memory, raise_on_out_of_memory
from cutaway.train.trainer.layer_stats import UpdateStats
from cutaway.train.trainer.metric_means import metric_means
from cutaway.train.trainer.training_module import TrainingModule


class StepSums(NamedTuple):
    """Sums over the targets of a step."""

    cross_entropy: Tensor
    """Sum of the cross-entropy on this rank."""
    weight: float
    """Weight of all targets, on all ranks."""
    num_targets: float
    """Number of target tokens, on all ranks."""
    objective_metrics: dict[str, Tensor]
    """Means of the metrics of the objective, over all ranks."""


@dataclass
class TrainStepRunner:
    """Runs training steps. Metrics are returned as tensors on the device, so that a step does not synchronize."""

    recipe: Recipe
    training_module: TrainingModule
    optimizer: OptimizersContainer
    data: TrainingData
    objective_fn: ObjectiveFn
    step_policy: BadStepPolicy
    grad_scaler: GradScaler | None = None
    """Dynamic loss scale for fp16. None for other precisions."""
    wrapped_module: nn.Module | None = None
    """Module that a step calls, e.g. a DDP wrapper of `training_module`. None: `training_module` itself is called."""
    dist_context: DistributedContext = SINGLE_PROCESS
    rollouts: RolloutSampler | None = None
    """Samples the completions that a step trains on, for objective grpo."""
    update_stats: UpdateStats | None = field(default=None, init=False)
    """Update statistics of the last step. None if the last step did not record them."""

    def __post_init__(self) -> None:
        self.training = self.recipe.training
        # Blocks are not compiled with tensor parallelism, where projections cannot be fused, or with an auxiliary loss,
        # because compiled blocks would not call the hooks on the routers.
        eager = self.dist_context.tp_size > 1 or bool(self.training_module.aux_loss_coef)
        compile_blocks = False if eager else self.training.compile
        self.compiled_context = compile_for_training(
            self.training_module.model, compile_blocks, single_process=self.dist_context.world_size == 1
        )

    def run(self, step: int, *, record_update_stats: bool = False) -> Metrics:
        """Run step `step`, counted from 0, and return its metrics.

        A step is forward pass, backward pass, gradient clipping and update; `step_policy` may skip the update. Metrics
        may be tensors that the device has not computed yet.
        """
        cross_entropy, weight, num_targets, objective_metrics = self.forward_backward_with_oom_retry(step)
        grad_norm, scale_metrics = total_grad_norm(self.training_module, self.dist_context), {}
        if self.grad_scaler is not None:
            scale_metrics["loss_scale"] = self.grad_scaler.scale.clone()
            self.grad_scaler.update(~torch.isfinite(grad_norm))
            grad_norm = grad_norm / scale_metrics["loss_scale"]
        factor = lr_factor(self.recipe.schedule, step, self.training.max_steps)
        skip, verdict = self.step_policy.check_grad_norm(grad_norm)
        loss_scale = scale_metrics.get("loss_scale", 1.0)
        self.update_stats = UpdateStats(self.optimizer.parameters, loss_scale) if record_update_stats else None
        with raise_on_out_of_memory("the optimizer state"):
            # Clip and unscale the gradient with one division, by max(1, ‖g‖ / grad_clip) · loss_scale.
            grad_divisor = (grad_norm / self.training.grad_clip).clamp(min=1.0) * loss_scale
            self.optimizer.step(factor, grad_divisor=grad_divisor, skip=skip)
        return {
            "step": step + 1,
            "loss": self.dist_context.sum_over_dp(cross_entropy) / weight,
            "grad_norm": grad_norm,
            "lr": factor * self.optimizer.lr,
            "num_tokens": int(num_targets),
            "verdict": verdict,
            **scale_metrics,
            **objective_metrics,
            **({} if self.rollouts is None else self.rollouts.step_metrics),
        }

    def forward_backward_with_oom_retry(self, step: int) -> StepSums:
        """Run `forward_backward`. If a single process runs out of memory, retry with more and smaller micro-batches."""
        while True:
            try:
                return self.forward_backward(step)
            except (RuntimeError, MemoryError) as error:
                is_distributed = self.dist_context.world_size > 1  # the other ranks would wait in a collective
                if not is_out_of_memory(error) or is_distributed:
                    raise
                self.step_policy.increase_grad_accum_steps(self.training.batch_size)
            self.optimizer.zero_grad()  # outside `except`: the exception kept the activations alive
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def forward_backward(self, step: int) -> StepSums:
        """Compute the gradient of the mean loss over all targets of the batch, on all ranks."""
        micro_batches = self.build_micro_batches(step)
        counts = torch.tensor(
            [[float(each.weights.sum()), each.num_targets] for each in micro_batches], dtype=torch.float64
        )
        weight, num_targets = self.dist_context.sum_over_dp(counts.sum(0)).tolist()
        if weight == 0:
            raise TrainingError(
                f"the batch of step {step + 1} has no target tokens; lower data.validation_split, or use longer texts"
            )
        self.optimizer.zero_grad()
        losses: list[LossSums] = []
        module = self.training_module if self.wrapped_module is None else self.wrapped_module
        with self.compiled_context():
            micro_batches = share_batch_sums(micro_batches, self.training_module, self.dist_context)
            for index, micro_batch in enumerate(micro_batches):
                # Seed of the dropout masks
                torch.manual_seed(derive_seed(self.training.seed, step, index, self.dist_context.dp_rank))
                with no_sync_until_last(module, index == len(micro_batches) - 1):
                    loss: LossSums = module(micro_batch)
                    # DDP and FSDP average gradients over ranks. Multiplying by dp_size turns the average into the sum.
                    mean = loss.loss * (self.dist_context.dp_size / weight)
                    torch.autograd.backward(mean if self.grad_scaler is None else mean * self.grad_scaler.scale)
                losses.append(loss._replace(loss=loss.loss.detach()))
        cross_entropy = torch.stack([loss.cross_entropy.double() for loss in losses]).sum()
        return StepSums(cross_entropy, weight, num_targets, metric_means(losses, self.dist_context))

    def build_micro_batches(self, step: int) -> list[Objective]:
        """Objectives of the micro-batches of this rank."""
        batch_size = self.training.batch_size
        ranges = self.dist_context.micro_batch_ranges(batch_size, self.step_policy.grad_accum_steps)
        if self.rollouts is not None:
            return list(self.rollouts.build_micro_batches(step, ranges))
        first = step * batch_size
        return [build_micro_batch(self.objective_fn, self.data.train, first + low, high - low) for low, high in ranges]


def metrics_to_python(metrics: Metrics) -> Metrics:
    """Convert tensors to Python numbers. This synchronizes with the device."""
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in metrics.items()}


def build_micro_batch(objective_fn: ObjectiveFn, dataset: Dataset, first: int, count: int) -> Objective:
    """Build the objective of the `count` sequences of the dataset that start at position `first`.

    If `count` is 0, the objective has one sequence of weight 0, so that the rank takes part in the collectives.
    """
    objective = objective_fn(dataset.get_batch(first, max(count, 1)), first)
    if count:
        return objective
    return replace(objective, weights=torch.zeros_like(objective.weights), loss_targets=None)


@torch.no_grad()
def share_batch_sums(
    micro_batches: Sequence[Objective], training_module: TrainingModule, dist_context: DistributedContext
) -> list[Objective]:
    """Pass the sums over the whole batch, on all ranks, to each micro-batch whose loss depends on them."""
    sums = [each.batch_sums(training_module) for each in micro_batches]
    names = list(sums[0])
    if not names:
        return list(micro_batches)
    local = torch.stack([torch.stack([each[name].double() for name in names]) for each in sums]).sum(0)
    totals = dict(zip(names, dist_context.sum_over_dp(local).unbind(), strict=True))
    return [each.with_batch_sums(totals) for each in micro_batches]
