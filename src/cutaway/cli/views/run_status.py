"""Status of a training run, and the command that uses its model."""

from pathlib import Path
from typing import Any

from cutaway.cli.views.training_progress import CROSS_ENTROPY_OBJECTIVES, format_clock
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.checkpoint.saved_models import find_exported_step
from cutaway.train.logging.metrics_log import read_metrics_log
from cutaway.train.trainer.general_loss import GeneralLossChange, general_loss_change

Row = dict[str, Any]
RUN_FILES = {
    "metrics.jsonl": "metrics of each step and evaluation",
    "timings.jsonl": "duration of each step",
    "loss.svg": "loss plot",
    "tensorboard": "metrics for TensorBoard",
    "checkpoints": "checkpoints for --resume",
    "snapshots": "weights at several steps: cutaway open RUN",
    "model": "trained model",
}
COMMANDS = {
    "classification": "cutaway generate {} TEXT, or cutaway eval {} --data FILE",
    "token-classification": "cutaway generate {} TEXT, or cutaway eval {} --data FILE",
    "multiple-choice": "cutaway eval {} --data FILE",
    "embedding": "cutaway serve {}, or cutaway eval {} --data FILE",
    "reward": "cutaway eval {} --data FILE",
}
"""Kind of an objective that trains a task head → command that uses the trained model."""
CHAT_OBJECTIVES = ("sft", "dpo", "kto", "orpo")
"""Kinds of the objectives that train answers, to messages if the tokenizer has a chat template."""


def command_for_model(run: RunDirectory) -> str:
    """Command that uses the trained model of a run."""
    kind = run.recipe.objective.kind
    if kind in COMMANDS:
        return COMMANDS[kind].replace("{}", str(run.directory))
    tokenizer = run.tokenizer
    if kind == "masked-lm":
        return f"cutaway generate {run.directory} 'a text with a {tokenizer.special_tokens_map.get('mask_token')}'"
    flag = "--message " if kind in CHAT_OBJECTIVES and tokenizer.chat_template else ""
    return f"cutaway generate {run.directory} {flag}TEXT"


def load_run_status(directory: Path) -> Row:
    """Load the status of a training run (recipe, latest step, losses, duration, files) as JSON values."""
    run = RunDirectory.open(directory)
    logs = [directory / name for name in ("metrics.jsonl", "timings.jsonl")]
    rows, timings = (list(read_metrics_log(path)) if path.exists() else [] for path in logs)
    steps = [row for row in rows if "loss" in row]
    evals = [row for row in rows if row.get("eval_loss") is not None]
    exported_step = find_exported_step(run)
    change = general_loss_change(evals, exported_step)
    return {
        "run": str(directory),
        "recipe": run.recipe.model_dump(mode="json", exclude_none=True),
        "step": steps[-1]["step"] if steps else 0,
        "max_steps": run.recipe.training.max_steps,
        "finished": exported_step is not None,
        "exported_step": exported_step,
        "loss": steps[-1]["loss"] if steps else None,
        "evals": evals,
        "best_eval_loss": min((row["eval_loss"] for row in evals), default=None),
        "general_loss": None if change is None else change._asdict() | {"percent": change.percent},
        "num_skipped_steps": sum("skipped" in row for row in steps),
        "seconds": sum(row["seconds"] for row in timings),
        "command": None if exported_step is None else command_for_model(run),
        "files": {name: str(directory / name) for name in RUN_FILES if (directory / name).exists()},
    }


def _describe_model(model: str | Row) -> str:
    """A preset name, the form of a config table, or the checkpoint that is fine-tuned."""
    if isinstance(model, str):
        return model
    return f"fine-tuned {model['checkpoint']}" if "checkpoint" in model else f"custom model ({model.get('form')})"


def format_run_status(status: Row) -> list[str]:
    """Format the status of a training run, from `load_run_status`, as lines of text."""
    recipe = status["recipe"]
    model = _describe_model(recipe["model"])
    skipped = f", {status['num_skipped_steps']} skipped" if status["num_skipped_steps"] else ""
    seconds = format_clock(status["seconds"])
    lines = [
        f"{status['run']}: {model}, {recipe['objective']['kind']}, {recipe['optimizer']['kind']}",
        f"step {status['step']:,} of {status['max_steps']:,}, {seconds} of training{skipped}",
    ]
    is_rl = any("eval_reward" in row for row in status["evals"])
    if status["loss"] is not None and not is_rl:  # the loss of GRPO is near 0 throughout
        unit = " nats per token" if recipe["objective"]["kind"] in CROSS_ENTROPY_OBJECTIVES else ""
        lines.append(f"training loss {status['loss']:.3f}{unit}")
    if status["evals"]:
        last = status["evals"][-1]
        if "eval_reward" in last:
            lines.append(
                f"eval reward {last['eval_reward']:.3f} at step {last['step']:,}, best {-status['best_eval_loss']:.3f}"
            )
        else:
            bits = f" ({last['bits_per_byte']:.3f} bits per byte)" if last.get("bits_per_byte") is not None else ""
            best = f"best eval loss {status['best_eval_loss']:.3f}"
            lines.append(f"eval loss {last['eval_loss']:.3f}{bits} at step {last['step']:,}, {best}")
    if status["general_loss"] is not None:
        lines.append(str(GeneralLossChange(status["general_loss"]["before"], status["general_loss"]["after"])))
    if status["finished"] and status["exported_step"] != status["max_steps"]:
        lines.append(f"finished; the exported model is that of step {status['exported_step']:,}")
    width = max(map(len, status["files"]), default=0)
    notes = RUN_FILES | ({} if status["command"] is None else {"model": f"trained model: {status['command']}"})
    lines += [f"  {name:<{width}}  {notes[name]}" for name in status["files"]]
    if not status["finished"]:
        lines.append(f"continue with: cutaway train --resume {status['run']}")
    return lines
