"""Plot the reward over the steps of runs, with different seeds, from their metrics logs.

python examples/grpo-words/plot.py docs/howto/grpo-reward.svg runs/words-0 runs/words-1
"""

import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from cutaway.size.plot import LINE_COLORS, MATPLOTLIB_STYLE
from cutaway.train.logging.metrics_log import read_metrics_log


def main() -> None:
    path, runs = Path(sys.argv[1]), sys.argv[2:]
    with rc_context({**MATPLOTLIB_STYLE, "svg.hashsalt": "grpo"}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, run in enumerate(runs):
            rows = list(read_metrics_log(Path(run) / "metrics.jsonl"))
            color = LINE_COLORS[number]
            steps = [(row["step"], row["reward"]) for row in rows if "reward" in row]
            evals = [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row]
            axes.plot(*zip(*steps, strict=True), color=color, linewidth=1.2, label=f"seed {number}, sampled")
            axes.plot(*zip(*evals, strict=True), "o--", color=color, markersize=4, label=f"seed {number}, validation")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("step")
        axes.set_ylabel("share of right answers")
        axes.grid(True, color="#E5E5E5", linewidth=0.6)
        axes.legend(loc="lower right")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
