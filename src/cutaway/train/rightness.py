"""How often a model is right on what it does not learn from, and an example of what it says."""

from typing import Any

import torch

from cutaway.families.checkpoint import Checkpoint
from cutaway.generate.fill_mask import fill_mask
from cutaway.generate.texts import generate
from cutaway.model import EncoderOnly
from cutaway.train.reading import Ask, Reading
from cutaway.train.recipe import Masked, Prefix, Recipe, Seq2Seq

SAMPLED = 80
"""Tokens of a sample."""
SHOWN = 3
"""Answers that are shown."""


def speaks(recipe: Recipe) -> bool:
    """Whether a look asks for more than the loss."""
    return recipe.watching.sample is not None or isinstance(recipe.objective, Masked | Seq2Seq | Prefix)


def rightness(checkpoint: Checkpoint, reading: Reading, task: Ask, recipe: Recipe, *, seed: int) -> dict[str, Any]:
    """The share of hidden tokens that are told, or of answers that are the target, and a sample."""
    found: dict[str, Any] = {}
    match recipe.objective:
        case Masked():
            found["accuracy"] = told(checkpoint, reading, task, recipe)
        case Seq2Seq() | Prefix() if recipe.watching.answers:
            found = answered(checkpoint, reading, recipe)
    if (text := recipe.watching.sample) is not None:
        found["sample"] = sample(checkpoint, text, length=recipe.data.length, seed=seed)
    return found


@torch.no_grad()
def told(checkpoint: Checkpoint, reading: Reading, task: Ask, recipe: Recipe) -> float:
    model = checkpoint.model
    assert isinstance(model, EncoderOnly)
    assert model.head is not None
    right = every = 0
    count = min(recipe.watching.sequences, reading.held)
    for low in range(0, count, recipe.training.batch):
        piece = task(reading.validation.batch(low, min(recipe.training.batch, count - low)), low)
        hidden = (piece.weights > 0).to(model.device)
        said = model.head(piece.hidden(model)[hidden]).argmax(-1)
        right += int((said == piece.targets[hidden]).sum())
        every += len(said)
    return right / max(1, every)


def answered(checkpoint: Checkpoint, reading: Reading, recipe: Recipe) -> dict[str, Any]:
    """The likeliest token after another, compared with the target as the tokenizer writes it."""
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    rows = reading.validation.rows(range(min(recipe.watching.answers, reading.held)))
    most = max(len(target) for _, target in rows)  # one more than it has is enough to see that an answer is another
    sources = [source.tolist() for source, _ in rows]
    found = generate(checkpoint, sources, beams=1, temperature=0.0, max_new_tokens=most)
    answers = [(answer.text or "").strip() for answer in found]
    targets = [tokenizer.decode(target.tolist()).strip() for _, target in rows]
    right = sum(answer == target for answer, target in zip(answers, targets, strict=True))
    shown = zip(sources[:SHOWN], answers[:SHOWN], strict=True)
    sample = "\n".join(f"{tokenizer.decode(source).strip()} → {answer}" for source, answer in shown)
    return {"exact": right / len(rows), "sample": sample}


def sample(checkpoint: Checkpoint, text: str, *, length: int, seed: int) -> str:
    """What it makes of a text, by now: a decoder goes on from it, an encoder fills its masks, both in one answer it."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    assert tokenizer is not None
    if isinstance(model, EncoderOnly):
        [masks] = fill_mask(model, tokenizer, [text], top=SHOWN)
        return "\n".join(best.text for mask in masks for best in mask)
    how: Any = {"max_new_tokens": SAMPLED, "seed": seed}
    if len(model.stacks) > 1:
        [answer] = generate(checkpoint, text, beams=1, **how)
        return f"{text} → {answer.text or ''}"
    [answer] = generate(checkpoint, text, context=max(2, length), temperature=0.8, top_k=50, **how)
    return text + (answer.text or "")
