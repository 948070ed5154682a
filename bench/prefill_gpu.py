"""Time to first token on one GPU beside transformers, in one run: random weights in bf16, `ct.generate` by default.

    python bench/prefill_gpu.py [--model llama-3-8b] [--case 32x1024]… [--profile] [--json FILE]

A case BxT is B prompts of T tokens and one new token each. The limit is the time of all matrix products at the speed
that a large product reaches in the same run.
"""

import argparse
import cProfile
import gc
import itertools
import pstats
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.generate import Engine, EngineConfig, SamplingParams

CASES = ("32x1024", "1x8000", "1x128")


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` calls after two warm-up calls."""
    times = []
    for i in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def measure_matmul_flops() -> float:
    """FLOP/s of a product of bf16 matrices that is large enough to reach the speed of the GPU."""
    x, w = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (median_ms(lambda: [x @ w for _ in range(10)], 5) / 1e4)


def limit_ms(model: Any, batch_size: int, length: int, flops: float) -> float:
    """Time of the products with the weights for all tokens, of attention, and of the output matrix for the last one."""
    config = model.config
    linear = sum(p.numel() for block in model.stacks["decoder"].blocks for p in block.parameters() if p.ndim == 2)
    blocks = config.decoder.blocks
    widths = [2 * block.attention.heads * block.attention.head_dim(config.d_model) for block in blocks]
    attention = sum(widths) * 2 * length * (length + 1) / 2
    head = 2 * config.d_model * config.vocab_size
    return batch_size * (2 * linear * length + attention + head) / flops * 1e3


def build_peer(config: Any) -> Any:
    """transformers' Llama of the same shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    attention, ffn = config.decoder.blocks[0].attention, config.decoder.blocks[0].ffn
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=ffn.hidden,
        num_hidden_layers=config.decoder.layers,
        num_attention_heads=attention.heads,
        num_key_value_heads=attention.num_kv_heads,
        max_position_embeddings=config.context,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        peer: Any = LlamaForCausalLM(hf_config)  # type: ignore[no-untyped-call]  # transformers has no types
    torch.set_default_dtype(torch.float32)
    return peer.eval()


def measure_case(model: Any, peer: Any, case: str, repeats: int, flops: float) -> list[Row]:
    """Rows of all implementations. "forward pass" is without an engine, of 8 prompts at a time."""
    batch_size, length = map(int, case.split("x"))
    vocab_size = model.config.vocab_size

    def prompts() -> list[list[int]]:  # new ones each time
        return [[random.randrange(vocab_size) for _ in range(length)] for _ in range(batch_size)]

    given = [prompts() for _ in range(repeats + 5)]
    queue = itertools.cycle(given)
    limit = limit_ms(model, batch_size, length, flops)
    generate_ms = median_ms(lambda: ct.generate(model, next(queue), max_new_tokens=1, temperature=0), repeats)
    times = {("cutaway", "generate"): generate_ms, ("cutaway", "running engine"): measure_engine(model, given)}
    tokens = torch.tensor(given[0][:8], device="cuda")
    with torch.no_grad():
        forward_ms = median_ms(lambda: model.hidden_states(tokens), repeats)
    times["cutaway", "forward pass"] = forward_ms * batch_size / len(tokens)
    if peer is not None:
        batch = torch.tensor(given[0], device="cuda")
        options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.no_grad():
            times["transformers", "generate"] = median_ms(lambda: peer.generate(batch, **options), repeats)
    rows = []
    for (implementation, method), ms in times.items():
        row: Row = {"case": case, "implementation": implementation, "method": method, "first_token_ms": ms}
        rows.append(print_row(row | {"limit_ms": limit, "share_of_limit": limit / ms}))
    return rows


def measure_engine(model: Any, batches: list[list[list[int]]]) -> float:
    """Median time to the first token of all prompts in an engine that keeps running, as that of a server."""
    count, length = len(batches[0]), len(batches[0][0])
    config = EngineConfig(model, max_num_seqs=count, max_model_len=length + 64, cache_implementation="paged")
    times = []
    with Engine(config).start() as engine:
        for prompts in batches:
            start = time.perf_counter()
            params = SamplingParams(max_new_tokens=1, temperature=0)
            requests = [engine.submit(prompt, params, seed=0) for prompt in prompts]
            for request in requests:
                request.result()
            times.append(time.perf_counter() - start)
    return statistics.median(times[4:]) * 1e3


def print_profile(model: Any, case: str) -> None:
    """Kernels and host operations of one prefill."""
    batch_size, length = map(int, case.split("x"))
    prompts = [[random.randrange(model.config.vocab_size) for _ in range(length)] for _ in range(batch_size)]
    ct.generate(model, prompts, max_new_tokens=1)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        ct.generate(model, prompts, max_new_tokens=1)
        torch.cuda.synchronize()
    averages = profile.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=60))
    print(averages.table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=60))
    with cProfile.Profile() as python_profile:
        ct.generate(model, prompts, max_new_tokens=1)
    pstats.Stats(python_profile).sort_stats("cumulative").print_stats(60)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama-3-8b", help="preset of a Llama model")
    parser.add_argument("--case", action="append", help=f"prompts × tokens; default {', '.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--profile", action="store_true")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    model: Any = ct.build(args.model, device="cuda", dtype=torch.bfloat16, seed=0)
    flops = measure_matmul_flops()
    print(torch.cuda.get_device_name())
    rows = [print_row({"case": "matrix product", "teraflops": flops / 1e12})]
    peer = None if args.no_peer else build_peer(model.config)
    for case in args.case or CASES:
        rows += measure_case(model, peer, case, args.repeats, flops)
        if args.profile:
            print_profile(model, case)
        gc.collect()
        torch.cuda.empty_cache()
    save_rows(args.json, rows, device="cuda")


if __name__ == "__main__":
    main()
