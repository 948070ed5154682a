"""The training loop: steps, evaluation and checkpoints, in a run's directory.

Where the data is, what dropout draws and what is masked all follow from (seed, step). So a run that was killed goes on
from its last checkpoint to the same bits that it would have reached.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.evaluate import bits_per_byte
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.save import save
from cutaway.model import Transformer
from cutaway.train.checkpoint.base_checkpoint import resolve_export_family
from cutaway.train.checkpoint.failpoints import hit_failpoint
from cutaway.train.checkpoint.manager import (
    CheckpointManager,
    CheckpointWriteError,
    load_latest_state,
    load_weights,
    save_state,
)
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.data.data_loader import TrainingData
from cutaway.train.distributed.parallelize import gather_full_model
from cutaway.train.distributed.process_group import SINGLE_PROCESS, DistributedContext
from cutaway.train.logging.callbacks import Callback, CallbackHandler
from cutaway.train.logging.metrics_log import MetricsLog, NullMetricsLog
from cutaway.train.logging.throughput import Throughput
from cutaway.train.objectives.objective import ObjectiveFn
from cutaway.train.optim.ema import WeightEMA
from cutaway.train.optim.mixed_precision import GradScaler
from cutaway.train.optim.optimizer import OptimizersContainer
from cutaway.train.recipe.schema import Recipe
from cutaway.train.trainer.eval_metrics import compute_eval_metrics, has_generation_metrics
from cutaway.train.trainer.layer_stats import compute_layer_stats, layer_warnings
from cutaway.train.trainer.step_policy import StepPolicy
from cutaway.train.trainer.train_step import Metrics, TrainStepRunner, build_micro_batch, metrics_to_python
from cutaway.train.trainer.training_module import TrainingModule


@contextmanager
def stop_on_signals(stop_requested: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C end a run after the step at hand, with a checkpoint; a second Ctrl-C at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if stop_requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop_requested.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Trainer:
    """A model that learns from data, in a run's directory."""

    run_directory: RunDirectory
    training_module: TrainingModule
    optimizer: OptimizersContainer
    data: TrainingData
    objective_fn: ObjectiveFn
    callback: Callback = field(default_factory=Callback)
    dist_context: DistributedContext = SINGLE_PROCESS
    wrapped_module: nn.Module | None = None
    """What a step calls in the training module's place where ranks have copies of it."""

    def __post_init__(self) -> None:
        self.recipe: Recipe = self.run_directory.recipe
        self.checkpoint_manager = CheckpointManager(
            self.run_directory.checkpoint_directory, keep=self.recipe.checkpoint.keep
        )
        self.global_step = 0
        self.best_eval_loss: float | None = None
        self.metrics_log: MetricsLog
        self.timings_log: MetricsLog
        self.stop_requested = threading.Event()
        self.pending_metrics: Metrics | None = None
        self.step_start_time = time.perf_counter()
        self.model: Transformer = self.training_module.model
        training, device = self.recipe.training, self.model.device
        self.step_policy = StepPolicy(
            training.grad_accum_steps, training.on_grad_spike, device=device, log=self.callback.on_message
        )
        self.grad_scaler = GradScaler(device) if training.precision == "fp16" else None
        self.ema = (
            None
            if training.ema_decay is None
            else WeightEMA(self.model, training.ema_decay, training_module=self.training_module)
        )
        self.train_step_runner = TrainStepRunner(
            self.recipe,
            self.training_module,
            self.optimizer,
            self.data,
            self.objective_fn,
            self.step_policy,
            self.grad_scaler,
            self.dist_context,
            self.wrapped_module,
        )
        self.throughput = Throughput.from_recipe(self.recipe, self.model.config, device, self.dist_context.world_size)
        self.callback_handler: CallbackHandler

    # The state as one value

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        parts = {name: part.state_dict() for name, part in self.stateful_components().items()}
        return {"model": dict(self.model.state_dict()), **parts}

    def stateful_components(self) -> dict[str, Any]:
        """What has a state of its own beside the weights; some only in some runs."""
        every = {
            "optimizer": self.optimizer,
            "step_policy": self.step_policy,
            "ema": self.ema,
            "grad_scaler": self.grad_scaler,
        }
        return {name: part for name, part in every.items() if part is not None}

    def save_checkpoint(self) -> None:
        """Everything that the next step depends on. A disk that is full is no reason to stop learning."""
        self.callback_handler.flush()
        state: dict[str, Any] = {
            "step": self.global_step,
            "best_eval_loss": self.best_eval_loss,
            "metrics_bytes": self.metrics_log.sync(),
            "timings_bytes": self.timings_log.sync(),
            "data_fingerprint": self.run_directory.data_fingerprint,
        }
        with self._report_write_errors():
            save_state(
                self.checkpoint_manager,
                self.dist_context,
                self.global_step,
                self.state_tensors(),
                state,
                best_eval_loss=self.best_eval_loss,
            )

    @contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointWriteError as error:
            self.callback.on_message(f"{error}; training goes on, and the last checkpoint stays")

    def restore_checkpoint(self) -> None:
        """Go on from the newest checkpoint that is whole, or from the beginning if there is none."""
        found = load_latest_state(self.checkpoint_manager, self.dist_context, self.callback.on_message)
        if found is None:
            self._open_logs(0, 0)
            return
        if found.state["data_fingerprint"] != self.run_directory.data_fingerprint:
            raise InputError("this checkpoint is of other data than the run's; restore the run's own files")
        load_weights(self.model, found.tensor_groups["model"])
        for name, part in self.stateful_components().items():
            if name not in found.tensor_groups:
                raise InputError(f"this checkpoint has no {name}, as those of another version; begin a new run from it")
            part.load_state_dict(found.tensor_groups[name])
        self.global_step, self.best_eval_loss = found.state["step"], found.state["best_eval_loss"]
        self._open_logs(found.state["metrics_bytes"], found.state["timings_bytes"])

    def _open_logs(self, metrics_bytes: int, timings_bytes: int) -> None:
        """Go on with the logs behind so many bytes of them; of several ranks one writes."""
        where, mine = self.run_directory.directory, self.dist_context.is_main_process
        self.metrics_log = MetricsLog(where / "metrics.jsonl", metrics_bytes) if mine else NullMetricsLog()
        self.timings_log = MetricsLog(where / "timings.jsonl", timings_bytes) if mine else NullMetricsLog()
        self.callback_handler = CallbackHandler(
            self.run_directory, self.metrics_log, self.callback, self.global_step, enabled=mine
        )

    # The work

    def train(self) -> None:
        """Learn until the recipe's last step, or until somebody asks to stop."""
        recipe = self.recipe
        steps = recipe.training.max_steps
        self.model.train()
        device = self.model.device
        mine = [device] if device.type == "cuda" else []
        # Whoever called has random numbers of their own, and finds the last checkpoint written.
        with (
            closing(self.callback_handler),
            stop_on_signals(self.stop_requested),
            self._wait_for_async_save(),
            torch.random.fork_rng(mine),
        ):
            self.step_start_time = time.perf_counter()
            stopping = self.dist_context.any_rank(self.stop_requested.is_set())
            while self.global_step < steps and not stopping:
                row = self.train_step(self.global_step)
                # Of the step before: a device computes one step while the next is being asked for.
                self._log_pending_step()
                self.global_step, self.pending_metrics = self.global_step + 1, row
                look = self.should_evaluate(self.global_step)
                save = self.global_step == steps or self.global_step % recipe.checkpoint.interval == 0
                if look or save or device.type == "cpu":
                    self._log_pending_step()
                if look:
                    with self.averaged_weights():
                        self.evaluate()
                stopping = self.dist_context.any_rank(self.stop_requested.is_set())
                if save or stopping:
                    self._log_pending_step()
                    self.save_checkpoint()
                    self.step_start_time = time.perf_counter()
                    hit_failpoint("after-checkpoint")
        if self.global_step == steps:
            with self.averaged_weights():
                self.export_model()

    @contextmanager
    def _wait_for_async_save(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._report_write_errors():
                self.checkpoint_manager.wait_for_async_save()

    def train_step(self, step: int) -> Metrics:
        row = self.train_step_runner.run(
            step, record_update_stats=self.dist_context.mesh is None and self.should_evaluate(step + 1)
        )
        if self.ema is not None:
            self.ema.update(step)
        return row

    def should_evaluate(self, step: int) -> bool:
        """Whether so many steps are followed by a look."""
        return step == self.recipe.training.max_steps or step % self.recipe.eval.interval == 0

    def averaged_weights(self) -> AbstractContextManager[None]:
        """The weights that others see: their mean, where the recipe asks for one."""
        return nullcontext() if self.ema is None else self.ema.averaged_weights()

    def _log_pending_step(self) -> None:
        """Write down what the last step has come to; this waits until it has."""
        if self.pending_metrics is None:
            return
        row, self.pending_metrics = metrics_to_python(self.pending_metrics), None
        now = time.perf_counter()
        took, self.step_start_time = now - self.step_start_time, now
        self.step_policy.report_step(row, row.pop("verdict"))
        timing = {"step": row["step"], "seconds": took, "tokens_per_second": row["num_tokens"] / took}
        timing |= self.throughput.measure(took)
        self.metrics_log.append(row)
        self.timings_log.append(timing)
        self.callback_handler.on_step_end(row, timing)
        hit_failpoint("after-step")

    @torch.no_grad()
    def evaluate(self) -> None:
        """How well it does on what it does not learn from."""
        self.model.eval()
        total = weight = 0.0
        count = min(self.recipe.eval.num_sequences, self.data.num_validation_sequences)
        at_once = -(-self.recipe.training.batch_size // self.step_policy.grad_accum_steps)  # what memory holds
        for low, high in self.dist_context.micro_batch_ranges(count, max(1, count // at_once)):
            piece = build_micro_batch(self.objective_fn, self.data.validation, low, high - low)
            total += float(self.training_module(piece).cross_entropy)
            weight += float(piece.weights.sum())
        layer_stats = self.compute_layer_stats()
        loss = self.dist_context.sum_over_dp(total) / max(1.0, self.dist_context.sum_over_dp(weight))
        self.best_eval_loss = loss if self.best_eval_loss is None else min(self.best_eval_loss, loss)
        row: dict[str, Any] = {"step": self.global_step, "eval_loss": loss}
        if self.data.bytes_per_token is not None:
            row["bits_per_byte"] = bits_per_byte(loss, self.data.bytes_per_token)
        if has_generation_metrics(self.recipe) and (whole := self.build_checkpoint(self.model.device)) is not None:
            row |= compute_eval_metrics(whole, self.data, self.objective_fn, self.recipe, seed=self.global_step)
        self.model.train()
        self.metrics_log.append(row)
        self.callback_handler.on_evaluate(row)
        if layer_stats is not None:
            self.metrics_log.append({"step": self.global_step, "layer_stats": layer_stats})
            self.callback_handler.on_layer_stats({"step": self.global_step, "layer_stats": layer_stats})
        self.callback_handler.update_loss_plot()
        self.step_start_time = time.perf_counter()

    def compute_layer_stats(self) -> dict[str, Any] | None:
        """Readings of each layer, where a rank has whole ones."""
        if self.dist_context.mesh is not None:
            return None
        found = compute_layer_stats(
            self.training_module,
            self.objective_fn(self.data.validation.get_batch(0, 1), 0),
            self.train_step_runner.update_stats,
        )
        return found | {"warnings": layer_warnings(found, self.model.config.d_model)}

    def build_checkpoint(self, device: torch.device) -> Checkpoint | None:
        """The whole model beside what it was before, for the leader."""
        model: Transformer | None = self.model
        if self.dist_context.mesh is not None:
            model = gather_full_model(self.model, device, keep=self.dist_context.is_main_process)
        if model is None or not self.dist_context.is_main_process:
            return None
        base_info = self.run_directory.base_info
        return Checkpoint(
            model,
            model.config,
            base_info.family,
            hf_config=base_info.hf_config,
            generation_config=base_info.generation_config,
            tokenizer_loader=lambda: self.run_directory.tokenizer,
        )

    def export_model(self) -> None:
        """The model as others open it, if others have such models."""
        self.model.eval()
        checkpoint = self.build_checkpoint(torch.device("cpu"))
        if checkpoint is not None:
            family = resolve_export_family(checkpoint.config, checkpoint.family)
            save(
                checkpoint,
                self.run_directory.model_directory,
                family=family,
                overwrite=self.run_directory.model_directory.exists(),
            )
