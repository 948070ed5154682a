"""Decoding on the CPU beside transformers, in one run: GPT-2's shape (124 M), batch 1, the same numbers of tokens.

    python bench/decode_cpu.py [--turns 6] [--json FILE]

Both go through their own generate. A turn is a long answer less a short one, so that prompts and set-up cancel out; the
order changes from turn to turn. The limit is the weights' bytes over the rate of a bare read.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cutaway as ct
from cutaway.generate import Engine, Plan, Settings

PROMPT = list(range(1, 33))
SHORT, LONG = 8, 72


def peer() -> Callable[[int], float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).eval()
    tokens = torch.tensor([PROMPT])

    def run(count: int) -> float:
        start = time.perf_counter()
        model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - start

    return run


def ours(model: Any, **how: Any) -> Callable[[int], float]:
    engine = Engine(Plan(model, rows=1, context=128, **how))

    def run(count: int) -> float:
        start = time.perf_counter()
        engine.submit(PROMPT, Settings(max_new_tokens=count), seed=0)
        engine.run()
        return time.perf_counter() - start

    return run


def read_rate() -> float:
    """Bytes a second of a bare read of more than any cache holds, at best."""
    numbers = torch.zeros(64 * 2**20)
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        numbers.sum()
        taken.append(time.perf_counter() - start)
    return numbers.numel() * 4 / min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    model: Any = ct.build("gpt2", seed=0)
    sides = {
        "transformers fp32": peer(),
        "fp32": ours(model, compiled=False),
        "fp32, compiled": ours(model, compiled=True),
        "16 bits": ours(model, bits=16, compiled=False),
        "8 bits": ours(model, bits=8, compiled=False),
        "8 bits, compiled": ours(model, bits=8, compiled=True),
    }
    for name, side in sides.items():
        start = time.perf_counter()
        side(SHORT)
        sys.stdout.write(f"{name}: first answer after {time.perf_counter() - start:.1f} s\n")
        side(SHORT)
    steps: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.turns):
        for name in list(sides) if turn % 2 else list(sides)[::-1]:
            steps[name].append((sides[name](LONG) - sides[name](SHORT)) / (LONG - SHORT) * 1e3)
    limit = 4 * sum(p.numel() for p in model.parameters()) / read_rate() * 1e3
    base = statistics.median(steps["transformers fp32"])
    rows = []
    for name, taken in steps.items():
        ratios = [theirs / own for theirs, own in zip(steps["transformers fp32"], taken, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append({"way": name, "ms": statistics.median(taken), "ratio": middle, "quartiles": [low, high]})
        sys.stdout.write(
            f"{name:20} {rows[-1]['ms']:7.2f} ms a token, {1e3 / rows[-1]['ms']:6.1f} tokens/s,"
            f" {middle:.2f} × transformers ({low:.2f}–{high:.2f})\n"
        )
    sys.stdout.write(f"limit of fp32 by a bare read: {limit:.2f} ms; transformers {limit / base:.0%} of it\n")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
