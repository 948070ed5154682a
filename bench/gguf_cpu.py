"""Generation from a GGUF file on the CPU beside llama.cpp, in one run: prefill and decode speed, and memory.

    python bench/gguf_cpu.py MODEL.gguf [--threads 2] [--prompt-len 256] [--rounds 3] [--json FILE]

Each measurement is a process of its own, and the implementations alternate. llama.cpp is the package xllamacpp; without
it, only cutaway is measured. `unpacked` is cutaway with weights that are converted to fp32 when they are loaded. Memory
is the peak of the process without that before loading; pages of the mapped file count.
"""

import argparse
import json
import multiprocessing
import statistics
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from report import Row, add_json_option, print_row, save_rows

SHORT_TOKENS, LONG_TOKENS = 8, 72


def resident_bytes() -> int:
    """Peak resident memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def measure_cutaway(path: str, threads: int, prompt_len: int, *, dequantize: bool) -> dict[str, float]:
    import torch

    import cutaway as ct

    torch.set_num_threads(threads)
    start_bytes, start = resident_bytes(), time.perf_counter()
    checkpoint = ct.load(path, dequantize=dequantize)
    load_seconds = time.perf_counter() - start

    def seconds(length: int, count: int, seed: int) -> float:
        prompt = [(7 * i + seed) % 1000 + 100 for i in range(length)]
        start = time.perf_counter()
        ct.generate(checkpoint, [prompt], max_new_tokens=count, temperature=0.0, ignore_eos=True)
        return time.perf_counter() - start

    seconds(16, 4, 0)
    short, long = seconds(16, SHORT_TOKENS, 1), seconds(16, LONG_TOKENS, 1)
    return {
        "decode_tokens_per_second": (LONG_TOKENS - SHORT_TOKENS) / (long - short),
        "prefill_tokens_per_second": prompt_len / seconds(prompt_len, 1, 2),
        "load_seconds": load_seconds,
        "memory_mb": (resident_bytes() - start_bytes) / 1e6,
    }


def measure_llama_cpp(path: str, threads: int, prompt_len: int) -> dict[str, float]:
    import xllamacpp  # type: ignore[import-not-found]  # optional, and without types

    start_bytes, start = resident_bytes(), time.perf_counter()
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = path, 1, 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    load_seconds = time.perf_counter() - start

    def timings(length: int, count: int) -> dict[str, float]:
        prompt = [(7 * i + length) % 1000 + 100 for i in range(length)]
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        url = f"{server.listening_address}/completion"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
            result: dict[str, float] = json.load(response)["timings"]
        return result

    timings(16, 4)
    return {
        "decode_tokens_per_second": timings(16, LONG_TOKENS)["predicted_per_second"],
        "prefill_tokens_per_second": timings(prompt_len, 1)["prompt_per_second"],
        "load_seconds": load_seconds,
        "memory_mb": (resident_bytes() - start_bytes) / 1e6,
    }


def run_measurement(name: str, arguments: Any, results: Any) -> None:
    options = (arguments.model, arguments.threads, arguments.prompt_len)
    if name == "llama.cpp":
        results.put(measure_llama_cpp(*options))
    else:
        results.put(measure_cutaway(*options, dequantize=name == "unpacked"))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="cutaway, unpacked or llama.cpp")
    add_json_option(parser)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    names = arguments.only or ["cutaway", "unpacked", *(["llama.cpp"] if find_spec("xllamacpp") else [])]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    context = multiprocessing.get_context("spawn")
    for round_index in range(arguments.rounds):
        for name in names if round_index % 2 else names[::-1]:
            results: Any = context.Queue()
            process = context.Process(target=run_measurement, args=(name, arguments, results))
            process.start()
            measured[name].append(results.get())
            process.join()
    file = Path(arguments.model)
    file_mb = file.stat().st_size / 1e6
    rows = []
    for name in names:
        row: Row = {"implementation": name, "file": file.name, "file_mb": file_mb, "prompt_len": arguments.prompt_len}
        row |= {key: statistics.median(each[key] for each in measured[name]) for key in measured[name][0]}
        rows.append(print_row(row | {"memory_per_file_size": row["memory_mb"] / file_mb}))
    save_rows(arguments.json, rows, threads=arguments.threads)


if __name__ == "__main__":
    main()
