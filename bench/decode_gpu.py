"""Decoding beside peers on one GPU, in one run: Llama-3-8B's shape, fresh weights, bf16.

    python bench/decode_gpu.py [--gpt-fast DIR] [--part steps|gpt-fast|transformers|engine]… [--json FILE]

DIR holds gpt-fast's own files (model.py, generate.py); it is run as its generate.py runs it. Times are of whole steps,
sampling included, from the host's clock over many steps; the limit is the bytes a step must read over the bandwidth of
a copy, measured in the same run.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cutaway as ct
from cutaway.bench.hardware import measure_copy_bandwidth
from cutaway.generate import Engine, EngineConfig, SamplingParams

MODEL_NAME = "llama-3-8b"
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 200}
"""How gpt-fast's generate.py draws unless told otherwise."""
NUM_STEPS = 128


def free_gpu_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def print_row(row: dict[str, Any]) -> dict[str, Any]:
    sys.stdout.write("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()) + "\n")
    sys.stdout.flush()
    return row


def median_step_ms(run: Callable[[int], None], repeats: int = 3) -> float:
    """Milliseconds a step, of the median of several runs of NUM_STEPS steps."""
    run(16)
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(NUM_STEPS)
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / NUM_STEPS)
    return statistics.median(taken) * 1e3


def bench_cutaway_steps(
    model: Any, batch_size: int, context: int, weight_bits: int | None, bandwidth: float
) -> dict[str, Any]:
    """An engine's own loop: steps sent off one ahead, tokens told. Each turn begins anew after `context` tokens."""
    config = model.config
    room = context + 2 * NUM_STEPS + 64
    engine = Engine(
        EngineConfig(
            model,
            max_num_seqs=batch_size,
            max_model_len=room,
            cache_implementation="paged",
            prefill_chunk_size=2048,
            weight_bits=weight_bits,
            compile=True,
        )
    )
    prompts = [[random.randrange(config.vocab_size) for _ in range(context)] for _ in range(batch_size)]
    taken = []
    for _ in range(4):
        params = SamplingParams(max_new_tokens=2 * NUM_STEPS + 63, **SAMPLING)
        requests = [engine.submit(prompt, params, seed=row) for row, prompt in enumerate(prompts)]
        while engine.num_decoding < batch_size:
            engine.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / NUM_STEPS)
        for request in requests:
            request.abort()
        engine.run()
    took = statistics.median(taken[1:]) * 1e3
    table = config.vocab_size * config.d_model
    weights = (sum(p.numel() for p in model.parameters()) - table) * (weight_bits or 16) / 8
    cached = batch_size * (context + NUM_STEPS / 2) * 32 * 2 * 8 * 128 * 2
    limit = (weights + cached) / bandwidth * 1e3
    engine.close()
    row = {
        "cutaway": f"{batch_size} × {context}",
        "weight_bits": weight_bits or 16,
        "ms": took,
        "limit_ms": limit,
        "fraction_of_limit": limit / took,
    }
    return print_row(row)


def bench_gpt_fast_steps(folder: str, batch_size: int, context: int) -> dict[str, Any]:
    sys.path.insert(0, folder)
    sys.modules.setdefault("tokenizer", types.ModuleType("tokenizer")).get_tokenizer = None  # type: ignore[attr-defined]
    import generate as theirs  # gpt-fast's own
    import model as their_model

    with torch.device("cuda"):
        model = their_model.Transformer.from_name(MODEL_NAME).to(torch.bfloat16).eval()
        model.setup_caches(batch_size, context + 5 * NUM_STEPS)
    compiled = torch.compile(theirs.decode_one_token, mode="reduce-overhead", fullgraph=True)
    theirs.decode_one_token = compiled
    token = torch.zeros(batch_size, 1, dtype=torch.int, device="cuda")
    position = torch.tensor([context], device="cuda")

    @torch.no_grad()
    def run(steps: int) -> None:
        theirs.decode_n_tokens(model, token, position.clone(), steps, **SAMPLING)

    start = time.perf_counter()
    run(4)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    return print_row({"gpt-fast": f"{batch_size} × {context}", "ms": median_step_ms(run), "first_seconds": first})


def build_transformers_model(config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    theirs = LlamaConfig(vocab_size=config.vocab_size, num_key_value_heads=8, rope_theta=5e5, **shape)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(theirs).eval()
    torch.set_default_dtype(torch.float32)
    return model


def random_requests(count: int, vocab: int, seed: int = 0) -> list[tuple[list[int], int]]:
    dice = random.Random(seed)
    sizes = [(dice.randint(16, 1024), dice.randint(16, 512)) for _ in range(count)]
    return [([dice.randrange(10, vocab) for _ in range(prompt)], answer) for prompt, answer in sizes]


def bench_cutaway_throughput(model: Any, request_specs: list[tuple[list[int], int]]) -> dict[str, Any]:
    engine = Engine(
        EngineConfig(
            model,
            max_num_seqs=64,
            max_model_len=1536,
            cache_implementation="paged",
            prefill_chunk_size=2048,
            compile=True,
        )
    )
    for place, (prompt, _) in enumerate(random_requests(64, 128_000, seed=1)):  # every number of rows once
        engine.submit(prompt, SamplingParams(max_new_tokens=2 + place), seed=0)
    engine.run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    requests = [
        engine.submit(prompt, SamplingParams(max_new_tokens=answer), seed=0) for prompt, answer in request_specs
    ]
    engine.run()
    took = time.perf_counter() - start
    said = sum(len(request.result().tokens) for request in requests)
    engine.close()
    return print_row(
        {"engine": f"{len(request_specs)} requests", "seconds": took, "tokens": said, "tokens_per_second": said / took}
    )


@torch.no_grad()
def bench_transformers_throughput(model: Any, request_specs: list[tuple[list[int], int]]) -> dict[str, Any]:
    """One padded batch that goes on until the longest answer is done."""
    longest = max(len(prompt) for prompt, _ in request_specs)
    most = max(answer for _, answer in request_specs)
    tokens = torch.zeros(len(request_specs), longest, dtype=torch.long, device="cuda")
    mask = torch.zeros_like(tokens)
    for row, (prompt, _) in enumerate(request_specs):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt, device="cuda")
        mask[row, longest - len(prompt) :] = 1
    how = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(tokens, max_new_tokens=4, **how)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(tokens, max_new_tokens=most, **how)
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    said = sum(answer for _, answer in request_specs)
    row = {
        "transformers": f"{len(request_specs)} requests, static",
        "seconds": took,
        "tokens": said,
        "tokens_per_second": said / took,
    }
    return print_row(row)


@torch.no_grad()
def bench_transformers_steps(model: Any, batch_size: int, context: int) -> dict[str, Any]:
    tokens = torch.randint(10, 1000, (batch_size, context), device="cuda")
    how = {"do_sample": True, "pad_token_id": 0, "eos_token_id": None, **SAMPLING}

    def run(steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(tokens, max_new_tokens=steps, **how)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run(4)
    took = (run(72) - run(8)) / 64 * 1e3
    return print_row({"transformers": f"{batch_size} × {context}", "ms": took})


def main() -> None:
    parts = ("steps", "gpt-fast", "transformers", "engine")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt-fast", metavar="DIR")
    parser.add_argument("--part", action="append", choices=parts)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    chosen = arguments.part or parts
    random.seed(0)
    rows: list[dict[str, Any]] = []
    bandwidth = measure_copy_bandwidth(torch.device("cuda"))
    rows.append(print_row({"device": torch.cuda.get_device_name(), "copy TB/s": bandwidth / 1e12}))
    model: Any = None
    if "steps" in chosen or "engine" in chosen:
        model = ct.build(MODEL_NAME, device="cuda", dtype=torch.bfloat16, seed=0)
    if "steps" in chosen:
        for batch_size, context, weight_bits in (
            (1, 128, None),
            (1, 1024, None),
            (32, 1024, None),
            (1, 128, 8),
            (1, 128, 4),
        ):
            rows.append(bench_cutaway_steps(model, batch_size, context, weight_bits, bandwidth))
            free_gpu_memory()
    request_specs = random_requests(64, 128_000)
    if "engine" in chosen:
        rows.append(bench_cutaway_throughput(model, request_specs))
    model = None
    free_gpu_memory()
    if "transformers" in chosen or "engine" in chosen:
        theirs = build_transformers_model(ct.config(MODEL_NAME))
        if "engine" in chosen:
            rows.append(bench_transformers_throughput(theirs, request_specs))
        if "transformers" in chosen:
            rows += [bench_transformers_steps(theirs, 1, 128), bench_transformers_steps(theirs, 32, 1024)]
        del theirs
        free_gpu_memory()
    if "gpt-fast" in chosen and arguments.gpt_fast:
        for batch_size, context in ((1, 128), (32, 1024)):
            rows.append(bench_gpt_fast_steps(arguments.gpt_fast, batch_size, context))
            torch._dynamo.reset()
            free_gpu_memory()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
