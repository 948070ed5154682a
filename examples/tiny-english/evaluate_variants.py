"""Evaluate the trained variants on held-out stories, and write them in the form in which cutaway ships them.

    python examples/tiny-english/evaluate_variants.py runs/variants data/heldout src/cutaway/pretrained/variants

The stories are packed to sequences of twice the training length. The loss is written by seed, for the first and for the
second half of the sequences, and by position.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import cutaway as ct
from cutaway.pretrained import PRETRAINED_DIR
from cutaway.train.recipe.load import load_recipe

SEQ_LEN, BUCKET, NUM_SEQUENCES, BATCH_SIZE = 512, 32, 256, 16
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
WEIGHTS_FILE = "model.safetensors"


def pack_stories(directory: Path) -> torch.Tensor:
    """Pack tokens of the stories, each with an end-of-sequence token, to sequences: (NUM_SEQUENCES, SEQ_LEN + 1)."""
    tokenizer = ct.load("tiny-english").tokenizer
    assert tokenizer is not None
    tokens: list[int] = []
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            tokens += [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_token_id]
            if len(tokens) >= NUM_SEQUENCES * (SEQ_LEN + 1):
                return torch.tensor(tokens[: NUM_SEQUENCES * (SEQ_LEN + 1)]).view(NUM_SEQUENCES, SEQ_LEN + 1)
    raise SystemExit(f"{directory} has {len(tokens)} tokens, fewer than {NUM_SEQUENCES * (SEQ_LEN + 1)}")


@torch.no_grad()
def loss_by_position(directory: Path, sequences: torch.Tensor) -> torch.Tensor:
    """Mean loss at each position: (SEQ_LEN,)."""
    model = ct.load(directory, dtype=torch.float32).model
    losses = [
        F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:], reduction="none")
        for batch in sequences.split(BATCH_SIZE)
    ]
    return torch.cat(losses).mean(0)


def copy_model(run_model: Path, directory: Path) -> None:
    """Copy the config, the tokenizer as compact JSON, and the weights in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in run_model.glob("*.json"):
        shutil.copyfile(file, directory / file.name)
    for name in TOKENIZER_FILES:
        tokenizer = json.loads((PRETRAINED_DIR / "tiny-english" / name).read_text(encoding="utf-8"))
        compact = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
        (directory / name).write_text(f"{compact}\n", encoding="utf-8")
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(run_model / WEIGHTS_FILE).items()}
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="directory with a run NAME-SEED of every variant and seed")
    parser.add_argument("heldout", type=Path, help="directory with JSON Lines of stories")
    parser.add_argument("out", type=Path, help="directory of the variants")
    args = parser.parse_args()
    sequences = pack_stories(args.heldout)
    recipe = load_recipe(str(Path(__file__).parent / "variants.toml"), [], [])
    variants: dict[str, dict[str, list[Any]]] = {}
    for run in sorted(args.runs.glob("*-*/model")):
        name, _, seed = run.parent.name.rpartition("-")
        with (
            tempfile.TemporaryDirectory() as temporary
        ):  # the loss of the weights in the form in which they are shipped
            copy_model(run, Path(temporary))
            losses = loss_by_position(Path(temporary), sequences)
        if seed == "0":
            copy_model(run, args.out / name)
        half = recipe.data.seq_len
        entry = variants.setdefault(name, {"loss": [], "loss_beyond": [], "loss_by_position": []})
        entry["loss"].append(round(float(losses[:half].mean()), 5))
        entry["loss_beyond"].append(round(float(losses[half:].mean()), 5))
        entry["loss_by_position"].append([round(value, 4) for value in losses.view(-1, BUCKET).mean(1).tolist()])
        print(name, seed, entry["loss"][-1], entry["loss_beyond"][-1], flush=True)
    results = {
        "seq_len": recipe.data.seq_len,
        "bucket": BUCKET,
        "num_sequences": NUM_SEQUENCES,
        "max_steps": recipe.training.max_steps,
        "tokens": recipe.training.max_steps * recipe.training.batch_size * recipe.data.seq_len,
        "variants": variants,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
