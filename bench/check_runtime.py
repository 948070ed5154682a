"""Runtime and memory of all checks on the CPU: a tiny model and GPT-2 124M, in cutaway and in transformers.

    python bench/check_runtime.py [--budget 300] [--only tiny] [--json FILE]

The time budget is high, so that no check is skipped.
"""

import argparse
import importlib
import resource
import time
import warnings
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct


def build_cases() -> dict[str, Any]:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    tiny_config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return {
        "tiny, cutaway": lambda: ct.build("tiny-llama", seed=0),
        "tiny, transformers": lambda: transformers.GPT2LMHeadModel(tiny_config),
        "tiny, trained": lambda: ct.load("tiny-python"),
        "GPT-2, cutaway": lambda: ct.build("gpt2", seed=0),
        "GPT-2, cutaway, bf16": lambda: ct.build("gpt2", seed=0, dtype=torch.bfloat16),
        "GPT-2, transformers": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
    }


def peak_memory_gb() -> float:
    """Peak resident memory of this process in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--only", default="")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    rows = []
    for name, build in build_cases().items():
        if args.only not in name:
            continue
        model = build()
        before = peak_memory_gb()
        start = time.perf_counter()
        report = ct.check(model, budget=args.budget)
        seconds = time.perf_counter() - start
        print(f"{name}: {report.summary()}")
        for finding in (*report.failures, *report.warnings):
            print(finding)
        slowest = sorted(report.findings, key=lambda finding: -finding.seconds)[:8]
        row: Row = {"case": name, "seconds": seconds, "num_problems": len(report.problems)}
        row |= {"memory_before_gb": before, "peak_memory_gb": peak_memory_gb()}
        row["slowest_checks_seconds"] = {finding.check: finding.seconds for finding in slowest}
        rows.append(print_row(row))
    save_rows(args.json, rows)


if __name__ == "__main__":
    main()
