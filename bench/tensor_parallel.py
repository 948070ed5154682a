"""Decode steps on N processes beside one process, and the ratio that `size` predicts.

    python bench/tensor_parallel.py --processes 2 [--json FILE]

The prediction: a rank reads as many bytes per step as `ct.size(..., tp=N)` says, at the bandwidth that one process
reaches, and waits for the all-reduces that `size` counts, each as long as a measured all-reduce of the same size. Each
process has one thread on the CPU, or one GPU. The weights are random. Rounds alternate; the fastest one counts, because
other programs can only make a round slower.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.model import Transformer
from cutaway.model.parallel.process_group import get_tensor_parallel, join_processes

CONTEXT = 64


def median_seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    seconds = []
    for _ in range(repeats + 2):  # the first two are warm-up
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def measure_decode(model: Transformer, steps: int) -> dict[str, float]:
    """Median time of a decode step of one sequence, and its CPU time, in which other programs do not count."""
    cache = model.new_cache(1, CONTEXT + steps + 2)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(token.expand(1, CONTEXT), cache=cache)
        before = time.thread_time()
        seconds = median_seconds(lambda: model(token, cache=cache), steps, model.device)
    return {"decode": seconds, "cpu": (time.thread_time() - before) / (steps + 2)}


def run_rank(rank: int, size: int, directory: str, device_type: str, steps: int, output: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if size > 1:
        store = dist.FileStore(f"{output}.store", size)  # type: ignore[attr-defined]
        join_processes(device, store=store, rank=rank, world_size=size)
    model = ct.load(directory, device=device, tensor_parallel_size=size).model
    result = measure_decode(model, steps)
    if size > 1:
        ranks, x = get_tensor_parallel(size, device), torch.zeros(1, 1, model.config.d_model, device=device)
        result["all_reduce"] = median_seconds(lambda: ranks.all_reduce(x), 200, device)
    if rank == 0:
        Path(output).write_text(json.dumps(result))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--d-model", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_json_option(parser)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    d_model, size = arguments.d_model, arguments.processes
    attention = {"decoder.block.attention.heads": 16, "decoder.block.attention.kv_heads": 4}
    config = ct.config("tiny-llama").replace(
        {"decoder.layers": arguments.layers, "d_model": d_model, "decoder.block.ffn.hidden": 4 * d_model}
        | attention
        | {"vocab_size": 32_000, "decoder.block.attention.d_head": d_model // 16}
    )
    with tempfile.TemporaryDirectory() as directory:
        model = f"{directory}/model"
        ct.save(ct.build(config, seed=0), model)
        results: dict[int, dict[str, float]] = {1: {}, size: {}}
        for i in range(arguments.rounds):
            for count, best in results.items():
                output = f"{directory}/{count}.{i}.json"
                job = (count, model, arguments.device, arguments.steps, output)
                mp.spawn(run_rank, job, nprocs=count)  # type: ignore[no-untyped-call, attr-defined]
                for name, seconds in json.loads(Path(output).read_text()).items():
                    best[name] = min(seconds, best.get(name, seconds))
    options: dict[str, Any] = {"dtype": "fp32", "kv_cache_dtype": "fp32", "context": CONTEXT}
    one, many = (ct.size(config, world_size=count, tp=count, **options) for count in (1, size))
    share = many.decode_workload(1).min_bytes / one.decode_workload(1).min_bytes
    num_all_reduces = many.decode_pass.counter.num_collectives["all-reduce"]
    before, measured = results[1]["decode"], results[size]["decode"]
    predicted = before * share + num_all_reduces * results[size]["all_reduce"]
    print(f"{one.num_parameters / 1e6:,.0f} M parameters in fp32, {arguments.device}, one sequence, {CONTEXT} tokens")
    rows = []
    for case, count, seconds in (("measured", 1, before), ("measured", size, measured), ("predicted", size, predicted)):
        row: Row = {"case": case, "num_processes": count, "step_ms": seconds * 1e3, "tokens_per_second": 1 / seconds}
        row["speedup"] = before / seconds
        if case == "measured":
            row["cpu_ms"] = results[count]["cpu"] * 1e3
        else:
            row |= {"read_ms": before * share * 1e3, "share_of_bytes": share, "num_all_reduces": num_all_reduces}
            row["all_reduce_us"] = results[size]["all_reduce"] * 1e6
        rows.append(print_row(row))
    save_rows(arguments.json, rows, device=arguments.device, threads=1)


if __name__ == "__main__":
    main()
