"""Trainer: the training loop with steps, evaluation, checkpoints and export, in a run directory.

Data order, dropout masks and masked tokens depend only on (seed, step). So a run that was killed and resumed from its
last checkpoint has bit-identical results to an uninterrupted run.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.evaluate import bits_per_byte
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.save import save
from cutaway.model import Transformer
from cutaway.model.adapters.adapter_methods import adapter_state_dict
from cutaway.train.checkpoint.checkpoint_manager import (
    CheckpointManager,
    CheckpointWriteError,
    load_latest_state,
    load_weights,
    save_state,
)
from cutaway.train.checkpoint.failpoints import hit_failpoint
from cutaway.train.checkpoint.manifest import TrainerState, checkpoint_name, read_checkpoint
from cutaway.train.checkpoint.pretrained_checkpoint import resolve_export_family
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.checkpoint.run_lock import RunLock
from cutaway.train.checkpoint.snapshots import SnapshotWriter, resolve_num_snapshots, snapshot_steps
from cutaway.train.data.training_data import TrainingData
from cutaway.train.distributed.parallelize import gather_full_model
from cutaway.train.distributed.process_group import DistributedContext
from cutaway.train.logging.callbacks import Callback, RunLogger
from cutaway.train.logging.metrics_log import Metrics, MetricsLog, NullMetricsLog
from cutaway.train.logging.throughput import Throughput
from cutaway.train.loss.chunked_cross_entropy import LossSums
from cutaway.train.objectives.objective import ObjectiveFn
from cutaway.train.objectives.reference_model import ReferenceModel
from cutaway.train.optim.ema import WeightEMA
from cutaway.train.optim.mixed_precision import GradScaler
from cutaway.train.optim.optimizer import OptimizersContainer, trainable_parameters
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.recipe.schema import PretrainedModelConfig, Recipe
from cutaway.train.rollouts.sampler import RolloutSampler
from cutaway.train.trainer.bad_step_policy import BadStepPolicy
from cutaway.train.trainer.early_stopping import EvalTracker
from cutaway.train.trainer.eval_metrics import compute_eval_metrics, needs_full_model
from cutaway.train.trainer.layer_stats import LayerStats, compute_layer_stats, layer_warnings
from cutaway.train.trainer.metric_means import metric_means
from cutaway.train.trainer.train_step import TrainStepRunner, build_micro_batch, metrics_to_python, share_batch_sums
from cutaway.train.trainer.training_module import TrainingModule


@contextmanager
def _stop_on_signals(stop_requested: threading.Event) -> Iterator[None]:
    """On SIGTERM, SIGHUP or Ctrl-C, request a stop after the current step. On a second Ctrl-C, stop immediately."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, frame: object) -> None:
        if stop_requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop_requested.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: training continues without the terminal
        numbers.append(signal.SIGHUP)
    previous_handlers = {number: signal.signal(number, request_stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@dataclass
class Trainer:
    """Trains a model on data, and writes logs, checkpoints and the exported model to a run directory."""

    run_directory: RunDirectory
    training_module: TrainingModule
    wrapped_module: nn.Module
    """Module that a training step calls: `training_module`, or its DDP wrapper."""
    optimizer: OptimizersContainer
    data: TrainingData
    objective_fn: ObjectiveFn
    callback: Callback
    dist_context: DistributedContext
    lock: RunLock
    """Lock of the run directory, which the main process has until the end of `train`."""
    reference: ReferenceModel | None = None
    """Reference model of objective grpo, if objective.beta is not 0."""

    def __post_init__(self) -> None:
        self.recipe: Recipe = self.run_directory.recipe
        directory = self.run_directory.checkpoint_directory
        self.checkpoint_manager = CheckpointManager(directory, keep=self.recipe.checkpoint.keep)
        num_parameters = sum(each.numel() for each in trainable_parameters(self.training_module.model).values())
        num_snapshots = resolve_num_snapshots(self.recipe.checkpoint.num_snapshots, num_parameters)
        has_snapshots = self.dist_context.mesh is None and self.dist_context.is_main_process
        steps = snapshot_steps(num_snapshots, self.recipe.training.max_steps) if has_snapshots else []
        self.snapshot_writer = SnapshotWriter(
            self.run_directory.snapshot_directory, frozenset(steps), self.callback.on_message
        )
        self.global_step = 0
        self.eval_tracker = EvalTracker(self.recipe.eval.early_stopping)
        self.metrics_log: MetricsLog
        self.timings_log: MetricsLog
        self.stop_requested = threading.Event()
        self.pending_metrics: Metrics | None = None
        self.step_start_time = time.perf_counter()
        self.model: Transformer = self.training_module.model
        training, device = self.recipe.training, self.model.device
        log = self.callback.on_message
        self.step_policy = BadStepPolicy(training.grad_accum_steps, training.on_grad_spike, device=device, log=log)
        self.grad_scaler = GradScaler(device) if training.precision == "fp16" else None
        self.ema = None
        if training.ema_decay is not None:
            self.ema = WeightEMA(self.model, training.ema_decay, training_module=self.training_module)
        self.rollouts = self._build_rollouts()
        self.train_step_runner = TrainStepRunner(
            self.recipe,
            self.training_module,
            self.optimizer,
            self.data,
            self.objective_fn,
            self.step_policy,
            self.grad_scaler,
            self.wrapped_module,
            self.dist_context,
            self.rollouts,
        )
        self.throughput = Throughput.from_recipe(self.recipe, self.model.config, device, self.dist_context.world_size)
        self.run_logger: RunLogger

    def _build_rollouts(self) -> RolloutSampler | None:
        """Sampler of the completions that objective grpo trains on. None for other objectives."""
        if not isinstance(self.recipe.objective, GRPOConfig):
            return None
        tokenizer, base_info = self.run_directory.tokenizer, self.run_directory.base_info
        return RolloutSampler(
            self.recipe,
            self.model,
            tokenizer,
            base_info.eos_token_ids(tokenizer),
            self.data,
            self.reference,
            self.dist_context,
        )

    # State

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """State dicts of the model and of the stateful components, by name."""
        states = {name: component.state_dict() for name, component in self.stateful_components().items()}
        return {"model": self.model_state_dict(), **states}

    def model_state_dict(self) -> dict[str, Tensor]:
        """State dict of the weights that checkpoints store: those of the adapter if there is one, else all."""
        return adapter_state_dict(self.model) if self.model.adapters else dict(self.model.state_dict())

    def stateful_components(
        self,
    ) -> dict[str, OptimizersContainer | BadStepPolicy | WeightEMA | GradScaler | RolloutSampler]:
        """Components with a state dict other than the model, by name. Those after the first two are optional."""
        components = (
            ("optimizer", self.optimizer),
            ("step_policy", self.step_policy),
            ("ema", self.ema),
            ("grad_scaler", self.grad_scaler),
            ("rollouts", self.rollouts if self.rollouts is not None and self.rollouts.has_state else None),
        )
        return {name: component for name, component in components if component is not None}

    @property
    def num_threads(self) -> int | None:
        """Number of CPU threads, which changes the results by rounding. None on a GPU."""
        return torch.get_num_threads() if self.model.device.type == "cpu" else None

    def save_checkpoint(self) -> None:
        """Save everything that the next step depends on. If writing fails, report it and continue training."""
        self.run_logger.flush()
        state = TrainerState(
            step=self.global_step,
            data_fingerprint=self.run_directory.data_fingerprint,
            metrics_bytes=self.metrics_log.sync(),
            timings_bytes=self.timings_log.sync(),
            num_threads=self.num_threads,
            **self.eval_tracker.state_dict(),
        )
        with self._report_write_errors():
            save_state(self.checkpoint_manager, self.dist_context, self.state_tensors(), state)

    def save_snapshot(self) -> None:
        """Save the weights for inspection, if this step has a snapshot. If writing fails, report it and continue."""
        if not self.snapshot_writer.is_due(self.global_step):
            return
        self._log_pending_step()
        with self.averaged_weights():
            self.snapshot_writer.save(self.global_step, self.model_state_dict())
        self.step_start_time = time.perf_counter()

    @contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointWriteError as error:
            self.callback.on_message(f"{error}; training continues")

    def restore_checkpoint(self) -> None:
        """Restore the newest valid checkpoint, or start at step 0 if there is none."""
        restored = load_latest_state(self.checkpoint_manager, self.dist_context, self.callback.on_message)
        if restored is None:
            if self.dist_context.is_main_process:
                self.run_directory.check_restart(self.callback.on_message)
            self._open_logs(0, 0)
            return
        state = restored.state
        if state.data_fingerprint != self.run_directory.data_fingerprint:
            raise InputError("the checkpoint was written with other data; restore the run's own checkpoint files")
        load_weights(self.model, restored.tensor_groups["model"])
        for name, component in self.stateful_components().items():
            if name not in restored.tensor_groups:
                raise InputError(
                    f"the checkpoint has no state for {name}, so another version of cutaway wrote it; start a new"
                    " run from its weights"
                )
            component.load_state_dict(restored.tensor_groups[name])
        if None not in (state.num_threads, self.num_threads) and state.num_threads != self.num_threads:
            self.callback.on_message(
                f"the run continues with {self.num_threads} CPU threads instead of {state.num_threads}, so that its"
                f" results may differ by rounding; set OMP_NUM_THREADS={state.num_threads} for identical results"
            )
        self.global_step = state.step
        self.eval_tracker.load_state(state)
        self._open_logs(state.metrics_bytes, state.timings_bytes)

    def _open_logs(self, metrics_bytes: int, timings_bytes: int) -> None:
        """Open the logs, truncated to the sizes stored in the checkpoint. Only the main process writes to the logs."""
        directory, is_main = self.run_directory.directory, self.dist_context.is_main_process
        self.metrics_log = MetricsLog(directory / "metrics.jsonl", metrics_bytes) if is_main else NullMetricsLog()
        self.timings_log = MetricsLog(directory / "timings.jsonl", timings_bytes) if is_main else NullMetricsLog()
        self.run_logger = RunLogger(
            self.run_directory, self.metrics_log, self.callback, self.global_step, enabled=is_main
        )

    # Training

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or the run has stopped early."""
        return self.global_step == self.recipe.training.max_steps or self.eval_tracker.should_stop

    def train(self) -> None:
        """Train until `training.max_steps`, or until a stop is requested. At the end, export the model."""
        with self.lock if self.dist_context.is_main_process else nullcontext():
            self._run_steps()
            if self.is_finished:
                if self.recipe.checkpoint.export == "best":
                    self.load_best_weights()
                with self.averaged_weights():
                    self.export_model()

    def _run_steps(self) -> None:
        recipe = self.recipe
        self.model.train()
        device = self.model.device
        cuda_devices = [device] if device.type == "cuda" else []
        # When this returns, the caller's random state is restored and the last asynchronous save is complete.
        with (
            closing(self.run_logger),
            _stop_on_signals(self.stop_requested),
            self._wait_for_async_save(),
            torch.random.fork_rng(cuda_devices),
        ):
            self.save_snapshot()
            if self.global_step == 0 and isinstance(recipe.model, PretrainedModelConfig):
                self.evaluate_base_model()
            self.step_start_time = time.perf_counter()
            stopping = self.dist_context.any_rank(self.stop_requested.is_set())
            while not self.is_finished and not stopping:
                metrics = self.train_step(self.global_step)
                # Log the previous step only now, so that the GPU computes one step while the host launches the next.
                self._log_pending_step()
                self.global_step, self.pending_metrics = self.global_step + 1, metrics
                should_evaluate = self.should_evaluate(self.global_step)
                should_save = self.global_step % recipe.checkpoint.interval == 0
                if should_evaluate or should_save or device.type == "cpu":
                    self._log_pending_step()
                if should_evaluate:
                    with self.averaged_weights():
                        is_best = self.evaluate()
                    should_save |= is_best and recipe.checkpoint.export == "best"
                should_save |= self.is_finished
                self.save_snapshot()
                stopping = self.dist_context.any_rank(self.stop_requested.is_set())
                if should_save or stopping:
                    self._log_pending_step()
                    self.save_checkpoint()
                    self.step_start_time = time.perf_counter()
                    hit_failpoint("after-checkpoint")
            if self.eval_tracker.should_stop:
                self.callback.on_message(
                    f"stopped early at step {self.global_step:,}: eval_loss has not improved for"
                    f" {self.eval_tracker.num_evals_without_improvement} evaluations"
                )

    @contextmanager
    def _wait_for_async_save(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.snapshot_writer.wait()
            with self._report_write_errors():
                self.checkpoint_manager.wait_for_async_save()

    def train_step(self, step: int) -> Metrics:
        record_update_stats = self.dist_context.mesh is None and self.should_evaluate(step + 1)
        metrics = self.train_step_runner.run(step, record_update_stats=record_update_stats)
        if self.ema is not None:
            self.ema.update(step)
        return metrics

    def should_evaluate(self, step: int) -> bool:
        """Whether an evaluation follows the step with this number, counted from 1."""
        return step == self.recipe.training.max_steps or step % self.recipe.eval.interval == 0

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Context in which the model has the EMA weights, if the recipe uses EMA."""
        return nullcontext() if self.ema is None else self.ema.averaged_weights()

    def _log_pending_step(self) -> None:
        """Write the metrics of the last step to the logs, unless already written. This synchronizes with the device."""
        if self.pending_metrics is None:
            return
        metrics, self.pending_metrics = metrics_to_python(self.pending_metrics), None
        now = time.perf_counter()
        seconds, self.step_start_time = now - self.step_start_time, now
        self.step_policy.report_step(metrics, metrics.pop("verdict"))
        timing = {"step": metrics["step"], "seconds": seconds, "tokens_per_second": metrics["num_tokens"] / seconds}
        timing |= self.throughput.measure(seconds) | metrics.pop("timing", {})
        self.metrics_log.append(metrics)
        self.timings_log.append(timing)
        self.run_logger.log(timing | metrics)
        self.callback.on_step_end(metrics, timing)
        hit_failpoint("after-step")

    def evaluate(self) -> bool:
        """Evaluate on the validation split, and log metrics and layer statistics.

        Returns whether the loss is the lowest so far.
        """
        self.model.eval()
        validation = self.validate()
        layer_stats = self.compute_layer_stats()
        is_best = self.eval_tracker.update(self.global_step, validation["eval_loss"])
        self._log_evaluation(validation)
        if layer_stats is not None:
            layer_metrics = {"step": self.global_step, "layer_stats": layer_stats}
            self.metrics_log.append(layer_metrics)
            self.run_logger.log(layer_metrics)
            self.callback.on_layer_stats(layer_metrics)
        self.run_logger.update_loss_plot()
        self.step_start_time = time.perf_counter()
        return is_best

    def evaluate_base_model(self) -> None:
        """Evaluate a checkpoint before it is fine-tuned. Early stopping and the best checkpoint do not depend on it."""
        self.model.eval()
        self._log_evaluation(self.validate())

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Mean loss (cross-entropy over targets) and metrics on `eval.num_sequences` validation sequences."""
        if self.rollouts is not None:
            return self.rollouts.evaluate()
        count = min(self.recipe.eval.num_sequences, self.data.num_validation_sequences)
        # As large as the micro-batches of training, which fit in memory
        micro_batch_size = -(-self.recipe.training.batch_size // self.step_policy.grad_accum_steps)
        micro_batches = [
            build_micro_batch(self.objective_fn, self.data.validation, low, high - low)
            for low, high in self.dist_context.micro_batch_ranges(count, max(1, count // micro_batch_size))
        ]
        micro_batches = share_batch_sums(micro_batches, self.training_module, self.dist_context)
        losses: list[LossSums] = [self.training_module(micro_batch) for micro_batch in micro_batches]
        total = self.dist_context.sum_over_dp(sum(float(loss.cross_entropy) for loss in losses))
        weight = self.dist_context.sum_over_dp(sum(float(each.weights.sum()) for each in micro_batches))
        means = metrics_to_python(metric_means(losses, self.dist_context))
        return {"eval_loss": total / max(1.0, weight)} | {f"eval_{name}": value for name, value in means.items()}

    @torch.no_grad()
    def _log_evaluation(self, validation: Metrics) -> None:
        """Log the loss and the other metrics of an evaluation, and set the model back to training mode."""
        loss = validation["eval_loss"]
        metrics: Metrics = {"step": self.global_step} | validation
        if self.data.bytes_per_token is not None:
            metrics["bits_per_byte"] = bits_per_byte(loss, self.data.bytes_per_token)
        if needs_full_model(self.recipe, self.model.config):
            checkpoint = self.build_checkpoint(self.model.device)
            if checkpoint is not None:
                seed = self.global_step
                metrics |= compute_eval_metrics(checkpoint, self.data, self.objective_fn, self.recipe, seed=seed)
        self.model.train()
        self.metrics_log.append(metrics)
        self.run_logger.log(metrics)
        self.callback.on_evaluate(metrics)

    @torch.no_grad()
    def compute_layer_stats(self) -> LayerStats | None:
        """Statistics per layer, with warnings. None with a device mesh, where a rank has only shards of the layers."""
        if self.dist_context.mesh is not None:
            return None
        objective = self.objective_fn(self.data.validation.get_batch(0, 1), 0)
        layer_stats = compute_layer_stats(self.training_module, objective, self.train_step_runner.update_stats)
        return layer_stats | {"warnings": layer_warnings(layer_stats, self.model.config.d_model)}

    def build_checkpoint(self, device: torch.device) -> Checkpoint | None:
        """Checkpoint of the full model on the main process, None on other ranks. A sharded model is gathered."""
        is_main = self.dist_context.is_main_process
        model: Transformer | None = self.model if is_main else None
        if self.dist_context.mesh is not None:
            model = gather_full_model(self.model, device, keep=is_main)
        return None if model is None else self.run_directory.build_checkpoint(model)

    def load_best_weights(self) -> None:
        """Load the weights with the lowest eval_loss. If their checkpoint is damaged, the last weights are kept."""
        step = self.eval_tracker.best_step
        if step is None or step == self.global_step:
            return
        checkpoint = read_checkpoint(self.checkpoint_manager.directory / checkpoint_name(step), {"model", "ema"})
        if self.dist_context.any_rank(isinstance(checkpoint, str)) or isinstance(checkpoint, str):
            self.callback.on_message(
                f"the checkpoint of step {step:,}, with the lowest eval_loss, cannot be loaded ({checkpoint}); the"
                " weights of the last step are exported"
            )
            return
        load_weights(self.model, checkpoint.tensor_groups["model"])
        if self.ema is not None:
            self.ema.load_state_dict(checkpoint.tensor_groups["ema"])
        loss = self.eval_tracker.best_eval_loss
        self.callback.on_message(f"exporting the weights of step {step:,}, whose eval loss is the lowest: {loss:.3f}")

    def export_model(self) -> None:
        """Write the model to the run directory, in the Hugging Face format of its family.

        If no family matches, cutaway's own format is used. An adapter is written in PEFT's format, without the model.
        """
        self.model.eval()
        checkpoint = self.build_checkpoint(torch.device("cpu"))
        if checkpoint is not None:
            directory = self.run_directory.model_directory
            if checkpoint.model.adapters:
                self.run_directory.export_adapter(checkpoint)
                return
            family = resolve_export_family(checkpoint.config, checkpoint.family)
            save(checkpoint, directory, family=family, overwrite=directory.exists())
