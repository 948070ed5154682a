"""Latency of inspector queries: GPT-2 124M, 512 tokens, 2 CPU cores. Limits: 2 s in total, 150 ms per activation.

python bench/inspect_latency.py [--model gpt2] [--tokens 512] [--repeats 5] [--json FILE]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.serve.inspect.inspector import Inspector, build_inspector
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries import QUERIES


def time_query(
    inspector: Inspector, name: str, on_frame: Callable[[bytes], None] = lambda frame: None, **params: object
) -> float:
    start = time.perf_counter()
    QUERIES[name](**params).run(inspector, QueryJob(on_frame)).to_safetensors()
    return time.perf_counter() - start


def append_time(times: list[float], frame: bytes) -> None:
    times.append(time.perf_counter())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    model: Any = ct.build(args.model, seed=0)
    inspector = build_inspector(model, name=args.model)
    num_layers = len(inspector.output_stack.blocks)
    inputs = [
        {"tokens": torch.randint(model.config.vocab_size, (args.tokens,)).tolist()} for _ in range(args.repeats + 1)
    ]
    time_query(inspector, "residual_norms", input=inputs.pop())  # warm-up
    first, total = [], []
    other_queries: dict[str, list[float]] = {}
    for model_input in inputs:
        frame_times: list[float] = []
        start = time.perf_counter()
        time_query(
            inspector,
            "residual_norms",
            partial(append_time, frame_times),
            input=model_input,
        )
        time_query(inspector, "journey", input=model_input, position=args.tokens - 1)
        total.append(time.perf_counter() - start)
        first.append(frame_times[1] - start)  # embedding and first block
        queries: dict[str, tuple[str, dict[str, Any]]] = {
            "another token": ("journey", {"position": 100}),
            "attention by layer": ("attention_by_layer", {"position": 100}),
            "next token": ("next_token", {"position": 100}),
            "activation q": ("activation", {"site": f"blocks.{num_layers // 2}.attn.q", "position": 100}),
            "activation pattern": ("activation", {"site": f"blocks.{num_layers // 2}.attn.pattern", "position": 100}),
            "activation hidden": ("activation", {"site": f"blocks.{num_layers - 1}.ffn.hidden", "position": 100}),
            "activation logits": ("activation", {"site": "logits", "position": 100}),
            "thumbnails": ("attention_thumbnails", {"attention": f"blocks.{num_layers // 2}.attn"}),
            "one head": ("attention_head", {"attention": f"blocks.{num_layers // 2}.attn", "head": 0}),
        }
        for name, (query, arguments) in queries.items():
            other_queries.setdefault(name, []).append(time_query(inspector, query, input=model_input, **arguments))
    forward = []
    with torch.no_grad():
        for model_input in inputs:
            start = time.perf_counter()
            model.hidden_states(torch.tensor([model_input["tokens"]]))
            forward.append(time.perf_counter() - start)
    print(f"{args.model}, {args.tokens} tokens, {torch.get_num_threads()} threads")
    rows = []
    for name, times in {"forward pass": forward, "first block": first, "total": total, **other_queries}.items():
        row: Row = {"case": name, "model": args.model, "num_tokens": args.tokens, "ms": 1e3 * median(times)}
        if name == "total" or name.startswith("activation"):
            row["limit_ms"] = 2000 if name == "total" else 150
        rows.append(print_row(row))
    save_rows(args.json, rows)


if __name__ == "__main__":
    main()
