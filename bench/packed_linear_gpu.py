"""Matrix products of decode steps with packed weights, in the shapes of Llama-3-8B: time and share of the bandwidth.

    python bench/packed_linear_gpu.py [--format Q4_0 --format Q8_0 …] [--rows 1 --rows 16] [--json FILE]

Each product is captured in a CUDA graph with as many weight matrices as exceed the cache of the GPU.
"""

import argparse
import itertools
import statistics

import torch
from report import add_json_option, print_row, save_rows

from cutaway.bench.hardware import measure_copy_bandwidth
from cutaway.quantization.block_formats import BLOCK_FORMATS
from cutaway.quantization.cuda_weights import CUDAWeight, pack_for_cuda, packed_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
CACHE_BYTES = 200e6


def random_weight(name: str, rows: int, columns: int) -> CUDAWeight:
    block_format = BLOCK_FORMATS[name]
    num_bytes = columns // block_format.block_size * block_format.num_bytes
    return pack_for_cuda(torch.randint(0, 256, (rows, num_bytes), dtype=torch.uint8, device="cuda"), block_format)


def measure(weights: list[CUDAWeight], rows: int, *, gated: bool, tile: dict[str, int] | None) -> float:
    """Median seconds of one product."""
    first = weights[0]
    x = torch.randn(rows, first.columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(rows, first.rows // (1 + gated), device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for weight in weights:
            packed_linear(x, weight, y, gated=gated, act=int(gated), overlap=True, tile=tile)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    seconds = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(weights))
    return statistics.median(seconds)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--format", action="append", choices=list(BLOCK_FORMATS))
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--tune", action="store_true", help="try several numbers of tiles, warps and stages")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    bandwidth = measure_copy_bandwidth(torch.device("cuda"))
    rows_out = [print_row({"case": "copy", "terabytes_per_second": bandwidth / 1e12})]
    for name in args.format or ["Q4_0", "INT4_G128", "Q8_0"]:
        for product, (rows, columns) in SHAPES.items():
            first = random_weight(name, rows, columns)
            weights = [first] + [random_weight(name, rows, columns) for _ in range(int(CACHE_BYTES / first.nbytes) + 3)]
            gated = product == "gate and up"
            for num_rows in args.rows or [1, 16]:
                choices: list[dict[str, int] | None] = [None]
                if args.tune:
                    tiles = [2] if gated else [1, 2]
                    grid = itertools.product(tiles, (4, 8), (2, 3), (2, 4))
                    choices = [dict(zip(("TILES", "WARPS", "RING", "STAGE"), choice, strict=True)) for choice in grid]
                results = []
                for choice in choices:
                    try:
                        results.append((measure(weights, num_rows, gated=gated, tile=choice), choice))
                    except RuntimeError as error:
                        print(choice, str(error)[:100])
                results.sort(key=lambda each: each[0])
                for seconds, choice in results[:4]:
                    row = {
                        "format": name,
                        "product": product,
                        "rows": num_rows,
                        **{name.lower(): value for name, value in (choice or {}).items()},
                        "microseconds": seconds * 1e6,
                    }
                    row["share_of_bandwidth"] = first.nbytes / seconds / bandwidth
                    rows_out.append(print_row(row))
            del weights, first
    save_rows(args.json, rows_out, device="cuda")


if __name__ == "__main__":
    main()
