"""Tokens per second of `cutaway train lora` on conversations of different lengths, compared with Trainer and PEFT.

    python bench/finetune_recipe.py [--model llama-3.2-1b] [--steps 60] [--warmup 30] [--device cuda] [--no-peft]
                                     [--json FILE]

A random base model with a byte tokenizer, random conversations of 100 to 900 tokens, and the recipe lora as shipped,
with compiled blocks, and with packing. The peer is a transformers Trainer with PEFT on the same sequences, padded to
the longest of a batch. Tokens are those of the sequences, without padding. The first steps are not timed.
"""

import argparse
import importlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import add_json_option, print_row, save_rows

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import Tokenizer, byte_tokenizer
from cutaway.train.logging.callbacks import Callback

CHAT_TOKENS = ["<|im_start|>", "<|im_end|>"]
VARIANTS = {
    "recipe lora": [],
    "compiled": ["training.compile=true"],
    "packed": ["objective.packing=true"],
    "packed, compiled": ["objective.packing=true", "training.compile=true"],
}


def save_base(directory: Path, preset: str) -> Tokenizer:
    backend = byte_tokenizer().backend
    backend.add_special_tokens(CHAT_TOKENS)
    tokenizer = Tokenizer(backend, special_tokens_map={"eos_token": CHAT_TOKENS[1]})
    config = ct.config(preset).replace(vocab_size=-(-tokenizer.vocab_size // 128) * 128)
    model = ct.build(config, dtype=torch.bfloat16, seed=0)
    ct.save(Checkpoint(model, config, tokenizer_loader=lambda: tokenizer), directory)
    return tokenizer


def write_conversations(path: Path, count: int) -> list[str]:
    generator = random.Random(0)
    texts = []
    with path.open("w") as file:
        for _ in range(count):
            question, answer = ("".join(generator.choices("abcdef ", k=generator.randint(30, 430))) for _ in range(2))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
            texts.append(question + answer)
    return texts


def measure_recipe(base: Path, data: Path, directory: Path, args: Any, overrides: list[str]) -> float:
    """Tokens per second after the warm-up."""
    times: list[float] = []
    tokens: list[int] = []

    def record(row: dict[str, Any], timing: dict[str, Any]) -> None:
        times.append(time.perf_counter())
        tokens.append(row["num_tokens"])

    settings = [f"training.max_steps={args.warmup + args.steps}", "eval.interval=100000", "training.preflight=false"]
    settings += ["data.chat_template=chatml", 'training.precision="bf16"', f'data.sources=[{{path="{data}"}}]']
    callback = Callback(on_step_end=record)
    ct.train("lora", directory, base=base, overrides=settings + overrides, device=args.device, callback=callback)
    return sum(tokens[args.warmup :]) / (times[-1] - times[args.warmup - 1])


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-peft", action="store_true")
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        tokenizer = save_base(root / "base", args.model)
        texts = write_conversations(root / "chat.jsonl", 800)
        for variant, overrides in VARIANTS.items():
            speed = measure_recipe(root / "base", root / "chat.jsonl", root / variant, args, overrides)
            row = {"implementation": "cutaway", "variant": variant, "model": args.model}
            rows.append(print_row(row | {"target_tokens_per_second": speed}))
        if not args.no_peft:
            speed = measure_trainer(root, tokenizer, texts, args)
            row = {"implementation": "Trainer and PEFT", "model": args.model}
            rows.append(print_row(row | {"target_tokens_per_second": speed}))
    save_rows(args.json, rows, device=args.device)


def measure_trainer(root: Path, tokenizer: Tokenizer, texts: list[str], args: Any) -> float:
    """Target tokens per second of a transformers Trainer with PEFT, whose targets are the second half of each text."""
    transformers: Any = importlib.import_module("transformers")  # Any: its types are incomplete
    peft: Any = importlib.import_module("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.bfloat16).to(args.device)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    rows = [tokenizer.encode(text) for text in texts]

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(each["input_ids"]) for each in batch]
        masks = [torch.arange(len(each)) >= len(each) // 2 for each in ids]
        labels = [each.masked_fill(~mask, -100) for each, mask in zip(ids, masks, strict=True)]
        pad = torch.nn.utils.rnn.pad_sequence
        lengths = torch.tensor([len(each) for each in ids])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        return {
            "input_ids": pad(ids, True),
            "labels": pad(labels, True, -100),
            "attention_mask": mask.long(),
        }

    class Timer(transformers.TrainerCallback):  # type: ignore[misc]
        times: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    arguments = transformers.TrainingArguments(
        root / "trainer",
        per_device_train_batch_size=8,
        max_steps=args.warmup + args.steps,
        bf16=args.device == "cuda",
        use_cpu=args.device == "cpu",
        learning_rate=2e-4,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    dataset: Any = [{"input_ids": row} for row in rows]
    timer = Timer()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=dataset, data_collator=collate, callbacks=[timer], processing_class=None
    )
    trainer.train()
    if args.device == "cuda":
        torch.cuda.synchronize()
    mean_targets = sum(len(row) - len(row) // 2 for row in rows) / len(rows)
    return args.steps * 8 * mean_targets / (timer.times[-1] - timer.times[args.warmup - 1])


if __name__ == "__main__":
    main()
