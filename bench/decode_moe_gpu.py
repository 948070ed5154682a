"""Decode steps of mixtures of experts on one GPU: random weights in bf16, `Engine.step`, share of the bandwidth limit.

    python bench/decode_moe_gpu.py [--model qwen3-30b-a3b]… [--batch 1]… [--compile] [--profile] [--json FILE]

By default the engine has its default options, and the steps after the first 64 tokens of a request of 512 are measured.
`--compile` measures fast decode steps from the first step on.

The limit is the number of bytes that a step reads (weights of the selected experts, other weights, cached keys and
values) divided by the bandwidth of a copy in the same run. With several rows, the expected number of different experts
counts.
"""

import argparse
import gc
import random
import statistics
import time
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.bench.hardware import measure_copy_bandwidth
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.model.moe import MixtureOfExperts

CONTEXT, NUM_STEPS = 128, 64


def bytes_per_step(model: Any, batch_size: int) -> float:
    """Bytes that a decode step of `batch_size` rows reads."""
    stack = model.stacks["decoder"]
    count = 0.0
    for block in stack.blocks:
        size = sum(p.numel() for p in block.parameters())
        moe = block.ffn.f
        if isinstance(moe, MixtureOfExperts):
            experts = sum(p.numel() for p in moe.experts.parameters())
            share = 1 - (1 - moe.router.top_k / moe.num_experts) ** batch_size
            size += experts * (share - 1)
        count += size
    count += model.config.d_model * model.config.vocab_size
    count += batch_size * CONTEXT * sum(heads * width for shape in stack.cache_shapes for heads, width in shape)
    return 2 * count


def measure_steps(model: Any, batch_size: int, bandwidth: float, *, compile: bool | None, profile: bool) -> Row:
    start = time.perf_counter()
    engine = Engine(EngineConfig(model, max_num_seqs=batch_size, max_model_len=CONTEXT + 512, compile=compile))
    seconds = []
    for repeat in range(3):
        prompts = [[random.randrange(model.config.vocab_size) for _ in range(CONTEXT)] for _ in range(batch_size)]
        params = SamplingParams(max_new_tokens=512)
        for row, prompt in enumerate(prompts):
            engine.submit(prompt, params, seed=row)
        while engine.num_decoding < batch_size:
            engine.step()
        for _ in range(64 if repeat == 0 else 4):
            engine.step()
        torch.cuda.synchronize()
        if repeat == 0:
            seconds_before = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / NUM_STEPS)
        if engine.num_decoding < batch_size:
            raise RuntimeError(f"only {engine.num_decoding} of {batch_size} requests decoded in all steps")
        if profile and repeat == 2:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                for _ in range(8):
                    engine.step()
                torch.cuda.synchronize()
            print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=50))
        for request in list(engine.scheduler.running):
            request.abort()
        engine.run()
    engine.close()
    step_ms = statistics.median(seconds) * 1e3
    limit_ms = bytes_per_step(model, batch_size) / bandwidth * 1e3
    return {
        "batch_size": batch_size,
        "step_ms": step_ms,
        "limit_ms": limit_ms,
        "share_of_limit": limit_ms / step_ms,
        "first_64_tokens_seconds": seconds_before,
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", help="preset; by default three mixtures of experts")
    parser.add_argument("--batch", action="append", type=int, help="number of rows; default 1 and 32")
    parser.add_argument("--compile", action="store_true", help="fast decode steps from the first step on")
    parser.add_argument("--profile", action="store_true")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    bandwidth = measure_copy_bandwidth(torch.device("cuda"))
    print(torch.cuda.get_device_name())
    rows = [print_row({"case": "copy", "terabytes_per_second": bandwidth / 1e12})]
    for name in args.model or ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]:
        model = ct.build(name, device="cuda", dtype=torch.bfloat16, seed=0)
        for batch_size in args.batch or [1, 32]:
            result = measure_steps(model, batch_size, bandwidth, compile=args.compile or None, profile=args.profile)
            rows.append(print_row({"implementation": "cutaway", "model": name, **result}))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    save_rows(args.json, rows, device="cuda")


if __name__ == "__main__":
    main()
