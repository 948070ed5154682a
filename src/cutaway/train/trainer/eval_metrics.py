"""How often a model is right on what it does not learn from, and an example of what it says."""

from typing import Any

import torch

from cutaway.families.checkpoint import Checkpoint
from cutaway.generate.api import generate
from cutaway.generate.fill_mask import fill_mask
from cutaway.model import EncoderOnly
from cutaway.train.data.data_loader import TrainingData
from cutaway.train.objectives.objective import ObjectiveFn
from cutaway.train.recipe.schema import MaskedLMConfig, PrefixLMConfig, Recipe, Seq2SeqConfig

SAMPLE_TOKENS = 80
"""Tokens of a sample."""
NUM_SHOWN = 3
"""Answers that are shown."""


def has_generation_metrics(recipe: Recipe) -> bool:
    """Whether a look asks for more than the loss."""
    return recipe.eval.sample_prompt is not None or isinstance(
        recipe.objective, MaskedLMConfig | Seq2SeqConfig | PrefixLMConfig
    )


def compute_eval_metrics(
    checkpoint: Checkpoint, data: TrainingData, objective_fn: ObjectiveFn, recipe: Recipe, *, seed: int
) -> dict[str, Any]:
    """The share of hidden tokens that are told, or of answers that are the target, and a sample."""
    found: dict[str, Any] = {}
    match recipe.objective:
        case MaskedLMConfig():
            found["accuracy"] = masked_accuracy(checkpoint, data, objective_fn, recipe)
        case Seq2SeqConfig() | PrefixLMConfig() if recipe.eval.num_exact_match:
            found = exact_match(checkpoint, data, recipe)
    if (text := recipe.eval.sample_prompt) is not None:
        found["sample"] = generate_sample(checkpoint, text, max_len=recipe.data.seq_len, seed=seed)
    return found


@torch.no_grad()
def masked_accuracy(checkpoint: Checkpoint, data: TrainingData, objective_fn: ObjectiveFn, recipe: Recipe) -> float:
    model = checkpoint.model
    assert isinstance(model, EncoderOnly)
    assert model.head is not None
    right = every = 0
    count = min(recipe.eval.num_sequences, data.num_validation_sequences)
    for low in range(0, count, recipe.training.batch_size):
        piece = objective_fn(data.validation.get_batch(low, min(recipe.training.batch_size, count - low)), low)
        hidden = (piece.weights > 0).to(model.device)
        said = model.head(piece.hidden_states(model)[hidden]).argmax(-1)
        right += int((said == piece.targets[hidden]).sum())
        every += len(said)
    return right / max(1, every)


def exact_match(checkpoint: Checkpoint, data: TrainingData, recipe: Recipe) -> dict[str, Any]:
    """The likeliest token after another, compared with the target as the tokenizer writes it."""
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    rows = data.validation.get_rows(range(min(recipe.eval.num_exact_match, data.num_validation_sequences)))
    most = max(len(target) for _, target in rows)  # one more than it has is enough to see that an answer is another
    sources = [source.tolist() for source, _ in rows]
    found = generate(checkpoint, sources, beams=1, temperature=0.0, max_new_tokens=most)
    answers = [(answer.text or "").strip() for answer in found]
    targets = [tokenizer.decode(target.tolist()).strip() for _, target in rows]
    right = sum(answer == target for answer, target in zip(answers, targets, strict=True))
    shown = zip(sources[:NUM_SHOWN], answers[:NUM_SHOWN], strict=True)
    sample = "\n".join(f"{tokenizer.decode(source).strip()} → {answer}" for source, answer in shown)
    return {"exact_match": right / len(rows), "sample": sample}


def generate_sample(checkpoint: Checkpoint, text: str, *, max_len: int, seed: int) -> str:
    """What it makes of a text, by now: a decoder goes on from it, an encoder fills its masks, both in one answer it."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    assert tokenizer is not None
    if isinstance(model, EncoderOnly):
        [masks] = fill_mask(model, tokenizer, [text], top_k=NUM_SHOWN)
        return "\n".join(best.text for mask in masks for best in mask)
    if len(model.stacks) > 1:
        [answer] = generate(checkpoint, text, beams=1, max_new_tokens=SAMPLE_TOKENS, seed=seed)
        return f"{text} → {answer.text or ''}"
    [answer] = generate(
        checkpoint,
        text,
        max_new_tokens=SAMPLE_TOKENS,
        max_model_len=max(2, max_len),
        temperature=0.8,
        top_k=50,
        seed=seed,
    )
    return text + (answer.text or "")
