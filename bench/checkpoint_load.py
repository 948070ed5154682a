"""Opening a directory of 1.2 billion bf16 parameters: cutaway beside transformers, each in a process of its own.

Two times are taken: until the model is there, and until it has answered once, for both libraries map the file and read
a page when it is first used. Memory is what the peak of the process grew by.

    python bench/checkpoint_load.py [--rounds 5] [--preset llama-3.2-1b]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import cutaway as ct

CHILD_PROGRAM = """
import json, sys, time, torch
which, source, dtype = sys.argv[1:]
kind = {} if dtype == "stored" else {"dtype": getattr(torch, dtype)}
if which == "cutaway":
    import cutaway as ct
    import cutaway.families.load
    open_it = lambda: ct.load(source, **kind).model
else:
    import transformers
    import transformers.models.llama.modeling_llama
    transformers.logging.disable_progress_bar()
    open_it = lambda: transformers.AutoModelForCausalLM.from_pretrained(source, **kind)
def peak():  # of this process alone: getrusage starts at what its parent had
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before, began = peak(), time.perf_counter()
model = open_it()
opened, grown = time.perf_counter() - began, peak() - before
with torch.no_grad():
    model(torch.tensor([[1, 2, 3, 4]]))
print(json.dumps({"opened": opened, "answered": time.perf_counter() - began, "grown": grown, "used": peak() - before}))
"""


def measure_load(library: str, source: Path, dtype: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD_PROGRAM, library, str(source), dtype], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="llama-3.2-1b")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = ct.build(options.preset, dtype=torch.bfloat16, seed=0)
        size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        source = ct.save(model, Path(folder) / "model", family="llama")
        del model
        print(f"{options.preset}: {size / 1e9:.2f} GB in bf16; medians of {options.rounds} rounds, order changing")
        for dtype in ("stored", "float32"):
            seen: dict[str, list[dict[str, float]]] = {"cutaway": [], "transformers": []}
            measure_load("cutaway", source, dtype)  # the file is in the page cache from here on
            for round_index in range(options.rounds):
                for which in sorted(seen, reverse=round_index % 2 == 1):
                    seen[which].append(measure_load(which, source, dtype))
            print_medians(dtype, seen)


def print_medians(dtype: str, results: dict[str, list[dict[str, float]]]) -> None:
    middle = {
        which: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        for which, turns in results.items()
    }
    ours, theirs = middle["cutaway"], middle["transformers"]
    for key, unit, scale in (("opened", "s", 1), ("answered", "s", 1), ("grown", "GB", 1e9), ("used", "GB", 1e9)):
        a, b = ours[key] / scale, theirs[key] / scale
        print(
            f"  {dtype:8} {key:8} cutaway {a:7.3f} {unit}   transformers {b:7.3f} {unit}   ratio {a / max(b, 1e-9):.2f}"
        )


if __name__ == "__main__":
    main()
