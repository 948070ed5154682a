"""Evaluation: loss, perplexity, bits per byte and calibration on text, and measures of information (without torch).

ct.evaluate(checkpoint, texts)                   loss, perplexity, bits per byte and calibration of a model on texts
ct.evaluate.entropy([0.9, 0.1])                  entropy of probabilities, or of logits=… or samples=…, in bits or nats
"""

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from cutaway.callable_module import make_callable
from cutaway.evaluate.calibration import Calibration, evaluate_calibration
from cutaway.evaluate.information import (
    bits_per_byte,
    cross_entropy,
    entropy,
    kl_divergence,
    mutual_information,
    perplexity,
)

if TYPE_CHECKING:
    from cutaway.evaluate.causal_lm import evaluate_causal_lm
    from cutaway.evaluate.exact_match import evaluate_exact_match
    from cutaway.evaluate.masked_lm import evaluate_masked_lm
    from cutaway.evaluate.results import CausalLMResult
    from cutaway.evaluate.seq2seq import evaluate_seq2seq
    from cutaway.evaluate.task_evaluation import (
        evaluate_classification,
        evaluate_embeddings,
        evaluate_multiple_choice,
        evaluate_token_classification,
    )
    from cutaway.evaluate.token_loss import ProgressFn
    from cutaway.generate.generation_config import CheckpointLike

_LAZY_MODULES = {
    "evaluate_causal_lm": "causal_lm",
    "evaluate_classification": "task_evaluation",
    "evaluate_embeddings": "task_evaluation",
    "evaluate_exact_match": "exact_match",
    "evaluate_masked_lm": "masked_lm",
    "evaluate_multiple_choice": "task_evaluation",
    "evaluate_seq2seq": "seq2seq",
    "evaluate_token_classification": "task_evaluation",
}

__all__ = [
    "Calibration",
    "bits_per_byte",
    "cross_entropy",
    "entropy",
    "evaluate_calibration",
    "evaluate_causal_lm",
    "evaluate_classification",
    "evaluate_embeddings",
    "evaluate_exact_match",
    "evaluate_masked_lm",
    "evaluate_multiple_choice",
    "evaluate_seq2seq",
    "evaluate_token_classification",
    "kl_divergence",
    "mutual_information",
    "perplexity",
]


def __getattr__(name: str) -> object:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"cutaway.evaluate has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"cutaway.evaluate.{_LAZY_MODULES[name]}"), name)


def _evaluate_texts(
    checkpoint: "CheckpointLike",
    texts: Iterable[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
    progress: "ProgressFn | None" = None,
) -> "CausalLMResult":
    """Evaluate a decoder on texts. See `evaluate_causal_lm` for the options. torch is imported only by this call."""
    from cutaway.evaluate.causal_lm import evaluate_causal_lm

    return evaluate_causal_lm(
        checkpoint, texts, context=context, stride=stride, batch_size=batch_size, progress=progress
    )


make_callable(__name__, _evaluate_texts)
