"""Decoding beside peers on one GPU, in one run: Llama-3-8B's shape, fresh weights, bf16.

    python bench/decode.py [--gpt-fast DIR] [--part steps|gpt-fast|transformers|engine]… [--json FILE]

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
from cutaway.bench.limits import copy_rate
from cutaway.generate import Engine, Plan, Settings

NAME = "llama-3-8b"
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_k": 200}
"""How gpt-fast's generate.py draws unless told otherwise."""
STEPS = 128


def fresh() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def say(row: dict[str, Any]) -> dict[str, Any]:
    sys.stdout.write("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()) + "\n")
    sys.stdout.flush()
    return row


def median_step(run: Callable[[int], None], turns: int = 3) -> float:
    """Milliseconds a step, of the median of several runs of STEPS steps."""
    run(16)
    taken = []
    for _ in range(turns):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(STEPS)
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / STEPS)
    return statistics.median(taken) * 1e3


def our_steps(model: Any, rows: int, context: int, bits: int | None, bandwidth: float) -> dict[str, Any]:
    """An engine's own loop: steps sent off one ahead, tokens told. Each turn begins anew after `context` tokens."""
    config = model.config
    room = context + 2 * STEPS + 64
    engine = Engine(Plan(model, rows=rows, context=room, kind="paged", chunk=2048, bits=bits, compiled=True))
    prompts = [[random.randrange(config.vocab_size) for _ in range(context)] for _ in range(rows)]
    taken = []
    for _ in range(4):
        asked = Settings(max_new_tokens=2 * STEPS + 63, **DRAWN)
        tickets = [engine.submit(prompt, asked, seed=row) for row, prompt in enumerate(prompts)]
        while engine.seats.stepping < rows:
            engine.turn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            engine.turn()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / STEPS)
        for ticket in tickets:
            ticket.cancel()
        engine.run()
    took = statistics.median(taken[1:]) * 1e3
    table = config.vocab_size * config.d_model
    weights = (sum(p.numel() for p in model.parameters()) - table) * (bits or 16) / 8
    cached = rows * (context + STEPS / 2) * 32 * 2 * 8 * 128 * 2
    limit = (weights + cached) / bandwidth * 1e3
    engine.close()
    row = {"ours": f"{rows} × {context}", "bits": bits or 16, "ms": took, "limit": limit, "share": limit / took}
    return say(row)


def gpt_fast_steps(folder: str, rows: int, context: int) -> dict[str, Any]:
    sys.path.insert(0, folder)
    sys.modules.setdefault("tokenizer", types.ModuleType("tokenizer")).get_tokenizer = None  # type: ignore[attr-defined]
    import generate as theirs  # gpt-fast's own
    import model as their_model

    with torch.device("cuda"):
        model = their_model.Transformer.from_name(NAME).to(torch.bfloat16).eval()
        model.setup_caches(rows, context + 5 * STEPS)
    compiled = torch.compile(theirs.decode_one_token, mode="reduce-overhead", fullgraph=True)
    theirs.decode_one_token = compiled
    token = torch.zeros(rows, 1, dtype=torch.int, device="cuda")
    position = torch.tensor([context], device="cuda")

    @torch.no_grad()
    def run(steps: int) -> None:
        theirs.decode_n_tokens(model, token, position.clone(), steps, **DRAWN)

    start = time.perf_counter()
    run(4)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    return say({"gpt-fast": f"{rows} × {context}", "ms": median_step(run), "first": first})


def peer(config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    theirs = LlamaConfig(vocab_size=config.vocab_size, num_key_value_heads=8, rope_theta=5e5, **shape)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(theirs).eval()
    torch.set_default_dtype(torch.float32)
    return model


def requests(count: int, vocab: int, seed: int = 0) -> list[tuple[list[int], int]]:
    dice = random.Random(seed)
    sizes = [(dice.randint(16, 1024), dice.randint(16, 512)) for _ in range(count)]
    return [([dice.randrange(10, vocab) for _ in range(prompt)], answer) for prompt, answer in sizes]


def our_throughput(model: Any, asked: list[tuple[list[int], int]]) -> dict[str, Any]:
    engine = Engine(Plan(model, rows=64, context=1536, kind="paged", chunk=2048, compiled=True))
    for place, (prompt, _) in enumerate(requests(64, 128_000, seed=1)):  # every number of rows once
        engine.submit(prompt, Settings(max_new_tokens=2 + place), seed=0)
    engine.run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    tickets = [engine.submit(prompt, Settings(max_new_tokens=answer), seed=0) for prompt, answer in asked]
    engine.run()
    took = time.perf_counter() - start
    said = sum(len(ticket.result().tokens) for ticket in tickets)
    engine.close()
    return say({"engine": f"{len(asked)} requests", "seconds": took, "tokens": said, "per second": said / took})


@torch.no_grad()
def their_throughput(model: Any, asked: list[tuple[list[int], int]]) -> dict[str, Any]:
    """One padded batch that goes on until the longest answer is done."""
    longest = max(len(prompt) for prompt, _ in asked)
    most = max(answer for _, answer in asked)
    tokens = torch.zeros(len(asked), longest, dtype=torch.long, device="cuda")
    mask = torch.zeros_like(tokens)
    for row, (prompt, _) in enumerate(asked):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt, device="cuda")
        mask[row, longest - len(prompt) :] = 1
    how = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(tokens, max_new_tokens=4, **how)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(tokens, max_new_tokens=most, **how)
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    said = sum(answer for _, answer in asked)
    row = {"transformers": f"{len(asked)} requests, static", "seconds": took, "tokens": said, "per second": said / took}
    return say(row)


@torch.no_grad()
def their_steps(model: Any, rows: int, context: int) -> dict[str, Any]:
    tokens = torch.randint(10, 1000, (rows, context), device="cuda")
    how = {"do_sample": True, "pad_token_id": 0, "eos_token_id": None, **DRAWN}

    def run(steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(tokens, max_new_tokens=steps, **how)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run(4)
    took = (run(72) - run(8)) / 64 * 1e3
    return say({"transformers": f"{rows} × {context}", "ms": took})


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
    bandwidth = copy_rate(torch.device("cuda"))
    rows.append(say({"device": torch.cuda.get_device_name(), "copy TB/s": bandwidth / 1e12}))
    model: Any = None
    if "steps" in chosen or "engine" in chosen:
        model = ct.build(NAME, device="cuda", dtype=torch.bfloat16, seed=0)
    if "steps" in chosen:
        for batch, context, bits in ((1, 128, None), (1, 1024, None), (32, 1024, None), (1, 128, 8), (1, 128, 4)):
            rows.append(our_steps(model, batch, context, bits, bandwidth))
            fresh()
    asked = requests(64, 128_000)
    if "engine" in chosen:
        rows.append(our_throughput(model, asked))
    model = None
    fresh()
    if "transformers" in chosen or "engine" in chosen:
        theirs = peer(ct.config(NAME))
        if "engine" in chosen:
            rows.append(their_throughput(theirs, asked))
        if "transformers" in chosen:
            rows += [their_steps(theirs, 1, 128), their_steps(theirs, 32, 1024)]
        del theirs
        fresh()
    if "gpt-fast" in chosen and arguments.gpt_fast:
        for batch, context in ((1, 128), (32, 1024)):
            rows.append(gpt_fast_steps(arguments.gpt_fast, batch, context))
            torch._dynamo.reset()
            fresh()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
