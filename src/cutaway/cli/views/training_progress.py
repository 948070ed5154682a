"""Progress of `cutaway train`, as a progress bar, log lines or JSON."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID

from cutaway.cli.json_output import print_json
from cutaway.cli.views.terminal import escape_control_characters
from cutaway.cli.views.training_examples import print_examples
from cutaway.train.logging.metrics_log import to_json_value

if TYPE_CHECKING:
    from cutaway.train.logging.callbacks import Callback
    from cutaway.train.trainer.trainer import Trainer

LOG_INTERVAL_SECONDS = 5.0
"""Seconds between log lines when the output is not a terminal."""
CROSS_ENTROPY_OBJECTIVES = ("causal-lm", "distillation", "masked-lm", "seq2seq", "prefix-lm", "sft")
"""Kinds of the objectives whose loss is a cross-entropy per token."""
LAYER_METRICS = {"gradient": "grad_norm", "update/weight": "update_ratio"}
EVAL_METRICS = {
    "bits_per_byte": "{:.3f} bits per byte",
    "exact_match": "{:.1%} exact match",
    "accuracy": "{:.1%} accuracy",
    "accuracy_at_1": "{:.1%} of the positives ranked first",
    "macro_f1": "macro F1 {:.3f}",
    "micro_f1": "micro F1 {:.3f}",
    "entity_f1": "entity F1 {:.3f}",
    "pearson": "Pearson {:.3f}",
    "spearman": "Spearman {:.3f}",
    "eval_rewards/accuracies": "{:.1%} reward accuracy",
    "eval_rewards/margins": "reward margin {:.3f}",
    "general_loss": "loss on general text {:.3f}",
    "eval_completion_length": "{:.1f} tokens per completion",
    "eval_frac_truncated": "{:.1%} truncated",
}
Row = dict[str, Any]
"""A row of the metrics log."""
SMOOTHING = 0.1
"""Weight of the latest step in the moving averages of tokens_per_second and mfu."""


class TrainingProgress:
    """Prints the progress of a training run: step, loss, tokens per second, MFU, memory and remaining time."""

    def __init__(self, *, as_json: bool, stderr: bool = True) -> None:
        self.as_json = as_json
        self.console = Console(stderr=stderr)
        columns = ("{task.completed:.0f}/{task.total:.0f}", BarColumn(12), "{task.description}")
        self.progress_bar = Progress(*columns, console=self.console, disable=as_json or not self.console.is_terminal)
        self.task_id: TaskID | None = None
        self.max_steps = self.start_step = self.num_skipped_steps = 0
        self.start_time = self.last_log_time = time.monotonic()
        self.smoothed_metrics: dict[str, float] = {}
        self.loss_unit = " nats per token"

    def build_callback(self) -> "Callback":
        from cutaway.train.logging.callbacks import Callback

        if self.as_json:
            return Callback(
                on_step_end=lambda row, timing: _write_json(row | timing),
                on_evaluate=_write_json,
                on_layer_stats=_write_json,
                on_message=self.on_message,
                on_data=lambda row: _write_json({"data": row}),
            )
        return Callback(
            on_step_end=self.on_step_end,
            on_evaluate=self.on_evaluate,
            on_layer_stats=self.on_layer_stats,
            on_message=self.on_message,
            on_data=lambda row: print_examples(self.console, row),
        )

    @contextmanager
    def track(self, trainer: "Trainer") -> Iterator[None]:
        self.max_steps, self.start_step = trainer.recipe.training.max_steps, trainer.global_step
        is_cross_entropy = trainer.recipe.objective.kind in CROSS_ENTROPY_OBJECTIVES
        self.loss_unit = " nats per token" if is_cross_entropy else ""
        self.start_time = self.last_log_time = time.monotonic()
        with self.progress_bar:
            self.task_id = self.progress_bar.add_task("", total=self.max_steps, completed=trainer.global_step)
            yield

    def on_step_end(self, row: Row, timing: Row) -> None:
        self.num_skipped_steps += "skipped" in row
        for name in ("tokens_per_second", "mfu"):
            if name in timing:  # smoothed, because step times vary
                previous = self.smoothed_metrics.setdefault(name, timing[name])
                self.smoothed_metrics[name] = (1 - SMOOTHING) * previous + SMOOTHING * timing[name]
        now = time.monotonic()
        text = self._format_step(row, timing, now)
        if not self.progress_bar.disable and self.task_id is not None:
            self.progress_bar.update(self.task_id, completed=row["step"], description=text)
        elif now - self.last_log_time >= LOG_INTERVAL_SECONDS or row["step"] == self.max_steps:
            self.last_log_time = now
            self.on_message(f"{row['step']}/{self.max_steps}  {text}")

    def _format_step(self, row: Row, timing: Row, now: float) -> str:
        """Format the metrics of a training step in one line. Metrics that were not measured are left out."""
        parts = [f"reward {row['reward']:.3f}"] if "reward" in row else [f"loss {row['loss']:.3f}"]
        parts += [f"{self.smoothed_metrics['tokens_per_second']:,.0f} tokens/s"]
        if "mfu" in timing:
            parts.append(f"{self.smoothed_metrics['mfu']:.0%} MFU")
        if "peak_memory_bytes" in timing:
            parts.append(f"{timing['peak_memory_bytes'] / 1e9:.3g} GB")
        if self.num_skipped_steps:
            parts.append(f"{self.num_skipped_steps} skipped")
        seconds, num_left = now - self.start_time, self.max_steps - row["step"]
        seconds_left = seconds / max(1, row["step"] - self.start_step) * num_left
        parts.append(f"{format_clock(seconds_left)} left" if num_left > 0 else format_clock(seconds))
        return "  ".join(parts)

    def on_evaluate(self, row: Row) -> None:
        if "eval_reward" in row:
            parts = [f"step {row['step']}: eval reward {row['eval_reward']:.3f}"]
        else:
            parts = [f"step {row['step']}: eval loss {row['eval_loss']:.3f}{self.loss_unit}"]
        parts += [text.format(row[name]) for name, text in EVAL_METRICS.items() if name in row]
        self.on_message(", ".join(parts))
        if "sample" in row:
            self._print_line(escape_control_characters(row["sample"]), "dim")

    def on_layer_stats(self, row: Row) -> None:
        self._print_line(_format_layer_stats(row["layer_stats"]), "dim")
        for warning in row["layer_stats"]["warnings"]:
            self._print_line(f"  {warning}", "yellow")

    def on_message(self, text: str) -> None:
        if self.as_json:
            _write_json({"message": text})
        else:
            self._print_line(text)

    def _print_line(self, text: str, style: str | None = None) -> None:
        """Print a line. Long lines are wrapped only on a terminal."""
        wrap = not self.console.is_terminal
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=wrap)


def _write_json(row: Row) -> None:
    print_json(to_json_value(row), indent=None)


def _format_layer_stats(layer_stats: Row) -> str:
    """Format layer statistics: maximum gradient norm and update ratio, first and last residual norm, entropy range."""
    items = [f"{name} ≤ {_format_max(layer_stats[key])}" for name, key in LAYER_METRICS.items() if layer_stats.get(key)]
    norms = list(layer_stats["resid_norm"].values())
    items.append(f"residual norm {norms[0]:.2g} → {norms[-1]:.2g}")
    entropies = [entropy for bits in layer_stats["attn_entropy"].values() for entropy in bits]
    if entropies:
        items.append(f"attention entropy {min(entropies):.2g} to {max(entropies):.2g} bits")
    return ", ".join(items)


def _format_max(by_layer: dict[str, float]) -> str:
    layer = max(by_layer, key=by_layer.__getitem__)
    return f"{by_layer[layer]:.2g} ({layer})"


def format_clock(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
