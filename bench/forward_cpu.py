"""GPT-2 124M, batch 2 × 256, fp32 on the CPU: forward and forward + backward compared with transformers, in one run.

    python bench/forward_cpu.py [--repeats 30] [--json]

The libraries alternate, in changing order, so that other load affects both; the result is the median of the ratios with
quartiles, and the limit is the time of the same matmuls alone.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import cutaway as ct


def time_run(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def build_matmul_baseline(model: nn.Module, rows: int, *, backward: bool) -> Callable[[], None]:
    """Return a function that runs only the weight matmuls of a pass. Its time is a lower bound with these kernels."""
    weights = [
        parameter.detach() for parameter in model.parameters() if parameter.ndim == 2 and parameter.shape[0] != 1024
    ]
    pairs = [(torch.randn(rows, weight.shape[1]), weight) for weight in weights]
    grads = [torch.randn(rows, weight.shape[0]) for weight in weights] if backward else []

    def run() -> None:
        for x, weight in pairs:
            torch.mm(x, weight.T)
        for grad, (x, weight) in zip(grads, pairs, strict=False):
            torch.mm(grad, weight)
            torch.mm(grad.T, x)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    hf_config = transformers.GPT2Config(attn_implementation="sdpa", use_cache=False)
    transformers_model = transformers.GPT2LMHeadModel(hf_config).eval()
    cutaway_model = ct.build(ct.config("gpt2"), seed=0)
    tokens = torch.randint(0, 50257, (2, 256))

    def forward(model: Callable[[], torch.Tensor]) -> Callable[[], None]:
        @torch.no_grad()
        def run() -> None:
            model()

        return run

    def step(model: nn.Module, logits: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            out = logits()
            nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

        return run

    def cutaway_logits() -> torch.Tensor:
        return cutaway_model(tokens)

    def transformers_logits() -> torch.Tensor:
        return transformers_model(tokens).logits

    cases = {
        "forward": (
            forward(cutaway_logits),
            forward(transformers_logits),
            build_matmul_baseline(cutaway_model, 512, backward=False),
        ),
        "forward + backward": (
            step(cutaway_model, cutaway_logits),
            step(transformers_model, transformers_logits),
            build_matmul_baseline(cutaway_model, 512, backward=True),
        ),
    }
    results = {}
    for name, runs in cases.items():
        for run in runs * 2:
            run()
        times = []
        for repeat in range(arguments.repeats):
            order = sorted(range(3), key=lambda index: (index + repeat) % 3)
            row = {index: time_run(runs[index]) for index in order}
            times.append([row[index] for index in range(3)])
        cutaway_ms, transformers_ms, matmul_ms = (
            statistics.median(column) * 1e3 for column in zip(*times, strict=True)
        )
        low, ratio, high = statistics.quantiles(row[0] / row[1] for row in times)
        results[name] = {
            "cutaway_ms": cutaway_ms,
            "transformers_ms": transformers_ms,
            "ratio": ratio,
            "matmul_ms": matmul_ms,
        }
        if not arguments.json:
            print(
                f"{name:19} cutaway {cutaway_ms:5.0f} ms   transformers {transformers_ms:5.0f} ms"
                f"   ratio {ratio:.3f} ({low:.3f} to {high:.3f})"
                f"   matmuls only {matmul_ms:5.0f} ms, {matmul_ms / cutaway_ms:.0%} of cutaway"
            )
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
