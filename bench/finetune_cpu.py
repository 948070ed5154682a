"""Steps of fine-tuning on the CPU: LoRA of cutaway, LoRA of PEFT, and all weights, in one process, in turn.

    python bench/finetune_cpu.py [--model smollm2-135m] [--batch-size 2] [--seq-len 256] [--rank 16] [--rounds 5]
                                  [--json FILE]

Random weights in fp32, adapters of all linear layers, AdamW, gradient clipping, no dropout. PEFT's model is a
transformers model of the same shape. The implementations run a step each, in turn; medians are printed.
"""

import argparse
import importlib
import itertools
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from report import Row, add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.families.registry import find_family
from cutaway.model.adapters.quantized_linear import quantize_linears
from cutaway.train.objectives.objective import causal_lm
from cutaway.train.optim.optimizer import build_optimizer
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.bad_step_policy import BadStepPolicy
from cutaway.train.trainer.train_step import TrainStepRunner, metrics_to_python
from cutaway.train.trainer.training_module import TrainingModule

LR, WEIGHT_DECAY = 2e-4, 0.0
Step = Callable[[], float]
"""Runs a training step and returns the loss."""


def make_tokens(args: Any, vocab_size: int, step: int) -> torch.Tensor:
    shape = args.batch_size, args.seq_len + 1
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(step))


def build_cutaway_step(args: Any, *, adapter: bool, quantization: Any = "none", state_dtype: str = "fp32") -> Step:
    recipe = load_recipe(
        {
            "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "state_dtype": state_dtype},
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "training": {"batch_size": args.batch_size, "max_steps": 1000},
            "data": {"seq_len": args.seq_len},
        }
    )
    model = ct.build(args.model, seed=0).train()
    if quantization != "none":
        quantize_linears(model, quantization)
    if adapter:
        model.add_adapter({"rank": args.rank}, seed=0)
    vocab_size = model.config.vocab_size
    data: Any = SimpleNamespace(
        train=SimpleNamespace(
            get_batch=lambda first, count: make_tokens(args, vocab_size, first // args.batch_size)[:count]
        )
    )
    optimizer = build_optimizer(recipe.optimizer, model)
    policy = BadStepPolicy(1, device="cpu")
    runner = TrainStepRunner(
        recipe, TrainingModule(model), optimizer, data, lambda batch, first: causal_lm(batch), policy
    )
    steps = itertools.count()
    return lambda: float(metrics_to_python(runner.run(next(steps)))["loss"])


def build_transformers_step(args: Any, *, adapter: bool) -> Step:
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete

    family, fields = find_family(ct.config(args.model))
    config = transformers.AutoConfig.for_model(**({"model_type": family.name} | fields))
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()
    if adapter:
        peft: Any = importlib.import_module("peft")
        targets = [name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
        targets = sorted(set(targets) - {"lm_head"})
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=targets)
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)
    steps = itertools.count()

    def step() -> float:
        tokens = make_tokens(args, config.vocab_size, next(steps))
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.item()

    return step


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    for name, value in (("batch-size", 2), ("seq-len", 256), ("rank", 16), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="*", help="names of the implementations to run")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    torch.set_num_threads(args.threads)
    builders: dict[str, Callable[[], Step]] = {
        "cutaway all weights": lambda: build_cutaway_step(args, adapter=False),
        "cutaway all weights, int8 states": lambda: build_cutaway_step(args, adapter=False, state_dtype="int8"),
        "cutaway LoRA": lambda: build_cutaway_step(args, adapter=True),
        "cutaway LoRA on int8": lambda: build_cutaway_step(args, adapter=True, quantization="int8"),
        "transformers all weights": lambda: build_transformers_step(args, adapter=False),
        "PEFT LoRA": lambda: build_transformers_step(args, adapter=True),
    }
    steps = {name: build() for name, build in builders.items() if not args.only or name in args.only}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(args.rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:  # the first step allocates memory
                seconds[name].append(time.perf_counter() - start)
    print(f"{args.model}, batch {args.batch_size} × {args.seq_len}, rank {args.rank}, {args.threads} threads, fp32")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    tokens = args.batch_size * args.seq_len
    rows = []
    for name, median in medians.items():
        row: Row = {"implementation": name, "model": args.model, "batch_size": args.batch_size, "seq_len": args.seq_len}
        row |= {"step_ms": 1e3 * median, "tokens_per_second": tokens / median}
        if "cutaway LoRA" in medians:
            row["speedup_of_cutaway_lora"] = median / medians["cutaway LoRA"]
        rows.append(print_row(row))
    save_rows(args.json, rows)


if __name__ == "__main__":
    main()
