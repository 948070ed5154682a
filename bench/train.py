"""Training steps on one GPU beside peers, in one process and by turns: a GPU that has grown warm is slower.

    python bench/train.py [--nanogpt DIRECTORY_WITH_NANOGPTS_model.py] [--rounds 5] [--steps 10] [--profile]

GPT-2 124M, 64 × 1,024, and Llama-3.2-1B, 8 × 2,048, by their shapes; bf16 products over fp32 weights, AdamW, clipping.
No dropout anywhere, nobody waits for the GPU inside a round. Prints a table and a JSON line.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

import cutaway as ct
from cutaway.train.data.batches import Batch
from cutaway.train.learner import Learner
from cutaway.train.objectives import next_token
from cutaway.train.optimise import make
from cutaway.train.policy import Policy
from cutaway.train.recipe import recipe
from cutaway.train.step import Stepper

PEAK = 989e12
Step = Callable[[], Any]
LLAMA = {
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


def ours(preset: str, batch: int, length: int) -> Step:
    """Steps as a run takes them, on texts without borders as the peers' are."""
    config = ct.config(without_dropout(ct.config(preset).model_dump(mode="json", exclude_none=True)))
    training = {"batch": batch, "precision": "bf16"}
    chosen = recipe({"data": {"length": length}, "training": training, "optimiser": {"rate": 3e-4}})
    model = ct.build(config, device="cuda", seed=0).train()
    optimiser = make("adamw", model, rate=3e-4, weight_decay=0.01)
    tokens = [torch.randint(config.vocab_size, (batch, length + 1)) for _ in range(4)]
    data: Any = SimpleNamespace(batch=lambda first, count: Batch(tokens[first // batch % 4], None))  # type: ignore[arg-type]
    reading: Any = SimpleNamespace(train=data)
    stepper = Stepper(
        chosen,
        Learner(model, chosen),
        optimiser,
        reading,
        lambda batch, first: next_token(batch.tokens).to("cuda"),
        Policy(1, device="cuda"),
    )
    numbers = iter(range(10**9))
    return lambda: stepper.step(next(numbers))


def without_dropout(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {
            key: 0.0 if "dropout" in key and value is not None else without_dropout(value)
            for key, value in settings.items()
        }
    return [without_dropout(each) for each in settings] if isinstance(settings, list) else settings


def theirs(model: Any, loss: Callable[[], torch.Tensor]) -> Step:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def nanogpt(directory: str, batch: int, length: int) -> Step:
    sys.path.insert(0, directory)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model = GPT(GPTConfig(vocab_size=50304)).to("cuda")
    compiled = torch.compile(model)
    x, y = (torch.randint(50257, (batch, length), device="cuda") for _ in range(2))
    return theirs(model, lambda: compiled(x, y)[1])


def transformers_gpt2(batch: int, length: int) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50304, attn_implementation="sdpa", **none)).to("cuda").train()
    compiled = torch.compile(model)
    x = torch.randint(50257, (batch, length), device="cuda")
    return theirs(model, lambda: compiled(input_ids=x, labels=x).loss)


def transformers_llama(batch: int, length: int) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("cuda"):
        config = LlamaConfig(**LLAMA, rope_theta=500000.0, attn_implementation="sdpa", use_cache=False)
        model = LlamaForCausalLM(config).train()
    compiled = torch.compile(model)
    x = torch.randint(50257, (batch, length), device="cuda")
    return theirs(model, lambda: compiled(input_ids=x, labels=x).loss)


def side_by_side(name: str, makers: dict[str, Callable[[], Step]], batch: int, length: int, how: Any) -> dict[str, Any]:
    """Tokens a second of each, in turns, and the most memory that each had for itself."""
    steps: dict[str, Step] = {}
    memory: dict[str, float] = {}
    for who, maker in makers.items():
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps[who] = maker()
        for _ in range(4):
            steps[who]()
        torch.cuda.synchronize()
        memory[who] = (torch.cuda.max_memory_allocated() - before) / 1e9
        gc.collect()
        torch.cuda.empty_cache()
    speeds: dict[str, list[float]] = {who: [] for who in steps}
    for turn in range(how.rounds):
        for who in list(steps)[:: 1 if turn % 2 else -1]:
            steps[who]()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(how.steps):
                steps[who]()
            torch.cuda.synchronize()
            speeds[who].append(batch * length * how.steps / (time.perf_counter() - start))
    rows = {}
    for who, found in speeds.items():
        ratio = median(mine / other for mine, other in zip(speeds["cutaway"], found, strict=True))
        rows[who] = {"tokens_per_second": median(found), "GB": memory[who], "cutaway_is": ratio}
        print(f"{name:12} {who:14} {median(found):>9,.0f} tokens/s {memory[who]:6.1f} GB   cutaway {ratio:.3f} ×")
    if how.profile:
        profile(steps["cutaway"])
    return rows


def profile(step: Step) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    kernels = sorted(recorded.key_averages(), key=lambda each: -each.self_device_time_total)
    for each in kernels[:20]:
        print(f"  {each.self_device_time_total / 1e3:8.2f} ms × {each.count:4} {each.key[:100]}")


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--nanogpt")
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--steps", type=int, default=10)
    given.add_argument("--profile", action="store_true")
    how = given.parse_args()
    torch.set_float32_matmul_precision("high")
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    peers = {"cutaway": lambda: ours("gpt2", 64, 1024), "transformers": lambda: transformers_gpt2(64, 1024)}
    if how.nanogpt and (Path(how.nanogpt) / "model.py").exists():
        peers["nanoGPT"] = lambda: nanogpt(how.nanogpt, 64, 1024)
    found = {"gpt2-124m": side_by_side("gpt2-124m", peers, 64, 1024, how)}
    gc.collect()
    torch.cuda.empty_cache()
    peers = {
        "cutaway": lambda: ours("llama-3.2-1b", 8, 2048),
        "transformers": lambda: transformers_llama(8, 2048),
    }
    found["llama-1b"] = side_by_side("llama-1b", peers, 8, 2048, how)
    print(json.dumps(found))


main()
