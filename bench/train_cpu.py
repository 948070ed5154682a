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

BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 4, 256, 50257
LR, WEIGHT_DECAY, GRAD_CLIP = 6e-4, 0.1, 1.0
IMPLEMENTATIONS = ("cutaway", "transformers eager", "transformers compiled")
WARMUP_STEPS = 2
"""Steps before the first that counts: memory is taken and code compiled."""


def make_tokens(step: int) -> torch.Tensor:
    """The same for all sides."""
    return torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))


def without_dropout(config: Any) -> Any:
    """The same without dropout."""
    if isinstance(config, list | tuple):
        return [without_dropout(each) for each in config]
    if not isinstance(config, dict):
        return config
    return {key: 0.0 if key.endswith("dropout") else without_dropout(each) for key, each in config.items()}


def build_cutaway_step() -> Callable[[int], float]:
    """A step as a run takes it, over tokens from memory."""
    import cutaway as ct
    from cutaway.train.objectives.objective import causal_lm
    from cutaway.train.optim.optimizer import build_optimizer
    from cutaway.train.recipe.load import load_recipe
    from cutaway.train.trainer.step_policy import StepPolicy
    from cutaway.train.trainer.train_step import TrainStepRunner, metrics_to_python
    from cutaway.train.trainer.training_module import TrainingModule

    recipe = load_recipe(
        {
            "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY},
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "training": {"batch_size": BATCH_SIZE, "grad_clip": GRAD_CLIP, "max_steps": 1000},
            "data": {"seq_len": SEQ_LEN},
        }
    )

    class RandomTokens:
        def get_batch(self, first: int, count: int) -> torch.Tensor:
            return make_tokens(first // BATCH_SIZE)[:count]

    model = ct.build(without_dropout(ct.config("gpt2").model_dump(mode="json")), seed=0).train()
    optimizer = build_optimizer("adamw", model, **recipe.optimizer.model_dump(exclude={"kind"}))
    data: Any = SimpleNamespace(train=RandomTokens())
    runner = TrainStepRunner(
        recipe,
        TrainingModule(model, recipe),
        optimizer,
        data,
        lambda batch, first: causal_lm(batch),
        StepPolicy(1, device="cpu"),
    )
    return lambda number: float(metrics_to_python(runner.run(number))["loss"])


def build_transformers_step(compiled: bool) -> Callable[[int], float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", use_cache=False, **dropouts)).train()
    shrinking = [each for each in model.parameters() if each.ndim > 1]
    staying = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": shrinking, "weight_decay": WEIGHT_DECAY}, {"params": staying, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if compiled else model

    def step(number: int) -> float:
        tokens = make_tokens(number)
        optimizer.zero_grad()
        logits = run(tokens[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        return loss.item()

    return step


def run_worker(name: str) -> None:
    """Take a step whenever a line with its number comes, and say how long it took."""
    step = build_cutaway_step() if name == "cutaway" else build_transformers_step(compiled=name.endswith("compiled"))
    for line in sys.stdin:
        start = time.perf_counter()
        loss = step(int(line))
        taken = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print("\n" + json.dumps({"seconds": taken, "loss": loss, "peak": peak}), flush=True)


class WorkerProcess:
    """A process that trains when it is asked to."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, "--worker", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: list[float] = []
        self.last_result: dict[str, float] = {}

    def step(self, number: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(number, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                self.last_result = json.loads(line)
                return self.last_result["seconds"]
        raise SystemExit(f"a side has ended with exit code {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(arguments.worker)
        return
    sides = {name: WorkerProcess(name) for name in IMPLEMENTATIONS}
    for name, side in sides.items():
        first = side.step(0)
        print(f"{name}: first step after {first:.1f} s, loss {side.last_result['loss']:.3f}")
        for number in range(1, WARMUP_STEPS):
            side.step(number)
    for repeat in range(arguments.repeats):
        for name in list(sides) if repeat % 2 else list(sides)[::-1]:
            sides[name].seconds.append(sides[name].step(WARMUP_STEPS + repeat))
    middle = {name: statistics.median(side.seconds) for name, side in sides.items()}
    best = min(IMPLEMENTATIONS[1:], key=middle.__getitem__)
    rows = []
    for name, side in sides.items():
        side.close()
        ratios = [theirs / own for theirs, own in zip(sides[best].seconds, side.seconds, strict=True)]
        low, half, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rate, peak = BATCH_SIZE * SEQ_LEN / middle[name], side.last_result["peak"] / 2**30
        rows.append(
            {"implementation": name, "seconds": middle[name], "ratio": half, "quartiles": [low, high], "peak_gib": peak}
        )
        print(
            f"{name:22} {middle[name]:6.2f} s a step, {rate:6.0f} tokens/s, peak {peak:.2f} GiB,"
            f" {half:.2f} × {best} ({low:.2f}–{high:.2f})"
        )
    threads = torch.get_num_threads()
    told = {"bench": "train_cpu", "torch": torch.__version__, "threads": threads, "best_baseline": best, "rows": rows}
    print(json.dumps(told))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
