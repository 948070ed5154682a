"""Training on the CPU compared with transformers, in one run: GPT-2 124M, batch 4 × 256, fp32, AdamW, clipping.

    python bench/train_cpu.py [--repeats 10] [--json FILE]

Each implementation runs in a separate process; they alternate step by step, in changing order. cutaway uses the step of
its trainer, transformers a plain loop with fused AdamW. Dropout is off for all.
"""

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 4, 256, 50257
LR, WEIGHT_DECAY, GRAD_CLIP = 6e-4, 0.1, 1.0
IMPLEMENTATIONS = ("cutaway", "transformers eager", "transformers compiled")
WARMUP_STEPS = 2
"""Number of warm-up steps, for memory allocation and compilation."""


def make_tokens(step: int) -> torch.Tensor:
    """Random tokens of a step, equal for all implementations."""
    return torch.randint(0, VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))


def without_dropout(config: Any) -> Any:
    """Copy of a config dict with all dropout set to 0."""
    if isinstance(config, list | tuple):
        return [without_dropout(value) for value in config]
    if not isinstance(config, dict):
        return config
    return {key: 0.0 if key.endswith("dropout") else without_dropout(value) for key, value in config.items()}


def build_cutaway_step() -> Callable[[int], float]:
    """Return a function that runs a step of cutaway's trainer on random tokens, and returns the loss."""
    import cutaway as ct
    from cutaway.train.objectives.objective import causal_lm
    from cutaway.train.optim.optimizer import build_optimizer
    from cutaway.train.recipe.load import load_recipe
    from cutaway.train.trainer.bad_step_policy import BadStepPolicy
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
    optimizer = build_optimizer(recipe.optimizer, model)
    data: Any = SimpleNamespace(train=RandomTokens())
    runner = TrainStepRunner(
        recipe,
        TrainingModule(model),
        optimizer,
        data,
        lambda batch, first: causal_lm(batch),
        BadStepPolicy(1, device="cpu"),
    )
    return lambda number: float(metrics_to_python(runner.run(number))["loss"])


def build_transformers_step(compiled: bool) -> Callable[[int], float]:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(attn_implementation="sdpa", use_cache=False, **dropouts)
    ).train()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    not_decayed = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": not_decayed, "weight_decay": 0.0}]
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
    """Run a step for each step number read from stdin, and print its duration, loss and peak memory."""
    step = build_cutaway_step() if name == "cutaway" else build_transformers_step(compiled=name.endswith("compiled"))
    for line in sys.stdin:
        start = time.perf_counter()
        loss = step(int(line))
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print("\n" + json.dumps({"seconds": seconds, "loss": loss, "peak": peak}), flush=True)


class WorkerProcess:
    """A worker process that runs training steps on request."""

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
        raise SystemExit(f"a worker exited with code {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    add_json_option(parser)
    parser.add_argument("--worker", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    if arguments.worker:
        run_worker(arguments.worker)
        return
    workers = {name: WorkerProcess(name) for name in IMPLEMENTATIONS}
    for name, worker in workers.items():
        first = worker.step(0)
        print(f"{name}: first step after {first:.1f} s, loss {worker.last_result['loss']:.3f}")
        for number in range(1, WARMUP_STEPS):
            worker.step(number)
    for repeat in range(arguments.repeats):
        for name in list(workers) if repeat % 2 else list(workers)[::-1]:
            workers[name].seconds.append(workers[name].step(WARMUP_STEPS + repeat))
    medians = {name: statistics.median(worker.seconds) for name, worker in workers.items()}
    best = min(IMPLEMENTATIONS[1:], key=medians.__getitem__)
    rows = []
    for name, worker in workers.items():
        worker.close()
        ratios = [baseline / seconds for baseline, seconds in zip(workers[best].seconds, worker.seconds, strict=True)]
        low, median_ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        row: Row = {"implementation": name, "batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "step_seconds": medians[name]}
        row["tokens_per_second"] = BATCH_SIZE * SEQ_LEN / medians[name]
        row["peak_memory_gib"] = worker.last_result["peak"] / 2**30
        rows.append(print_row(row | {"baseline": best, "speedup": median_ratio, "speedup_quartiles": [low, high]}))
    save_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
