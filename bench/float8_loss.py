"""Loss of float8 training compared with bf16 on the same data: loss curves, and their difference over seeds.

    python bench/float8_loss.py [--seeds 3] [--steps 500] [--svg float8-loss.svg] [--json FILE]

The runs of a seed have the same initial weights and the same batches; only `training.precision` differs. On a GPU with
fp8 products: GPT-2 (124M parameters), 32 × 1,024 tokens per step. On a CPU: a decoder with 0.1 million parameters,
8 × 64 tokens, with emulated fp8 products. The text is Python's standard library. fp32 shows what the rounding to bf16
changes. Draws the loss curves, and prints the differences from bf16: of the training
loss over the last fifth of the steps, and of the final validation loss (which is computed in bf16, with float8 too).
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.evaluate.confidence_interval import ConfidenceInterval, mean_confidence_interval
from cutaway.size.plot import LINE_COLORS, MATPLOTLIB_STYLE
from cutaway.train.logging.metrics_log import read_metrics_log
from cutaway.train.optim.float8 import has_fp8_products

TINY_MODEL: dict[str, Any] = {
    "form": "decoder",
    "d_model": 64,
    "decoder": {
        "layers": 2,
        "norm": {"kind": "rmsnorm"},
        "block": {
            "attention": {"heads": 4, "position": {"kind": "rope"}},
            "ffn": {"kind": "gated", "hidden": 192},
        },
    },
}
LAST_SHARE = 5
"""The training loss is averaged over the last 1/5 of the steps."""
SMOOTHING_STEPS = 25
STEPS_PER_POINT = 5
"""Distance of the points of a smoothed line, which keeps the file small."""
Run = dict[str, Any]


def build_recipe(device: torch.device, steps: int) -> tuple[str | dict[str, Any], list[str]]:
    """Recipe and overrides of all runs."""
    recipe: str | dict[str, Any] = "gpt2-124m"
    size = ["training.batch_size=32", "eval.num_sequences=256", "schedule.warmup_steps=50"]
    if device.type == "cpu":
        recipe = {"model": TINY_MODEL, "data": {"seq_len": 64}, "optimizer": {"lr": 1e-3}}
        size = ["training.batch_size=8", "eval.num_sequences=512", "schedule.warmup_steps=20"]
    lengths = [f"training.max_steps={steps}", f"eval.interval={steps}", f"checkpoint.interval={steps}"]
    return recipe, [*size, *lengths, "checkpoint.num_snapshots=0", "training.preflight=false"]


def precisions(emulate: bool) -> dict[str, list[str]]:
    """Overrides of the recipe by the name of the variant. The first one is the reference."""
    float8 = ["training.precision=float8", f"training.float8.emulate={str(emulate).lower()}"]
    return {
        "bf16": ["training.precision=bf16"],
        "fp32": ["training.precision=fp32"],
        "float8 tensorwise": float8,
        "float8 rowwise": [*float8, "training.float8.recipe_name=rowwise"],
    }


def train(recipe: str | dict[str, Any], overrides: list[str], device: torch.device) -> Run:
    """Losses of all steps, final validation loss, and seconds per step (median)."""
    with tempfile.TemporaryDirectory() as directory:
        run = ct.train(recipe, Path(directory) / "run", overrides=overrides, device=device).directory
        rows = list(read_metrics_log(run / "metrics.jsonl"))
        seconds = sorted(row["seconds"] for row in read_metrics_log(run / "timings.jsonl"))
    [eval_loss] = [row["eval_loss"] for row in rows if "eval_loss" in row]
    losses = [row["loss"] for row in rows if "loss" in row]
    return {"losses": losses, "eval_loss": eval_loss, "seconds_per_step": seconds[len(seconds) // 2]}


def final_loss(run: Run) -> float:
    last = run["losses"][-(len(run["losses"]) // LAST_SHARE) :]
    return float(sum(last) / len(last))


def differences(runs: Sequence[Run], references: Sequence[Run]) -> dict[str, ConfidenceInterval]:
    """Differences from the reference, paired by seed, with 95 % intervals of their mean."""
    pairs = list(zip(runs, references, strict=True))
    return {
        "loss": mean_confidence_interval([final_loss(run) - final_loss(reference) for run, reference in pairs]),
        "eval_loss": mean_confidence_interval([run["eval_loss"] - reference["eval_loss"] for run, reference in pairs]),
    }


def format_interval(interval: ConfidenceInterval) -> str:
    half_width = "" if interval.half_width is None else f" ± {interval.half_width:.4f}"
    return f"{interval.mean:+.4f}{half_width}"


def smooth(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Steps, and the mean over the SMOOTHING_STEPS steps around each of them."""
    half = SMOOTHING_STEPS // 2
    indices = range(0, len(values), STEPS_PER_POINT)
    windows = [values[max(0, index - half) : index + half + 1] for index in indices]
    return [index + 1 for index in indices], [sum(window) / len(window) for window in windows]


def plot(runs: dict[str, list[Run]], path: Path, title: str) -> None:
    """Above: loss curves of the first seed. Below: smoothed difference from the reference, each seed and the mean.

    The thin line above is the loss of the reference in each step.
    """
    reference, *variants = runs
    colors = dict(zip(runs, LINE_COLORS, strict=False))
    with rc_context({**MATPLOTLIB_STYLE, "svg.hashsalt": "float8"}):
        figure = Figure(figsize=(8, 5.4), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        losses = runs[reference][0]["losses"]
        above.plot(range(1, len(losses) + 1), losses, color=colors[reference], alpha=0.3, linewidth=0.7)
        above.plot(*smooth(losses), color=colors[reference], linewidth=1.5, label=reference)
        for number, name in enumerate(each for each in variants if each.startswith("float8")):
            dashes = (6 * number, (4, 8))  # so that equal lines are all visible
            above.plot(
                *smooth(runs[name][0]["losses"]), color=colors[name], linewidth=1.5, linestyle=dashes, label=name
            )
        for name in variants:
            by_seed: list[list[float]] = []
            for run, other in zip(runs[name], runs[reference], strict=True):
                steps, values = smooth([a - b for a, b in zip(run["losses"], other["losses"], strict=True)])
                below.plot(steps, values, color=colors[name], alpha=0.3, linewidth=0.6)
                by_seed.append(values)
            mean = [sum(values) / len(values) for values in zip(*by_seed, strict=True)]
            below.plot(steps, mean, color=colors[name], linewidth=1.5, label=f"{name} − {reference}")
        below.axhline(0, color=colors[reference], linewidth=0.8)
        above.set_title(title)
        above.set_ylabel("loss (nats per token)")
        below.set_ylabel(f"difference, mean of\n{SMOOTHING_STEPS} steps")
        below.set_xlabel("step")
        for axes, location in ((above, "upper right"), (below, "lower right")):
            axes.grid(True, color="#E5E5E5", linewidth=0.6)
            axes.legend(ncols=3, loc=location, handlelength=3)
        figure.savefig(path, metadata={"Date": None})


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--svg", type=Path, default=Path("float8-loss.svg"), metavar="FILE")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe, overrides = build_recipe(device, args.steps)
    variants = precisions(emulate=not has_fp8_products(device))
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for seed in range(args.seeds):
        for name, settings in variants.items():
            runs[name].append(train(recipe, [*overrides, *settings, f"training.seed={seed}"], device))
            print(f"seed {seed} {name:18} {final_loss(runs[name][-1]):.4f}", flush=True)
    reference, *others = runs
    results = {name: differences(runs[name], runs[reference]) for name in others}
    rows = []
    for name, each in runs.items():
        row: Row = {"implementation": f"cutaway, {name}", "steps": args.steps, "seeds": args.seeds}
        row |= {"loss": sum(map(final_loss, each)) / args.seeds}
        row |= {"eval_loss": sum(run["eval_loss"] for run in each) / args.seeds}
        row |= {"milliseconds_per_step": sum(run["seconds_per_step"] for run in each) / args.seeds * 1e3}
        for key, interval in results.get(name, {}).items():
            row[f"{key}_minus_{reference}"] = format_interval(interval)
        rows.append(print_row(row))
    title = f"{args.steps} steps on {torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU (emulated fp8)'}"
    plot(runs, args.svg, f"{title}; curves of seed 0, differences of {args.seeds} seeds")
    save_rows(args.json, rows, device=device.type)


if __name__ == "__main__":
    main()
