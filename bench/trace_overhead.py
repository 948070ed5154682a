"""Overhead of `ct.trace`: GPT-2 124M in fp32 on a CPU or a GPU, compared with transformers and TransformerLens.

    python bench/trace_overhead.py [--device cuda] [--batch-size 4] [--seq-len 1024] [--repeats 15] [--json FILE]

All cases run alternately in one process, so that other load affects all cases. The slowdown of a case is the median of
the ratios to the untraced forward pass of the same library, and the ratio is that to the untraced forward pass of
cutaway. TransformerLens is measured if it is installed.
"""

import argparse
import functools
import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct

Case = tuple[str, str]
"""Implementation, and which activations it records."""
UNTRACED = "untraced"
SITES = {"residual stream": ("embed", "resid_*"), "all activations": ("*",)}


def build_cases(model: Any, tokens: torch.Tensor) -> dict[Case, Callable[[], Any]]:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    def build_transformers_model(**options: Any) -> Any:
        config = transformers.GPT2Config(use_cache=False, **options)
        return transformers.GPT2LMHeadModel(config).eval().to(tokens.device)

    peer = build_transformers_model(attn_implementation="sdpa")
    cases: dict[Case, Callable[[], Any]] = {
        ("cutaway", UNTRACED): lambda: model(tokens),
        ("transformers", UNTRACED): lambda: peer(tokens).logits,
        ("transformers", "output_hidden_states"): lambda: peer(tokens, output_hidden_states=True).hidden_states,
    }
    for name, sites in SITES.items():
        cases["cutaway", name] = functools.partial(run_traced, model, tokens, *sites)
    if importlib.util.find_spec("transformer_lens"):
        lens = build_transformer_lens_model(build_transformers_model())
        cases["TransformerLens", UNTRACED] = lambda: lens(tokens)
        cases["TransformerLens", "run_with_cache"] = lambda: lens.run_with_cache(tokens)[1]
    return cases


def build_transformer_lens_model(model: Any) -> Any:
    """TransformerLens's bridge around a transformers model, with eager attention."""
    from transformer_lens.model_bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        return TransformerBridge.boot_transformers(directory, hf_model=model)


def run_traced(model: Any, tokens: torch.Tensor, *sites: str) -> Any:
    with ct.trace(model, *sites) as t:
        model(tokens)
    return t


def measure_seconds(run: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def recorded_bytes(case: Case, activations: Any) -> int:
    """Bytes of the recorded activations. Tensors that share their values are counted once."""
    if case[0] == "cutaway":
        return int(activations.nbytes)
    tensors = activations.values() if hasattr(activations, "values") else activations
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    device = torch.device(args.device)
    shape = (args.batch_size, args.seq_len)
    tokens = torch.randint(0, 50257, shape, generator=torch.Generator().manual_seed(0)).to(device)
    model: Any = ct.build("gpt2", device=device, seed=0).eval()
    cases = build_cases(model, tokens)
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    recorded: dict[Case, int] = {}
    with torch.inference_mode():
        for case, run in cases.items():
            activations = run()
            if case[1] != UNTRACED:
                recorded[case] = recorded_bytes(case, activations)
            del activations
        for repeat in range(-1, args.repeats):
            for case, run in list(cases.items())[:: 1 if repeat % 2 else -1]:
                duration = measure_seconds(run, device)
                if repeat >= 0:  # the first repeat warms up
                    seconds[case].append(duration)
    rows = []
    for (implementation, activations), times in seconds.items():
        row: Row = {"implementation": implementation, "activations": activations}
        row |= {"batch_size": args.batch_size, "seq_len": args.seq_len, "forward_ms": statistics.median(times) * 1e3}
        row["slowdown"] = median_ratio(times, seconds[implementation, UNTRACED])
        row["ratio_to_cutaway"] = median_ratio(times, seconds["cutaway", UNTRACED])
        if activations != UNTRACED:
            row["recorded_mb"] = recorded[implementation, activations] / 1e6
        if implementation == "cutaway" and activations in SITES:
            estimate = ct.trace(model, *SITES[activations]).estimate_memory(*shape)
            row["estimated_mb"] = estimate.nbytes / 1e6
        rows.append(print_row(row))
    save_rows(args.json, rows, device=args.device)


def median_ratio(times: list[float], baseline: list[float]) -> float:
    return statistics.median(time / other for time, other in zip(times, baseline, strict=True))


if __name__ == "__main__":
    main()
