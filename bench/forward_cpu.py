"""GPT-2 124M, batch 2 × 256, fp32 on the CPU: forward and forward + backward compared with transformers, in one run.

    python bench/forward_cpu.py [--repeats 30] [--json FILE]

The libraries alternate, in changing order, so that other load affects both; the result is the median of the ratios with
quartiles, and the limit is the time of the same matmuls alone.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import add_json_option, print_row, save_rows
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


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    add_json_option(parser)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
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
    rows = []
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
        result = {"case": name, "cutaway_ms": cutaway_ms, "transformers_ms": transformers_ms, "ratio": ratio}
        result |= {"ratio_quartiles": [low, high], "matmul_ms": matmul_ms, "matmul_share": matmul_ms / cutaway_ms}
        rows.append(print_row(result))
    save_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
