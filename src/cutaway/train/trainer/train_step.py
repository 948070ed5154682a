"""One step: a function of the weights, the optimizer's state and the step's number, and of nothing else."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cutaway.train.data.data_loader import TrainingData
from cutaway.train.data.datasets import PositionalDataset
from cutaway.train.distributed.parallelize import no_sync_until_last
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.kernels.compile import compile_for_training
from cutaway.train.loss.chunked_cross_entropy import LossSums
from cutaway.train.objectives.objective import Objective, ObjectiveFn
from cutaway.train.optim.lr_scheduler import lr_factor
from cutaway.train.optim.mixed_precision import GradScaler
from cutaway.train.optim.optimizer import OptimizersContainer, total_grad_norm
from cutaway.train.recipe.schema import Recipe
from cutaway.train.seeds import derive_seed
from cutaway.train.trainer.layer_stats import UpdateStats
from cutaway.train.trainer.step_policy import StepPolicy, TrainingError, is_out_of_memory, raise_on_out_of_memory
from cutaway.train.trainer.training_module import TrainingModule

Metrics = dict[str, Any]
"""What a step has to tell; values may be tensors that a device has yet to compute."""


@dataclass
class TrainStepRunner:
    """Takes steps. What it returns is read later, when the device has come so far."""

    recipe: Recipe
    training_module: TrainingModule
    optimizer: OptimizersContainer
    data: TrainingData
    objective_fn: ObjectiveFn
    step_policy: StepPolicy
    grad_scaler: GradScaler | None = None
    """For fp16: what the gradient is larger by until it is used."""
    dist_context: DistributedContext = SINGLE_PROCESS
    wrapped_module: nn.Module | None = None
    """What is called in the training module's place where ranks have copies of it."""
    update_stats: UpdateStats | None = field(default=None, init=False)
    """What the last step did to each layer, if that was asked for."""

    def __post_init__(self) -> None:
        # Matrices in slices are not joined; what hooks watch, compiled blocks would not call again.
        plain = self.dist_context.tp_size > 1 or bool(self.recipe.objective.aux_loss_coef)
        compiled = False if plain else self.recipe.training.compile
        self.compiled_context = compile_for_training(
            self.training_module.model, compiled, single_process=self.dist_context.world_size == 1
        )

    def run(self, step: int, *, record_update_stats: bool = False) -> Metrics:
        """By the gradient, unless the policy skips it."""
        training = self.recipe.training
        entropy, weight = self.forward_backward_with_oom_retry(step)
        length, scaled = total_grad_norm(self.training_module, self.dist_context), {}
        if self.grad_scaler is not None:
            scaled["loss_scale"] = self.grad_scaler.scale.clone()
            self.grad_scaler.update(~torch.isfinite(length))
            length = length / scaled["loss_scale"]
        factor = lr_factor(self.recipe.schedule, step, training.max_steps)
        skip, verdict = self.step_policy.check_grad_norm(length)
        self.update_stats = UpdateStats(self.optimizer.parameters) if record_update_stats else None
        with raise_on_out_of_memory("the optimizer's state"):
            shrink = (length / training.grad_clip).clamp(min=1.0) * scaled.get("loss_scale", 1.0)
            self.optimizer.step(factor, grad_divisor=shrink, skip=skip)
        return {
            "step": step + 1,
            "loss": self.dist_context.sum_over_dp(entropy) / weight,
            "grad_norm": length,
            "lr": factor * self.recipe.optimizer.lr,
            "num_tokens": int(weight),
            "verdict": verdict,
            **scaled,
        }

    def forward_backward_with_oom_retry(self, step: int) -> tuple[Any, float]:
        """In more and smaller pieces if memory is too small."""
        while True:
            try:
                return self.forward_backward(step)
            except (RuntimeError, MemoryError) as error:
                others_wait = self.dist_context.world_size > 1
                if not is_out_of_memory(error) or others_wait:
                    raise
                self.step_policy.increase_grad_accum_steps(self.recipe.training.batch_size)
            self.optimizer.zero_grad()  # out here the error, which holds all that was computed, is gone
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def forward_backward(self, step: int) -> tuple[Any, float]:
        """Of the mean over all targets of the batch, however many pieces it is read in.

        Returns this rank's entropy and the weight of all.
        """
        training = self.recipe.training
        size = training.batch_size
        first = step * size
        pieces = [
            build_micro_batch(self.objective_fn, self.data.train, first + low, high - low)
            for low, high in self.dist_context.micro_batch_ranges(size, self.step_policy.grad_accum_steps)
        ]
        weight = self.dist_context.sum_over_dp(sum(float(piece.weights.sum()) for piece in pieces))
        if weight == 0:
            raise TrainingError(f"step {step + 1} has no target; lower data.validation_split, or give longer texts")
        self.optimizer.zero_grad()
        entropy: Any = 0.0
        asked = self.training_module if self.wrapped_module is None else self.wrapped_module
        with self.compiled_context():
            for place, piece in enumerate(pieces):
                # What dropout draws.
                torch.manual_seed(derive_seed(training.seed, step, place, self.dist_context.dp_rank))
                with no_sync_until_last(asked, place == len(pieces) - 1):
                    loss: LossSums = asked(piece)
                    mean: Any = loss.loss * (self.dist_context.dp_size / weight)  # ranks' gradients are averaged
                    (mean if self.grad_scaler is None else mean * self.grad_scaler.scale).backward()
                entropy = entropy + loss.cross_entropy.double()
        return entropy, weight


def metrics_to_python(metrics: Metrics) -> Metrics:
    """The same in plain numbers: this waits for the device."""
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


def build_micro_batch(
    objective_fn: ObjectiveFn, dataset: PositionalDataset[Any, Any], first: int, count: int
) -> Objective:
    """What some sequences ask for. A rank that has none reads one, which counts nothing: the others wait for it."""
    found = objective_fn(dataset.get_batch(first, max(count, 1)), first)
    return found if count else replace(found, weights=torch.zeros_like(found.weights), loss_targets=None)
