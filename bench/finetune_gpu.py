"""Steps of LoRA fine-tuning on one GPU, compared with PEFT and transformers (compiled), in one process.

    python bench/finetune_gpu.py [--layers 32] [--seq-len 4096] [--rank 16] [--rounds 3] [--steps 5] [--profile]
                                  [--json FILE]

The shape of Llama-3-8B with random bf16 weights, adapters of all linear layers in fp32, bf16 autocast, AdamW, gradient
clipping, no dropout, no activation checkpointing in PEFT's model. Prints tokens per second, peak memory and the share
of the time of the matrix products at the peak FLOP/s. Peak memory of cutaway is compared with the prediction of
cutaway.size. With --qlora, cutaway on an NF4 base is measured too, with full activation checkpointing, and with 8-bit
optimizer states; with --checkpointing, LoRA with full activation checkpointing of 4 layers and of all layers.
"""

import argparse
import functools
import gc
import importlib
import itertools
from types import SimpleNamespace
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows
from train_gpu import StepFn, build_torch_step, measure_steps, print_profile

import cutaway as ct
from cutaway.families.registry import config_from_hf
from cutaway.model.activation_checkpointing import ActivationCheckpointing
from cutaway.model.adapters.quantized_linear import quantize_linears
from cutaway.train.data.datasets import PackedBatch
from cutaway.train.objectives.objective import causal_lm
from cutaway.train.optim.optimizer import build_optimizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.bad_step_policy import BadStepPolicy
from cutaway.train.trainer.train_step import TrainStepRunner
from cutaway.train.trainer.training_module import TrainingModule

PEAK_FLOPS = 989e12
"""Dense bf16 FLOP/s of an H100 or H200."""
LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def predicted_bytes(
    args: Any,
    checkpointing: ActivationCheckpointing,
    num_layers: int | None = None,
    quantization: str = "none",
    state_dtype: str = "fp32",
) -> int:
    """Peak memory of a step of cutaway as predicted by cutaway.size."""
    estimate = ct.size(
        config_from_hf({"model_type": "llama", "num_hidden_layers": args.layers, **LLAMA_3_8B}),
        mode="train",
        context=args.seq_len,
        activation_checkpointing=checkpointing,
        activation_checkpointing_layers=num_layers,
        adapter={"rank": args.rank},
        quantization=quantization,
        optimizer="adamw" if state_dtype == "fp32" else "adamw-8bit",
        compiled=True,
    )
    return estimate.memory.total_bytes


def build_cutaway_step(
    args: Any,
    checkpointing: ActivationCheckpointing,
    num_layers: int | None = None,
    quantization: str = "none",
    state_dtype: str = "fp32",
) -> StepFn:
    config = config_from_hf({"model_type": "llama", "num_hidden_layers": args.layers, **LLAMA_3_8B})
    recipe = load_recipe(
        {
            "data": {"seq_len": args.seq_len},
            "training": {"batch_size": 1, "precision": "bf16"},
            "optimizer": {"lr": 2e-4, "weight_decay": 0.0, "state_dtype": state_dtype},
        }
    )
    model = ct.build(config, device="cuda", dtype=torch.bfloat16, seed=0).train()
    if quantization != "none":
        quantize_linears(model, quantization)  # type: ignore[arg-type]
    model.use_activation_checkpointing(checkpointing, num_layers)
    model.add_adapter({"rank": args.rank}, seed=0)
    tokens = torch.randint(config.vocab_size, (1, args.seq_len + 1))
    data: Any = SimpleNamespace(train=SimpleNamespace(get_batch=lambda first, count: PackedBatch(tokens, None)))  # type: ignore[arg-type]
    runner = TrainStepRunner(
        recipe,
        TrainingModule(model, precision="bf16"),
        build_optimizer(recipe.optimizer, model),
        data,
        lambda batch, first: causal_lm(batch.tokens).to("cuda"),
        BadStepPolicy(1, device="cuda"),
    )
    steps = itertools.count()
    return lambda: runner.run(next(steps))


def build_peft_step(args: Any, *, checkpointing: bool = False) -> StepFn:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete
    peft: Any = importlib.import_module("peft")

    config = transformers.LlamaConfig(
        num_hidden_layers=args.layers, attn_implementation="sdpa", use_cache=False, **LLAMA_3_8B
    )
    with torch.device("cuda"):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets))
    compiled = torch.compile(model)
    x = torch.randint(50257, (1, args.seq_len), device="cuda")
    return build_torch_step(model, lambda: compiled(input_ids=x, labels=x).loss)  # type: ignore[no-untyped-call]


def required_flops(args: Any) -> float:
    """FLOPs of the matrix products of a step: forward pass, and gradients of the activations, not of the weights."""
    d, hidden, kv = 4096, 14336, 1024
    matrices = args.layers * (2 * d * d + 2 * d * kv + 3 * d * hidden) + d * 128256
    attention = args.layers * (3.5 * 2 * args.seq_len * d)  # causal; the backward pass takes 2.5 times the forward pass
    return float(args.seq_len * (4 * matrices + attention))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 32), ("seq-len", 4096), ("rank", 16), ("rounds", 3), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("profile", "qlora", "checkpointing", "no-peft"):
        parser.add_argument(f"--{name}", action="store_true")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    torch.set_float32_matmul_precision("high")
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    variants: dict[str, tuple[Any, ...]] = {"cutaway": ("none",)}
    if args.checkpointing:
        variants["cutaway full, 4 layers"] = ("full", 4)
        variants["cutaway full"] = ("full",)
    if args.qlora:
        variants["cutaway qlora full"] = ("full", None, "nf4")
        variants["cutaway qlora full int8 states"] = ("full", None, "nf4", "int8")
    builders: dict[str, Any] = {
        name: functools.partial(build_cutaway_step, args, *variant) for name, variant in variants.items()
    }
    if not args.no_peft:
        builders["peft compiled"] = lambda: build_peft_step(args)
    limit = required_flops(args) / PEAK_FLOPS
    rows = []
    for name, build in builders.items():
        gc.collect()
        torch.cuda.empty_cache()
        step = build()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = measure_steps(step, args.rounds, args.steps)
        row: Row = {"implementation": name, "layers": args.layers, "batch_size": 1, "seq_len": args.seq_len}
        row |= {"tokens_per_second": args.seq_len / seconds, "share_of_limit": limit / seconds}
        row["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if name in variants:
            row["predicted_memory_gb"] = predicted_bytes(args, *variants[name]) / 1e9
        rows.append(print_row(row))
        if args.profile and name.startswith("cutaway"):
            print_profile(step)
        del step
        torch._dynamo.reset()
    save_rows(args.json, rows, device="cuda")


if __name__ == "__main__":
    main()
