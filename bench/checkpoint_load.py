"""Loading a checkpoint of 1.2 billion bf16 parameters: cutaway and transformers, each in a separate process.

Two times are measured: until the model is loaded, and until the first forward pass, because both libraries map the file
and read a page on first use. Memory is the growth of the process's peak.

    python bench/checkpoint_load.py [--rounds 5] [--preset llama-3.2-1b] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct

CHILD_PROGRAM = """
import json, sys, time, torch
library, source, dtype = sys.argv[1:]
kwargs = {} if dtype == "stored" else {"dtype": getattr(torch, dtype)}
if library == "cutaway":
    import cutaway as ct
    import cutaway.families.load
    load_model = lambda: ct.load(source, **kwargs).model
else:
    import transformers
    import transformers.models.llama.modeling_llama
    transformers.logging.disable_progress_bar()
    load_model = lambda: transformers.AutoModelForCausalLM.from_pretrained(source, **kwargs)
def peak():  # VmHWM is of this process only; ru_maxrss of getrusage includes the parent at fork
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before, start = peak(), time.perf_counter()
model = load_model()
loaded, load_memory = time.perf_counter() - start, peak() - before
with torch.no_grad():
    model(torch.tensor([[1, 2, 3, 4]]))
first_forward = time.perf_counter() - start
memory = {"load_memory_gb": load_memory / 1e9, "total_memory_gb": (peak() - before) / 1e9}
print(json.dumps({"load_seconds": loaded, "first_forward_seconds": first_forward, **memory}))
"""


def measure_load(library: str, source: Path, dtype: str) -> dict[str, float]:
    result = subprocess.run(
        [sys.executable, "-c", CHILD_PROGRAM, library, str(source), dtype], capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="llama-3.2-1b")
    add_json_option(parser)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = ct.build(options.preset, dtype=torch.bfloat16, seed=0)
        size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        source = ct.save(model, Path(folder) / "model", family="llama")
        del model
        print(f"{options.preset}: {size / 1e9:.2f} GB in bf16; medians of {options.rounds} rounds in alternating order")
        for dtype in ("stored", "float32"):
            results: dict[str, list[dict[str, float]]] = {"cutaway": [], "transformers": []}
            measure_load("cutaway", source, dtype)  # brings the file into the page cache
            for round_index in range(options.rounds):
                for library in sorted(results, reverse=round_index % 2 == 1):
                    results[library].append(measure_load(library, source, dtype))
            for library, runs in results.items():
                row: Row = {"implementation": library, "model": options.preset, "dtype": dtype}
                row |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                rows.append(print_row(row))
    save_rows(options.json, rows)


if __name__ == "__main__":
    main()
