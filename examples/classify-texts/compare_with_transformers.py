"""Held-out accuracy of a classifier trained with cutaway, and with the Trainer of transformers, at the same budget.

    python examples/classify-texts/compare_with_transformers.py MODEL data/spam/train.csv data/spam/held-out.csv

Both start from the same encoder (a directory in transformers' format), with the same data, number of epochs, batch
size, sequence length, learning rate, schedule and weight decay. The classifier and the order of the data depend on the
seed. Needs transformers and accelerate.
"""

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import transformers

import cutaway as ct
from cutaway.evaluate import evaluate_classification
from cutaway.evaluate.confidence_interval import mean_confidence_interval

Rows = list[dict[str, str]]


def read_rows(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class TextDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows encoded by a tokenizer of transformers."""

    def __init__(self, rows: Rows, labels: list[str], tokenizer: Any, seq_len: int) -> None:
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=seq_len)["input_ids"]
        self.items = [
            {"input_ids": ids, "labels": labels.index(row["label"])} for ids, row in zip(encoded, rows, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def train_with_transformers(model: Path, train: Path, held_out: Rows, arguments: Any, seed: int, out: Path) -> float:
    rows = read_rows(train)
    labels = sorted({row["label"] for row in rows})
    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(labels))
    data, test = (TextDataset(each, labels, tokenizer, arguments.seq_len) for each in (rows, held_out))
    options = transformers.TrainingArguments(
        output_dir=str(out),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=64,
        learning_rate=arguments.lr,
        weight_decay=0.01,
        warmup_steps=0.1,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        seed=seed,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    trainer = transformers.Trainer(classifier, options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    predictions = trainer.predict(test)
    return float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())


def train_with_cutaway(model: Path, train: Path, held_out: Rows, arguments: Any, seed: int, out: Path) -> float:
    overrides = [
        f"training.num_epochs={arguments.epochs}",
        f"training.batch_size={arguments.batch_size}",
        f"training.seed={seed}",
        f"optimizer.lr={arguments.lr}",
        f"data.seq_len={arguments.seq_len}",
        "data.validation_split=0.001",  # the other trainer has no validation split
        "checkpoint.export='last'",
        "eval.interval=100000",
        "checkpoint.interval=100000",
    ]
    run = ct.train("classify", out, base=model, texts=[train], overrides=overrides, device="cpu")
    checkpoint = ct.load(run.model_directory)
    assert checkpoint.tokenizer is not None
    checkpoint.tokenizer.model_max_length = arguments.seq_len
    texts, labels = [row["text"] for row in held_out], [row["label"] for row in held_out]
    return float(evaluate_classification(checkpoint, texts, labels).to_dict()["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-5)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    held_out = read_rows(arguments.held_out)
    accuracies: dict[str, list[float]] = {"cutaway": [], "transformers": []}
    for seed in range(arguments.seeds):
        for name, train in (("cutaway", train_with_cutaway), ("transformers", train_with_transformers)):
            with tempfile.TemporaryDirectory() as directory:
                start = time.perf_counter()
                accuracy = train(arguments.model, arguments.train, held_out, arguments, seed, Path(directory) / "run")
                seconds = time.perf_counter() - start
            accuracies[name].append(accuracy)
            print(json.dumps({"library": name, "seed": seed, "accuracy": accuracy, "seconds": seconds}), flush=True)
    for name, values in accuracies.items():
        spread = f" ± {stdev(values):.4f} (standard deviation)" if len(values) > 1 else ""
        print(f"{name}: {mean(values):.4f}{spread} over {len(values)} seeds, {len(held_out):,} held-out texts")
    differences = [ours - theirs for ours, theirs in zip(*accuracies.values(), strict=True)]
    interval = mean_confidence_interval(differences)
    print(f"cutaway - transformers: {interval.mean:+.4f} ± {interval.half_width or 0:.4f} (95 % interval)")


if __name__ == "__main__":
    main()
