"""Matrix products of decode steps with packed weights, in the shapes of Llama-3-8B: time and share of the bandwidth.

    python bench/packed_linear_gpu.py [--format Q4_0 --format Q8_0 …] [--rows 1 --rows 16] [--int8] [--json FILE]

Each product is captured in a CUDA graph with as many weight matrices as exceed the cache of the GPU.
"""

import argparse
import itertools
import statistics

import torch
from report import add_json_option, print_row, save_rows

from cutaway.bench.hardware import measure_copy_bandwidth
from cutaway.quantization import cuda_weights, int8_linear
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


def tile_choices(weight: CUDAWeight, rows: int, *, gated: bool) -> list[dict[str, int]]:
    """Tiles, warps and stages to try."""
    if not weight.records:
        grid = itertools.product([2] if gated else [1, 2], (4, 8), (2, 3), (2, 4))
        return [dict(zip(("TILES", "WARPS", "RING", "STAGE"), choice, strict=True)) for choice in grid]
    default = int8_linear.choose_tile(weight, rows, 1, gated=gated)
    tiles = [2] if gated else [1, 2] if rows == 1 else [1, 2, 4]
    grid = itertools.product(tiles, (1, 2), (1, 2, 3, 4), (1, 2, 4))
    names = ("TILES", "STAGE", "RING", "scale")
    choices = []
    for choice in grid:
        tile = dict(zip(names, choice, strict=True))
        scale = tile.pop("scale")  # fewer warps, more programs
        warps = -(-default["WARPS"] // scale)
        choices.append(default | tile | {"WARPS": warps, "PROGRAMS": default["PROGRAMS"] * scale})
    return choices


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--format", action="append", choices=list(BLOCK_FORMATS))
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--tune", action="store_true", help="try several numbers of tiles, warps and stages")
    parser.add_argument("--int8", action="store_true", help="use int8_linear.cu in place of packed_linear.cu")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    cuda_weights.INT8_PRODUCTS = args.int8
    bandwidth = measure_copy_bandwidth(torch.device("cuda"))
    rows_out = [print_row({"case": "copy", "terabytes_per_second": bandwidth / 1e12})]
    for name in args.format or ["Q4_0", "INT4_G128", "Q8_0"]:
        for product, (rows, columns) in SHAPES.items():
            first = random_weight(name, rows, columns)
            weights = [first] + [random_weight(name, rows, columns) for _ in range(int(CACHE_BYTES / first.nbytes) + 3)]
            gated = product == "gate and up"
            for num_rows in args.rows or [1, 16]:
                choices = tile_choices(first, num_rows, gated=gated) if args.tune else []
                results = []
                for choice in [None, *choices]:
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
