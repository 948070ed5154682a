"""The equations of information, in nats along the last axis: for numpy's arrays and PyTorch's tensors alike.

Nothing is checked here, and nothing waits for a device: lens, training and page call these on what softmax gave.
`information` asks first whether it was given distributions. No torch is imported: who has a tensor has it already.
"""

import math
import sys
from types import ModuleType
from typing import Any

import numpy as np

NATS_PER_UNIT = {"nats": 1.0, "bits": math.log(2)}
"""A unit's size in nats."""


def array_namespace(x: Any) -> ModuleType:
    """The module whose functions take this kind of array."""
    return sys.modules["torch"] if is_tensor(x) else np


def is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def log(p: Any) -> Any:
    """log p, and −∞ of 0."""
    with np.errstate(divide="ignore"):
        return array_namespace(p).log(p)


def log_softmax(x: Any) -> Any:
    """x − log Σ eˣ, with the largest taken out first, so that no power overflows."""
    if is_tensor(x):
        return x.log_softmax(-1)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _expected_log(p: Any, log_q: Any) -> Any:
    """Σ p·log q with 0·log 0 = 0; −∞ where q rules out what p has."""
    return (p * array_namespace(p).where(p > 0, log_q, 0.0)).sum(-1)


def cross_entropy(p: Any, log_q: Any) -> Any:
    """H(P, Q) = −Σ p·log q. Taken from 0, as nothing would else be −0."""
    return 0.0 - _expected_log(p, log_q)


def entropy(p: Any) -> Any:
    """H(P) = −Σ p·log p. Of shares that do not sum to 1 it is that sum too."""
    return cross_entropy(p, log(p))


def kl_divergence(p: Any, log_p: Any, log_q: Any) -> Any:
    """KL(P ‖ Q) = Σ p·(log p − log q). Rounding may bring it below 0, where it never is."""
    with np.errstate(invalid="ignore"):  # ∞ − ∞ where neither has anything, which weighs nothing
        return _expected_log(p, log_p - log_q).clip(0.0, None)


def kl_divergence_from_logits(p_logits: Any, q_logits: Any) -> Any:
    log_p = log_softmax(p_logits)
    return kl_divergence(array_namespace(log_p).exp(log_p), log_p, log_softmax(q_logits))


def append_missing_mass(p: Any) -> Any:
    """One more outcome that has what is missing to 1: what an attention's sink takes."""
    rest = 1 - p.sum(-1, keepdims=True)
    return array_namespace(p).concatenate((p, rest.clip(0.0, None)), -1)
