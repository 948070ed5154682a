"""Training on the CPU beside transformers, in one run: GPT-2's shape (124 M), batch 4 × 256, fp32, AdamW, clipped.

    python bench/train_cpu.py [--repeats 10] [--json FILE]

Each side is a process of its own, and they take turns, one step at a time, in changing order. Ours takes a step as a
run does, through its loop; theirs is a plain loop with fused AdamW. Dropout is off for all.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BATCH, LENGTH, VOCABULARY = 4, 256, 50257
RATE, DECAY, CLIP = 6e-4, 0.1, 1.0
SIDES = ("ours", "transformers eager", "transformers compiled")
WARM = 2
"""Steps before the first that counts: memory is taken and code compiled."""


def tokens_of(step: int) -> torch.Tensor:
    """The same for all sides."""
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def still(config: Any) -> Any:
    """The same without dropout."""
    if isinstance(config, list | tuple):
        return [still(each) for each in config]
    if not isinstance(config, dict):
        return config
    return {key: 0.0 if key.endswith("dropout") else still(each) for key, each in config.items()}


def ours() -> Callable[[int], float]:
    """A step as a run takes it, over tokens from memory."""
    import cutaway as ct
    from cutaway.train.learner import Learner
    from cutaway.train.objectives import next_token
    from cutaway.train.optimise import make
    from cutaway.train.policy import Policy
    from cutaway.train.recipe import recipe
    from cutaway.train.step import Stepper, settled

    how = recipe(
        {
            "optimiser": {"rate": RATE, "weight_decay": DECAY},
            "schedule": {"kind": "constant", "warmup": 0},
            "training": {"batch": BATCH, "clip": CLIP, "steps": 1000},
            "data": {"length": LENGTH},
        }
    )

    class Drawn:
        def batch(self, first: int, count: int) -> torch.Tensor:
            return tokens_of(first // BATCH)[:count]

    model = ct.build(still(ct.config("gpt2").model_dump(mode="json")), seed=0).train()
    optimiser = make("adamw", model, **how.optimiser.model_dump(exclude={"kind"}))
    reading: Any = SimpleNamespace(train=Drawn())
    stepper = Stepper(
        how, Learner(model, how), optimiser, reading, lambda batch, first: next_token(batch), Policy(1, device="cpu")
    )
    return lambda number: float(settled(stepper.step(number))["loss"])


def theirs(compiled: bool) -> Callable[[int], float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", use_cache=False, **dropouts)).train()
    shrinking = [each for each in model.parameters() if each.ndim > 1]
    staying = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": shrinking, "weight_decay": DECAY}, {"params": staying, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if compiled else model

    def step(number: int) -> float:
        tokens = tokens_of(number)
        optimiser.zero_grad()
        logits = run(tokens[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        return loss.item()

    return step


def work(side: str) -> None:
    """Take a step whenever a line with its number comes, and say how long it took."""
    step = ours() if side == "ours" else theirs(compiled=side.endswith("compiled"))
    for line in sys.stdin:
        start = time.perf_counter()
        loss = step(int(line))
        taken = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print("\n" + json.dumps({"seconds": taken, "loss": loss, "peak": peak}), flush=True)


class Side:
    """A process that trains when it is asked to."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, "--work", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []
        self.told: dict[str, float] = {}

    def step(self, number: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(number, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                self.told = json.loads(line)
                return self.told["seconds"]
        raise SystemExit(f"a side has ended with exit code {self.process.wait()}")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--work", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    sides = {name: Side(name) for name in SIDES}
    for name, side in sides.items():
        first = side.step(0)
        print(f"{name}: first step after {first:.1f} s, loss {side.told['loss']:.3f}")
        for number in range(1, WARM):
            side.step(number)
    for repeat in range(arguments.repeats):
        for name in list(sides) if repeat % 2 else list(sides)[::-1]:
            sides[name].seconds.append(sides[name].step(WARM + repeat))
    middle = {name: statistics.median(side.seconds) for name, side in sides.items()}
    best = min(SIDES[1:], key=middle.__getitem__)
    rows = []
    for name, side in sides.items():
        side.end()
        ratios = [theirs / own for theirs, own in zip(sides[best].seconds, side.seconds, strict=True)]
        low, half, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rate, peak = BATCH * LENGTH / middle[name], side.told["peak"] / 2**30
        rows.append({"way": name, "seconds": middle[name], "ratio": half, "quartiles": [low, high], "peak_gib": peak})
        print(
            f"{name:22} {middle[name]:6.2f} s a step, {rate:6.0f} tokens/s, peak {peak:.2f} GiB,"
            f" {half:.2f} × {best} ({low:.2f}–{high:.2f})"
        )
    threads = torch.get_num_threads()
    told = {"bench": "train_cpu", "torch": torch.__version__, "threads": threads, "best_peer": best, "rows": rows}
    print(json.dumps(told))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
