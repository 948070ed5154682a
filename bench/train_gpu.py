"""Training steps on one GPU compared with nanoGPT and transformers, in one process.

    python bench/train_gpu.py [--nanogpt DIR] [--rounds 5] [--steps 10] [--profile] [--json FILE]

DIR contains nanoGPT's model.py. GPT-2 124M, 64 × 1,024 tokens, and Llama-3.2-1B, 8 × 2,048 tokens, with random weights;
bf16 autocast with fp32 weights, AdamW, gradient clipping, no dropout, no synchronization within a round. The
implementations alternate, because a GPU is slower when it is warm. On a GPU with fp8 products, Llama-3.2-1B is also
trained in float8, compared with bf16.
"""

import argparse
import functools
import gc
import importlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.train.data.datasets import PackedBatch
from cutaway.train.objectives.objective import causal_lm
from cutaway.train.optim.float8 import has_fp8_products
from cutaway.train.optim.optimizer import build_optimizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.bad_step_policy import BadStepPolicy
from cutaway.train.trainer.train_step import TrainStepRunner
from cutaway.train.trainer.training_module import TrainingModule, build_training_model

StepFn = Callable[[], Any]
LLAMA_CONFIG = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def build_cutaway_step(
    preset: str, batch_size: int, seq_len: int, *, float8_recipe: str | None = None, device: str = "cuda"
) -> StepFn:
    """Return a function that runs a step of cutaway's trainer, without a document mask, as in the other libraries.

    With `float8_recipe`, the precision is float8, which is emulated on a device without fp8 products.
    """
    precision: dict[str, Any] = {"precision": "bf16"}
    if float8_recipe is not None:
        float8 = {"recipe_name": float8_recipe, "emulate": not has_fp8_products(torch.device(device))}
        precision = {"precision": "float8", "float8": float8}
    config = ct.config(without_dropout(ct.config(preset).model_dump(mode="json", exclude_none=True)))
    recipe = load_recipe(
        {
            "data": {"seq_len": seq_len},
            "training": {"batch_size": batch_size, **precision},
            "optimizer": {"lr": 3e-4, "weight_decay": 0.01},
        }
    )
    model = build_training_model(config, recipe.training, torch.device(device)).train()
    optimizer = build_optimizer(recipe.optimizer, model)
    tokens = [torch.randint(config.vocab_size, (batch_size, seq_len + 1)) for _ in range(4)]
    dataset: Any = SimpleNamespace(get_batch=lambda first, count: PackedBatch(tokens[first // batch_size % 4], None))  # type: ignore[arg-type]
    data: Any = SimpleNamespace(train=dataset)
    runner = TrainStepRunner(
        recipe,
        TrainingModule(model, precision=recipe.training.precision),
        optimizer,
        data,
        lambda batch, first: causal_lm(batch.tokens).to(torch.device(device)),
        BadStepPolicy(1, device=torch.device(device)),
    )
    steps = itertools.count()
    return lambda: runner.run(next(steps))


def without_dropout(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            key: 0.0 if "dropout" in key and value is not None else without_dropout(value)
            for key, value in config.items()
        }
    return [without_dropout(item) for item in config] if isinstance(config, list) else config


def build_torch_step(model: Any, loss: Callable[[], torch.Tensor]) -> StepFn:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def build_nanogpt_step(directory: str, batch_size: int, seq_len: int) -> StepFn:
    sys.path.insert(0, directory)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model = GPT(GPTConfig(vocab_size=50304)).to("cuda")
    compiled = torch.compile(model)
    x, y = (torch.randint(50257, (batch_size, seq_len), device="cuda") for _ in range(2))
    return build_torch_step(model, lambda: compiled(x, y)[1])


def build_transformers_gpt2_step(batch_size: int, seq_len: int) -> StepFn:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    kwargs = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False}
    model = (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50304, attn_implementation="sdpa", **kwargs))
        .to("cuda")
        .train()
    )
    compiled = torch.compile(model)
    x = torch.randint(50257, (batch_size, seq_len), device="cuda")
    return build_torch_step(model, lambda: compiled(input_ids=x, labels=x).loss)


def build_transformers_llama_step(batch_size: int, seq_len: int) -> StepFn:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    with torch.device("cuda"):
        config = transformers.LlamaConfig(
            **LLAMA_CONFIG, rope_theta=500000.0, attn_implementation="sdpa", use_cache=False
        )
        model = transformers.LlamaForCausalLM(config).train()
    compiled = torch.compile(model)
    x = torch.randint(50257, (batch_size, seq_len), device="cuda")
    return build_torch_step(model, lambda: compiled(input_ids=x, labels=x).loss)


def compare_throughput(
    name: str, builders: dict[str, Callable[[], StepFn]], batch_size: int, seq_len: int, options: Any
) -> list[Row]:
    """Measure the tokens per second of each library, in alternating rounds, and its peak memory."""
    steps: dict[str, StepFn] = {}
    memory: dict[str, float] = {}
    for library, builder in builders.items():
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[library] = builder()
        for _ in range(4):
            steps[library]()
        torch.cuda.synchronize()
        memory[library] = (torch.cuda.max_memory_allocated() - before) / 1e9
        gc.collect()
        torch.cuda.empty_cache()
    speeds: dict[str, list[float]] = {library: [] for library in steps}
    for round_index in range(options.rounds):
        for library in list(steps)[:: 1 if round_index % 2 else -1]:
            steps[library]()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(options.steps):
                steps[library]()
            torch.cuda.synchronize()
            speeds[library].append(batch_size * seq_len * options.steps / (time.perf_counter() - start))
    rows = []
    for library, measured in speeds.items():
        ratio = median(
            cutaway / library_speed for cutaway, library_speed in zip(speeds["cutaway"], measured, strict=True)
        )
        row: Row = {"implementation": library, "model": name, "batch_size": batch_size, "seq_len": seq_len}
        row |= {"tokens_per_second": median(measured), "peak_memory_gb": memory[library]}
        rows.append(print_row(row | {"speedup_of_cutaway": ratio}))
    if options.profile:
        print_profile(steps["cutaway"])
    return rows


def measure_steps(step: StepFn, rounds: int, steps: int) -> float:
    """Median seconds of a step, after a warm-up."""
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / steps)
    return median(seconds)


def print_profile(step: StepFn) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 1e3
    print(f"  kernels {busy:.1f} ms of {seconds * 1e3:.1f} ms")
    for kernel in kernels[:30]:
        print(f"  {kernel.self_device_time_total / 1e3:8.2f} ms × {kernel.count:4} {kernel.key[:100]}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", metavar="DIR")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    torch.set_float32_matmul_precision("high")
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    builders = {
        "cutaway": lambda: build_cutaway_step("gpt2", 64, 1024),
        "transformers": lambda: build_transformers_gpt2_step(64, 1024),
    }
    if args.nanogpt and (Path(args.nanogpt) / "model.py").exists():
        builders["nanoGPT"] = lambda: build_nanogpt_step(args.nanogpt, 64, 1024)
    rows = compare_throughput("gpt2", builders, 64, 1024, args)
    gc.collect()
    torch.cuda.empty_cache()
    builders = {
        "cutaway": lambda: build_cutaway_step("llama-3.2-1b", 8, 2048),
        "transformers": lambda: build_transformers_llama_step(8, 2048),
    }
    rows += compare_throughput("llama-3.2-1b", builders, 8, 2048, args)
    if has_fp8_products(torch.device("cuda")):
        gc.collect()
        torch.cuda.empty_cache()
        recipes = ("tensorwise", "rowwise")
        builders = {"cutaway": lambda: build_cutaway_step("llama-3.2-1b", 8, 2048)} | {
            f"cutaway float8 {name}": functools.partial(build_cutaway_step, "llama-3.2-1b", 8, 2048, float8_recipe=name)
            for name in recipes
        }
        rows += compare_throughput("llama-3.2-1b float8", builders, 8, 2048, args)
    save_rows(args.json, rows, device="cuda")


if __name__ == "__main__":
    main()
