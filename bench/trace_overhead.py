"""Overhead of `ct.trace` on the CPU: GPT-2 124M, 1 × 256 tokens, compared with transformers and TransformerLens.

    python bench/trace_overhead.py [--repeats 15] [--json FILE]

All cases run alternately in one process, so that other load affects all cases.
TransformerLens is measured if it is installed.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cutaway as ct

SEQ_LEN = 256


def build_cases() -> tuple[dict[str, Callable[[], Any]], Any]:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    tokens = torch.randint(0, 50257, (1, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    model = ct.build("gpt2", seed=0).eval()
    transformers_model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(attn_implementation="sdpa", use_cache=False)
    ).eval()
    cases: dict[str, Callable[[], Any]] = {
        "cutaway": lambda: model(tokens),
        "transformers": lambda: transformers_model(tokens).logits,
        "cutaway, all residual sites": lambda: run_traced(model, tokens, "embed", "resid_*"),
        "cutaway, everything": lambda: run_traced(model, tokens, "*"),
    }
    if importlib.util.find_spec("transformer_lens"):
        cases |= build_transformer_lens_cases(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).eval(), tokens
        )
    return cases, (model, tokens)


def build_transformer_lens_cases(model: Any, tokens: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Cases with TransformerLens's bridge around a transformers model, with eager attention."""
    from transformer_lens.model_bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        lens: Any = TransformerBridge.boot_transformers(directory, hf_model=model)
    return {
        "TransformerLens": lambda: lens(tokens),
        "TransformerLens, run_with_cache": lambda: lens.run_with_cache(tokens),
    }


def run_traced(model: Any, tokens: torch.Tensor, *sites: str) -> Any:
    with ct.trace(model, *sites) as t:
        model(tokens)
    return t


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    runs, (model, tokens) = build_cases()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for run in runs.values():
            run()
        for repeat in range(args.repeats):
            for name, run in list(runs.items())[:: 1 if repeat % 2 else -1]:
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        traced_bytes = run_traced(model, tokens, "*").nbytes
    estimated_bytes = ct.trace(model, "*").estimate_memory(1, SEQ_LEN).nbytes
    rows = []
    for name, times in seconds.items():
        ratio = statistics.median(traced / untraced for traced, untraced in zip(times, seconds["cutaway"], strict=True))
        rows.append({"implementation": name, "seconds": statistics.median(times), "slowdown": ratio})
        print(f"{name:34} {statistics.median(times) * 1e3:7.1f} ms   {ratio:.2f} × cutaway untraced")
    print(f"all activations: {traced_bytes / 1e6:.1f} MB; estimated: {estimated_bytes / 1e6:.1f} MB")
    result = {"bench": "trace_overhead", "rows": rows, "bytes": traced_bytes, "estimated_bytes": estimated_bytes}
    if "TransformerLens, run_with_cache" in runs:
        with torch.inference_mode():
            _, cache = runs["TransformerLens, run_with_cache"]()
        result["transformer_lens_bytes"] = sum({value.data_ptr(): value.nbytes for value in cache.values()}.values())
        print(f"TransformerLens cache: {result['transformer_lens_bytes'] / 1e6:.1f} MB, shared values counted once")
    print(json.dumps(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result) + "\n", encoding="utf-8")


main()
