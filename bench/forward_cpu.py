"""GPT-2 124M, batch 2 × 256, fp32 on the CPU: forward and forward + backward beside transformers, in one run.

    python bench/forward_cpu.py [--repeats 30] [--json]

The two take turns, in changing order, so that a busy machine slows both; the figure is the median of the ratios with
its quartiles, and the limit is the time that a bare chain of the same matrix products takes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import cutaway as ct


def time_run(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def build_matmul_baseline(model: nn.Module, rows: int, *, backward: bool) -> Callable[[], None]:
    """The weight products of a pass and nothing else: what no implementation can go below without other kernels."""
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
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", use_cache=False)).eval()
    ours = ct.build(ct.config("gpt2"), seed=0)
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

    def our_logits() -> torch.Tensor:
        return ours(tokens)

    def their_logits() -> torch.Tensor:
        return theirs(tokens).logits

    cases = {
        "forward": (forward(our_logits), forward(their_logits), build_matmul_baseline(ours, 512, backward=False)),
        "forward + backward": (
            step(ours, our_logits),
            step(theirs, their_logits),
            build_matmul_baseline(ours, 512, backward=True),
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
        mine, peer, limit = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        low, ratio, high = statistics.quantiles(row[0] / row[1] for row in times)
        results[name] = {"cutaway_ms": mine, "transformers_ms": peer, "ratio": ratio, "products_ms": limit}
        if not arguments.json:
            print(
                f"{name:19} cutaway {mine:5.0f} ms   transformers {peer:5.0f} ms"
                f"   ratio {ratio:.3f} ({low:.3f} to {high:.3f})"
                f"   bare products {limit:5.0f} ms, {limit / mine:.0%} of ours"
            )
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
