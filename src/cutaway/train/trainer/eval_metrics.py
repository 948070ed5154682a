"""Evaluation metrics beyond the loss: accuracy of masked tokens or of a task head, exact match of targets, a sample."""

from collections.abc import Sequence

import torch

from cutaway.config import Config
from cutaway.families.checkpoint import Checkpoint
from cutaway.generate.api import generate
from cutaway.generate.fill_mask import fill_mask
from cutaway.generate.prompts import Prompt
from cutaway.model import EncoderOnly
from cutaway.train.data.training_data import TrainingData
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.objectives.objective import ObjectiveFn
from cutaway.train.recipe.schema import MaskedLMConfig, PrefixLMConfig, Recipe, Seq2SeqConfig
from cutaway.train.recipe.task_objectives import TaskObjectiveConfig
from cutaway.train.trainer.general_loss import general_loss, has_general_loss, read_general_text
from cutaway.train.trainer.task_metrics import task_metrics

SAMPLE_TOKENS = 80
"""Maximum number of tokens of a generated sample."""
NUM_SHOWN = 3
"""Number of source-target pairs in a sample, or number of predictions per mask."""


def needs_full_model(recipe: Recipe, config: Config) -> bool:
    """Whether evaluations need the gathered model: for accuracy, exact match, samples or the general loss."""
    return (
        bool(recipe.eval.sample_prompts)
        or isinstance(recipe.objective, MaskedLMConfig | Seq2SeqConfig | PrefixLMConfig | TaskObjectiveConfig)
        or has_general_loss(recipe, config)
    )


def compute_eval_metrics(
    checkpoint: Checkpoint, data: TrainingData, objective_fn: ObjectiveFn, recipe: Recipe, *, seed: int
) -> Metrics:
    """Accuracy, exact match or metrics of a task head, depending on the objective; general loss; samples."""
    metrics: Metrics = {}
    match recipe.objective:
        case MaskedLMConfig():
            metrics["accuracy"] = _masked_accuracy(checkpoint, data, objective_fn, recipe)
        case TaskObjectiveConfig():
            metrics = task_metrics(checkpoint.model, data, objective_fn, recipe)
        case Seq2SeqConfig() | PrefixLMConfig() if recipe.eval.num_exact_match:
            metrics = exact_match(checkpoint, data, recipe)
    if has_general_loss(recipe, checkpoint.config):
        metrics["general_loss"] = general_loss(checkpoint, read_general_text(recipe.eval), recipe.data.seq_len)
    if prompts := recipe.eval.sample_prompts:
        metrics["sample"] = _generate_samples(checkpoint, prompts, max_len=recipe.data.seq_len, seed=seed)
    return metrics


@torch.no_grad()
def _masked_accuracy(checkpoint: Checkpoint, data: TrainingData, objective_fn: ObjectiveFn, recipe: Recipe) -> float:
    """Fraction of the masked validation tokens that the model predicts correctly."""
    model = checkpoint.model
    assert isinstance(model, EncoderOnly)
    assert model.head is not None
    num_correct = num_masked = 0
    count = min(recipe.eval.num_sequences, data.num_validation_sequences)
    for low in range(0, count, recipe.training.batch_size):
        batch = data.validation.get_batch(low, min(recipe.training.batch_size, count - low))
        objective = objective_fn(batch, low)
        is_masked = (objective.weights > 0).to(model.device)
        predicted = model.head(objective.hidden_states(model)[is_masked]).argmax(-1)
        num_correct += int((predicted == objective.targets[is_masked]).sum())
        num_masked += len(predicted)
    return num_correct / max(1, num_masked)


def exact_match(checkpoint: Checkpoint, data: TrainingData, recipe: Recipe) -> Metrics:
    """Fraction of validation pairs whose greedily generated text equals the target, and a few outputs as a sample."""
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    rows = data.validation.get_rows(range(min(recipe.eval.num_exact_match, data.num_validation_sequences)))
    # Targets include EOS, so this is at least one token more than the longest text has. An output that is longer than
    # its target is thus recognized.
    max_new_tokens = max(len(target) for _, target in rows)
    sources = [source.tolist() for source, _ in rows]
    completions = generate(checkpoint, sources, beams=1, temperature=0.0, max_new_tokens=max_new_tokens)
    outputs = [(completion.text or "").strip() for completion in completions]
    targets = [tokenizer.decode(target.tolist()).strip() for _, target in rows]
    num_correct = sum(output == target for output, target in zip(outputs, targets, strict=True))
    shown = zip(sources[:NUM_SHOWN], outputs[:NUM_SHOWN], strict=True)
    sample = "\n".join(f"{tokenizer.decode(source).strip()} → {output}" for source, output in shown)
    return {"exact_match": num_correct / len(rows), "sample": sample}


def _generate_samples(checkpoint: Checkpoint, prompts: Sequence[str], *, max_len: int, seed: int) -> str:
    """Generate a sample for each prompt: a decoder continues the text, or answers it if its tokenizer has a chat
    template; an encoder fills its masks; an encoder-decoder transforms it."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    assert tokenizer is not None
    if isinstance(model, EncoderOnly):
        filled = fill_mask(model, tokenizer, list(prompts), top_k=NUM_SHOWN)
        return "\n".join(fill.text for masks in filled for mask in masks for fill in mask)
    if len(model.stacks) > 1:
        completions = generate(checkpoint, list(prompts), beams=1, max_new_tokens=SAMPLE_TOKENS, seed=seed)
        separator = " → "
    else:
        is_chat = tokenizer.chat_template is not None
        inputs: list[Prompt] = [[{"role": "user", "content": text}] if is_chat else text for text in prompts]
        completions = generate(
            checkpoint,
            inputs,
            max_new_tokens=SAMPLE_TOKENS,
            max_model_len=None if is_chat else max(2, max_len),
            temperature=0.8,
            top_k=50,
            seed=seed,
        )
        separator = " → " if is_chat else ""
    texts = [f"{text}{separator}{each.text or ''}" for text, each in zip(prompts, completions, strict=True)]
    return "\n\n".join(texts)
