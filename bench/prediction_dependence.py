"""Whether what the page says about a prediction holds: repeat each named intervention with `ct.edit`.

    python bench/prediction_dependence.py [--num-texts 200] [--json FILE]

For texts of two models, the query `interventions` names the token with the largest effect, the tokens that a prediction
is copied from, and the necessary sublayers. Each is removed again by other means: tokens by attention scores of −∞, a
sublayer by an edit of its output. A statement holds if its effect, on the probability or on the top-1 token, is at
least half of the stated one.
"""

import argparse
import math
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from report import add_json_option, print_row, save_rows
from torch import Tensor

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.serve.inspect.inspector import build_inspector
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.protocol import QueryJob
from cutaway.serve.inspect.queries.interventions import Interventions

OPENINGS = ("Once upon a time", "One day,", "Tom and Lily", "The little dog", '"Mom,')
MIN_EFFECT = 0.1
"""Smallest change of the log-probability for which the page names a token, in nats."""


def sample_texts(name: str, checkpoint: Checkpoint, count: int) -> list[str]:
    """Story beginnings of the model itself, or beginnings of modules of the standard library."""
    rng = random.Random(0)
    if name == "tiny-english":
        prompts = [rng.choice(OPENINGS) for _ in range(count)]
        outputs = ct.generate(checkpoint, prompts, max_new_tokens=48, temperature=1.0, seed=0)
        texts = [f"{prompt}{output.text}" for prompt, output in zip(prompts, outputs, strict=True)]
    else:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        texts = [path.read_text(encoding="utf-8")[2000:2300] for path in rng.choices(paths, k=count)]
    return [text[: rng.randint(20, 200)] for text in texts if len(text) > 20]


@torch.no_grad()
def check_text(checkpoint: Checkpoint, text: str) -> list[tuple[str, bool]]:
    """Each statement about the text, with whether its effect was measured again."""
    inspector = build_inspector(checkpoint)
    tokens = inspector.tokenizer.encode(text)
    position = len(tokens) - 1
    query = Interventions(input=ModelInput(tokens=tuple(tokens)), position=position)
    data: Any = query.run(inspector, QueryJob()).data
    model, ids, answer, clean = checkpoint.model, torch.tensor([tokens]), int(data["token"]), float(data["probability"])
    statements = []

    def holds(edits: dict[str, Any], effect: dict[str, Any]) -> bool:
        with ct.edit(model, edits):
            logits = model(ids)[0, -1]
        measured = math.log(max(float(logits.softmax(-1)[answer]), 1e-12) / clean)
        stated = math.log(max(float(effect["probability"]), 1e-12) / clean)
        return (int(logits.argmax()) != answer and effect["top"] != answer) or (
            stated * measured > 0 and abs(measured) >= abs(stated) / 2
        )

    def mask(keys: list[int]) -> dict[str, Any]:
        def set_scores(scores: Tensor) -> Tensor:
            scores[:, :, position, keys] = -torch.inf
            return scores

        return {"blocks.*.attn.scores": set_scores}

    index, effect = min(enumerate(data["tokens"]), key=lambda row: row[1]["probability"])
    if math.log(max(effect["probability"], 1e-12) / clean) < -MIN_EFFECT and len(tokens) > 1:
        statements.append(("token", holds(mask([index]), effect)))
    occurrences, joint = data["occurrences"]["positions"], data["occurrences"]["effect"]
    if joint is not None and (joint["top"] != answer or joint["probability"] < clean / 2):
        statements.append(("copy", holds(mask(occurrences), joint)))
    zero, mean = data["zero"], data.get("mean", data["zero"])
    for name in zero:
        if zero[name]["top"] != answer and mean[name]["top"] != answer:
            layer, sublayer = name.split(".")
            statements.append(("sublayer", holds({f"blocks.{layer}.{sublayer}.out": "zero"}, zero[name])))
    return statements


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-texts", type=int, default=200)
    add_json_option(parser)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    rows = []
    for name in ("tiny-english", "tiny-python"):
        checkpoint = ct.load(name, dtype=torch.float32)
        results = [check_text(checkpoint, text) for text in sample_texts(name, checkpoint, args.num_texts)]
        for kind in ("token", "copy", "sublayer"):
            flags = [flag for statements in results for each, flag in statements if each == kind]
            row = {"case": kind, "model": name, "num_texts": len(results), "num_statements": len(flags)}
            rows.append(print_row(row | {"num_holding": sum(flags), "share_holding": sum(flags) / max(1, len(flags))}))
    save_rows(args.json, rows)


if __name__ == "__main__":
    main()
