"""Accuracy of `cutaway size` on a GPU: peak memory of training steps, and times compared with the roofline bounds.

    python bench/size_accuracy.py [--gpu h200] [--memory] [--time] [--json FILE]

Memory is PyTorch's peak of allocated bytes in a steady-state step. Times are medians. The bound uses the device's
published peaks. Copy bandwidth and matmul FLOP/s of the device are measured in the same run.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.config import Config
from cutaway.model.adapters.quantized_linear import quantize_linears
from cutaway.size import SizeEstimate
from cutaway.size.roofline import RooflineBound

TRAINING_CASES: list[dict[str, Any]] = [
    {
        "source": name,
        "batch_size": batch_size,
        "context": context,
        "dtype": dtype,
        "activation_checkpointing": mode,
        "kernel": kernel,
    }
    for name, batch_size, context, dtype, mode, kernel in [
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

ADAPTER_CASES: list[dict[str, Any]] = [
    {
        "source": name,
        "batch_size": batch_size,
        "context": context,
        "dtype": "mixed",
        "activation_checkpointing": mode,
        "kernel": "auto",
        "adapter": adapter,
        "quantization": quantization,
        "loss": "full",
    }
    for name, batch_size, context, mode, adapter, quantization in [
        ("llama-3.2-1b", 4, 2048, "none", {"rank": 16}, "none"),
        ("llama-3.2-1b", 4, 2048, "full", {"rank": 16}, "none"),
        ("llama-3.2-1b", 4, 2048, "selective", {"rank": 16}, "none"),
        ("llama-3.2-1b", 4, 2048, "none", {"rank": 16, "targets": ["attn.q", "attn.v"]}, "none"),
        ("llama-3.2-1b", 4, 2048, "full", {"rank": 16, "use_dora": True, "targets": ["attn.*"]}, "none"),
        ("llama-3.2-1b", 4, 2048, "none", {"rank": 16}, "nf4"),
        ("llama-3.2-1b", 4, 2048, "full", {"rank": 16}, "nf4"),
        ("llama-3.2-1b", 4, 2048, "full", {"rank": 16}, "int8"),
        ("gpt2", 8, 1024, "none", {"rank": 16}, "none"),
        ("qwen3-0.6b", 4, 1024, "none", {"rank": 8, "dropout": 0.1}, "none"),
    ]
]
"""Eager steps of adapters in fp32 on a frozen base in bf16."""

INFERENCE_CASES = [
    ("gpt2", 8, 1024),
    ("llama-3.2-1b", 1, 8192),
    ("llama-3.2-1b", 4, 2048),
    ("llama-3-8b", 2, 4096),
    ("qwen3-0.6b", 8, 1024),
    ("olmoe-1b-7b", 2, 2048),
    ("deepseek-v2-lite", 1, 4096),
    ("t5-base", 8, 512),
]


def load_config(source: str) -> Config:
    """Config of a preset. The source NAME/N is the preset NAME with its first N layers only."""
    name, _, layers = source.partition("/")
    config = ct.config(name)
    if not layers:
        return config
    return config.replace(decoder=config.stacks["decoder"].replace(layers=int(layers)))


def logits_and_loss(model: Any, config: Config, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = tokens[:, :-1]
    logits = model(inputs, inputs) if config.form == "encoder-decoder" else model(inputs)
    return logits, F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build_train_step(options: dict[str, Any], *, compiled: bool = False) -> tuple[SizeEstimate, Callable[[], None]]:
    """Return the estimate and a function that runs the training step."""
    size = ct.size(**options | {"source": load_config(options["source"])}, mode="train")
    config = size.options.config
    has_adapter = "adapter" in options
    dtype = torch.bfloat16 if has_adapter or options["dtype"] == "bf16" else torch.float32
    model: Any = ct.build(config, device="cuda", dtype=dtype, seed=0).train()
    model.use_kernel(options["kernel"]).use_activation_checkpointing(options["activation_checkpointing"])
    if has_adapter:
        if options["quantization"] != "none":
            quantize_linears(model, options["quantization"])
        model.add_adapter(options["adapter"], seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    tokens = torch.randint(0, config.vocab_size, (options["batch_size"], options["context"] + 1), device="cuda")
    run = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=options["dtype"] == "mixed"):
            _logits, loss = logits_and_loss(
                run, config, tokens
            )  # the logits stay alive to the end of the step, as in most training loops
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return size, step


def free_gpu_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    torch._dynamo.reset()


def measure_training_memory(options: dict[str, Any]) -> dict[str, Any]:
    free_gpu_memory()
    base = torch.cuda.memory_allocated()
    size, step = build_train_step(options)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step()
    measured = torch.cuda.max_memory_allocated() - base
    return options | {
        "estimated_gb": size.memory.total_bytes / 1e9,
        "measured_gb": measured / 1e9,
        "relative_error": size.memory.total_bytes / measured - 1,
    }


@torch.no_grad()
def measure_inference_memory(name: str, batch_size: int, context: int) -> dict[str, Any]:
    """Peak memory of weights, KV cache and prefill of all prompts at once."""
    free_gpu_memory()
    base = torch.cuda.memory_allocated()
    size = ct.size(name, batch_size=batch_size, context=context)
    model: Any = ct.build(name, device="cuda", dtype=torch.bfloat16, seed=0)
    tokens = torch.randint(0, size.options.config.vocab_size, (batch_size, context), device="cuda")
    for _ in range(2):
        cache = model.new_cache(batch_size, context)
        torch.cuda.reset_peak_memory_stats()
        if size.options.config.form == "encoder-decoder":
            x = model.hidden_states(tokens, tokens, cache=cache)
        else:
            x = model.hidden_states(tokens, cache=cache)
        model.head(x[:, -1:])
        measured = torch.cuda.max_memory_allocated() - base
        del x, cache
    estimated = size.memory.total_bytes
    return {
        "source": name,
        "batch_size": batch_size,
        "context": context,
        "dtype": "bf16",
        "activation_checkpointing": "inference",
        "kernel": "auto",
        "estimated_gb": estimated / 1e9,
        "measured_gb": measured / 1e9,
        "relative_error": estimated / measured - 1,
    }


def median_seconds(run: Callable[[], object], repeats: int = 15) -> float:
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


def measure_limits() -> Row:
    """Measured copy bandwidth and matmul FLOPS of the device."""
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        "case": "limits",
        "copy_terabytes_per_second": 2 * x.numel() / median_seconds(lambda: y.copy_(x)) / 1e12,
        "matmul_bf16_teraflops": 2 * 8192**3 / median_seconds(lambda: a @ a) / 1e12,
    }


def compare_to_bound(
    workload: str, options: dict[str, Any], bound: RooflineBound | None, seconds: float, *, eager: bool
) -> dict[str, Any]:
    assert bound is not None
    upper = bound.eager_seconds_high if eager else bound.expected_seconds_high
    return options | {
        "workload": workload,
        "min_seconds": bound.min_seconds,
        "bottleneck": bound.bottleneck,
        "expected_seconds": [bound.expected_seconds_low, upper],
        "measured_seconds": seconds,
        "fraction_of_bound": bound.min_seconds / seconds,
        "within_expected": bound.expected_seconds_low <= seconds <= upper,
    }


def measure_train_times(gpu: str) -> list[dict[str, Any]]:
    rows = []
    for options, compiled in (
        (TRAINING_CASES[0], False),
        (TRAINING_CASES[0], True),
        (TRAINING_CASES[8], False),
        (TRAINING_CASES[8], True),
    ):
        free_gpu_memory()
        size, step = build_train_step(options | {"hardware": gpu}, compiled=compiled)
        workload = "train, compiled" if compiled else "train"
        rows.append(compare_to_bound(workload, options, size.train_time, median_seconds(step), eager=not compiled))
        print_row(rows[-1])
        del step
    return rows


@torch.no_grad()
def measure_inference_times(gpu: str) -> list[dict[str, Any]]:
    """Measure decode, in eager mode and in a CUDA graph, and prefill, all in bf16."""
    rows = []
    for name, batch_size, context, compiled in [
        ("gpt2", 1, 1024, False),
        ("gpt2", 1, 1024, True),
        ("llama-3.2-1b", 1, 2048, True),
        ("llama-3.2-1b", 32, 2048, True),
        ("llama-3-8b", 1, 2048, False),
        ("llama-3-8b", 1, 2048, True),
        ("llama-3-8b", 32, 2048, True),
    ]:
        free_gpu_memory()
        options: dict[str, Any] = {"source": name, "batch_size": batch_size, "context": context, "dtype": "bf16"}
        size = ct.size(**options, hardware=gpu)
        model: Any = ct.build(name, device="cuda", dtype=torch.bfloat16, seed=0)
        prompt = torch.randint(0, size.options.config.vocab_size, (batch_size, context - 1), device="cuda")
        cache = model.new_cache(batch_size, context)
        for chunk in prompt.split(256, dim=1):
            model(chunk, cache=cache)
        cache.static_shapes = compiled
        step = build_decode_step(model, cache, prompt[:, -1:].clone(), context, compiled=compiled)
        workload = "decode, CUDA graph" if compiled else "decode"
        rows.append(compare_to_bound(workload, options, size.decode_time, median_seconds(step), eager=not compiled))
        print_row(rows[-1])
        if batch_size == 1 and not compiled:
            seconds = median_seconds(partial(model.hidden_states, prompt), 7)
            rows.append(compare_to_bound("prefill", options, size.prefill_time, seconds, eager=True))
            print_row(rows[-1])
        del model, cache, step
    return rows


def build_decode_step(
    model: Any, cache: Any, token: torch.Tensor, context: int, *, compiled: bool
) -> Callable[[], None]:
    """Return a function that repeats a decode step at one position, in eager mode or as a compiled CUDA graph."""
    run = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model

    def step() -> None:
        cache.crop(context - 1)
        run(token, cache=cache)

    if not compiled:
        return step
    step()
    step()
    cache.crop(context - 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(token, cache=cache)
    return graph.replay


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--memory", action="store_true", help="measure memory only")
    parser.add_argument("--time", action="store_true", help="measure time only")
    add_json_option(parser)
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    run_all = arguments.memory == arguments.time
    rows: list[Row] = []
    if run_all or arguments.memory:
        for options in [*TRAINING_CASES, *ADAPTER_CASES]:
            rows.append(measure_training_memory(options))
            print_row(rows[-1])
        for name, batch_size, context in INFERENCE_CASES:
            rows.append(measure_inference_memory(name, batch_size, context))
            print_row(rows[-1])
    if run_all or arguments.time:
        free_gpu_memory()
        rows.append(print_row(measure_limits()))
        rows += measure_train_times(arguments.gpu) + measure_inference_times(arguments.gpu)
    save_rows(arguments.json, rows, device="cuda")


if __name__ == "__main__":
    main()
