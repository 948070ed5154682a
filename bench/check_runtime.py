"""What checking costs on the CPU: a tiny model and GPT-2's shape (124 M), cutaway's and transformers', all checks.

    python bench/check_runtime.py [--budget 300] [--only tiny]

The budget is set high, so that nothing is left out: the figure is of everything that can be asked.
"""

import argparse
import resource
import warnings
from typing import Any

import torch

import cutaway as ct


def build_cases() -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    small = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return {
        "tiny, cutaway": lambda: ct.build("tiny-llama", seed=0),
        "tiny, transformers": lambda: transformers.GPT2LMHeadModel(small),
        "tiny, trained": lambda: ct.load("tiny-python"),
        "GPT-2, cutaway": lambda: ct.build("gpt2", seed=0),
        "GPT-2, cutaway, bf16": lambda: ct.build("gpt2", seed=0, dtype=torch.bfloat16),
        "GPT-2, transformers": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
    }


def peak_memory_gb() -> float:
    """The most that this process has held, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    for name, make in build_cases().items():
        if given.only not in name:
            continue
        model = make()
        before = peak_memory_gb()
        report = ct.check(model, budget=given.budget)
        print(f"{name}: {report.summary()}; memory {before:.2f} → {peak_memory_gb():.2f} GB")
        for finding in (*report.failures, *report.warnings):
            print(finding)
        slow = sorted(report.findings, key=lambda finding: -finding.seconds)[:8]
        print("   ", ", ".join(f"{finding.check} {finding.seconds:.2f} s" for finding in slow))


if __name__ == "__main__":
    main()
