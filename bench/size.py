"""What `cutaway size` says beside what a GPU does: peak memory of training steps, and times against their bounds.

    python bench/size.py [--gpu h200] [--memory] [--time] [--json FILE]

Memory is PyTorch's own peak of allocated bytes over a step in steady state. Times are medians; the bound is the
device's published peak, and the device's own copy and matrix product are measured in the same run.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import cutaway as ct
from cutaway.config import Config
from cutaway.size import Size

STEPS: list[dict[str, Any]] = [
    {"source": name, "batch": batch, "context": context, "dtype": dtype, "checkpointing": mode, "kernel": kernel}
    for name, batch, context, dtype, mode, kernel in [
        ("gpt2", 8, 1024, "mixed", "none", "auto"),
        ("gpt2", 8, 1024, "bf16", "none", "auto"),
        ("gpt2", 8, 1024, "fp32", "none", "auto"),
        ("gpt2", 8, 1024, "mixed", "selective", "auto"),
        ("gpt2", 8, 1024, "mixed", "full", "auto"),
        ("gpt2", 8, 1024, "mixed", "none", "explicit"),
        ("gpt2", 1, 128, "mixed", "none", "auto"),
        ("llama-3.2-1b", 4, 2048, "mixed", "none", "auto"),
        ("llama-3.2-1b", 4, 2048, "bf16", "none", "auto"),
        ("llama-3.2-1b", 4, 2048, "bf16", "selective", "auto"),
        ("llama-3.2-1b", 4, 2048, "bf16", "full", "auto"),
        ("llama-3.2-1b", 4, 2048, "bf16", "none", "flex"),
        ("llama-3.2-1b", 2, 2048, "fp32", "none", "auto"),
        ("llama-3.2-1b", 1, 128, "bf16", "none", "auto"),
        ("gemma-3-270m", 8, 1024, "bf16", "none", "auto"),
        ("olmoe-1b-7b", 2, 1024, "bf16", "none", "auto"),
        ("qwen3-0.6b", 4, 1024, "mixed", "none", "auto"),
        ("bert-base-mlm", 16, 512, "mixed", "none", "auto"),
        ("modernbert-base", 8, 1024, "bf16", "none", "auto"),
        ("t5-base", 8, 512, "bf16", "none", "auto"),
        ("bart-base", 8, 512, "mixed", "full", "auto"),
        ("deepseek-v2-lite/4", 4, 1024, "bf16", "none", "auto"),
    ]
]

SERVED = [
    ("gpt2", 8, 1024),
    ("llama-3.2-1b", 1, 8192),
    ("llama-3.2-1b", 4, 2048),
    ("llama-3-8b", 2, 4096),
    ("qwen3-0.6b", 8, 1024),
    ("olmoe-1b-7b", 2, 2048),
    ("deepseek-v2-lite", 1, 4096),
    ("t5-base", 8, 512),
]


def described(source: str) -> Config:
    """A preset, or with /N its first N layers."""
    name, _, layers = source.partition("/")
    config = ct.config(name)
    if not layers:
        return config
    return config.replace(decoder=config.stacks["decoder"].replace(layers=int(layers)))


def logits_and_loss(model: Any, config: Config, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = tokens[:, :-1]
    logits = model(inputs, inputs) if config.form == "encoder-decoder" else model(inputs)
    return logits, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trainer(question: dict[str, Any], *, compiled: bool = False) -> tuple[Size, Callable[[], None]]:
    """The answer, and a step of what was asked."""
    size = ct.size(**question | {"source": described(question["source"])}, mode="train")
    config = size.question.config
    dtype = {"bf16": torch.bfloat16}.get(question["dtype"], torch.float32)
    model = ct.build(config, device="cuda", dtype=dtype, seed=0).train()
    model.use_kernel(question["kernel"]).use_recompute(question["checkpointing"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocab_size, (question["batch"], question["context"] + 1), device="cuda")
    run = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=question["dtype"] == "mixed"):
            _logits, loss = logits_and_loss(run, config, tokens)  # held to the end, as most training loops do
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return size, step


def fresh() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    torch._dynamo.reset()


def peak_memory(question: dict[str, Any]) -> dict[str, Any]:
    fresh()
    base = torch.cuda.memory_allocated()
    size, step = trainer(question)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step()
    measured = torch.cuda.max_memory_allocated() - base
    return question | {"said": size.memory.total, "measured": measured, "off": size.memory.total / measured - 1}


@torch.no_grad()
def serving_memory(name: str, batch: int, context: int) -> dict[str, Any]:
    """Weights, a cache, and the peak of reading all prompts at once."""
    fresh()
    base = torch.cuda.memory_allocated()
    size = ct.size(name, batch=batch, context=context)
    model: Any = ct.build(name, device="cuda", dtype=torch.bfloat16, seed=0)
    tokens = torch.randint(0, size.question.config.vocab_size, (batch, context), device="cuda")
    for _ in range(2):
        cache = model.new_cache(batch, context)
        torch.cuda.reset_peak_memory_stats()
        if size.question.config.form == "encoder-decoder":
            x = model.hidden(tokens, tokens, cache=cache)
        else:
            x = model.hidden(tokens, cache=cache)
        model.head(x[:, -1:])
        measured = torch.cuda.max_memory_allocated() - base
        del x, cache
    question = {"source": name, "batch": batch, "context": context, "dtype": "bf16", "checkpointing": "serve"}
    said = size.memory.total
    return question | {"kernel": "auto", "said": said, "measured": measured, "off": said / measured - 1}


def seconds(run: Callable[[], object], repeats: int = 15) -> float:
    for _ in range(4):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def limits() -> dict[str, float]:
    """What this device reaches in a bare copy and a bare product."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        "copy": 2 * x.numel() / seconds(lambda: y.copy_(x)),
        "matmul_bf16": 2 * 8192**3 / seconds(lambda: a @ a),
    }


def timed(what: str, question: dict[str, Any], bound: Any, took: float, *, eager: bool) -> dict[str, Any]:
    slowest = bound.eager if eager else bound.slowest
    return question | {
        "what": what,
        "bound": bound.seconds,
        "binds": bound.binds,
        "expected": [bound.fastest, slowest],
        "measured": took,
        "share_of_bound": bound.seconds / took,
        "within": bound.fastest <= took <= slowest,
    }


def train_times(gpu: str) -> list[dict[str, Any]]:
    rows = []
    for question, compiled in ((STEPS[0], False), (STEPS[0], True), (STEPS[8], False), (STEPS[8], True)):
        fresh()
        size, step = trainer(question | {"hardware": gpu}, compiled=compiled)
        what = "train, compiled" if compiled else "train"
        rows.append(timed(what, question, size.train_time, seconds(step), eager=not compiled))
        report(rows[-1])
        del step
    return rows


@torch.no_grad()
def serving_times(gpu: str) -> list[dict[str, Any]]:
    """Decoding eagerly and in a CUDA graph, and reading, in bf16."""
    rows = []
    for name, batch, context, compiled in [
        ("gpt2", 1, 1024, False),
        ("gpt2", 1, 1024, True),
        ("llama-3.2-1b", 1, 2048, True),
        ("llama-3.2-1b", 32, 2048, True),
        ("llama-3-8b", 1, 2048, False),
        ("llama-3-8b", 1, 2048, True),
        ("llama-3-8b", 32, 2048, True),
    ]:
        fresh()
        question = {"source": name, "batch": batch, "context": context, "dtype": "bf16"}
        size = ct.size(**question, hardware=gpu)
        model: Any = ct.build(name, device="cuda", dtype=torch.bfloat16, seed=0)
        prompt = torch.randint(0, size.question.config.vocab_size, (batch, context - 1), device="cuda")
        cache = model.new_cache(batch, context)
        for piece in prompt.split(256, dim=1):
            model(piece, cache=cache)
        cache.fixed = compiled
        step = decoder(model, cache, prompt[:, -1:].clone(), context, compiled=compiled)
        what = "decode, in a graph" if compiled else "decode"
        rows.append(timed(what, question, size.decode_time, seconds(step), eager=not compiled))
        report(rows[-1])
        if batch == 1 and not compiled:
            took = seconds(partial(model.hidden, prompt), 7)
            rows.append(timed("prefill", question, size.prefill_time, took, eager=True))
            report(rows[-1])
        del model, cache, step
    return rows


def decoder(model: Any, cache: Any, token: torch.Tensor, context: int, *, compiled: bool) -> Callable[[], None]:
    """A step of decoding, over and over at the same place: from Python, or compiled and replayed as a CUDA graph."""
    run = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model

    def step() -> None:
        cache.rewind(context - 1)
        run(token, cache=cache)

    if not compiled:
        return step
    step()
    step()
    cache.rewind(context - 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(token, cache=cache)
    return graph.replay


def report(row: dict[str, Any]) -> None:
    name = f"{row['source']} {row['batch']}×{row['context']} {row['dtype']}"
    if "off" in row:
        how = f"{row['checkpointing']:9} {row['kernel']:8}"
        said, measured = (f"{row[which] / 1e9:7.3f}" for which in ("said", "measured"))
        line = f"{name:32} {how} said {said} GB, measured {measured}: {row['off']:+.2%}"
    else:
        low, high = (f"{1e3 * each:.2f}" for each in row["expected"])
        line = (
            f"{name:32} {row['what']:18} bound {1e3 * row['bound']:8.3f} ms ({row['binds']}), expected {low}–{high},"
            f" measured {1e3 * row['measured']:8.3f}: {row['share_of_bound']:.0%} of the bound, within: {row['within']}"
        )
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--memory", action="store_true", help="only memory")
    parser.add_argument("--time", action="store_true", help="only time")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    both = arguments.memory == arguments.time
    rows: list[dict[str, Any]] = []
    if both or arguments.memory:
        for question in STEPS:
            rows.append(peak_memory(question))
            report(rows[-1])
        for name, batch, context in SERVED:
            rows.append(serving_memory(name, batch, context))
            report(rows[-1])
    if both or arguments.time:
        fresh()
        rows.append(limits())
        sys.stdout.write(
            f"copy {rows[-1]['copy'] / 1e12:.2f} TB/s, bf16 product {rows[-1]['matmul_bf16'] / 1e12:.0f} TFLOP/s\n"
        )
        rows += train_times(arguments.gpu) + serving_times(arguments.gpu)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
