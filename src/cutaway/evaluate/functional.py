"""Entropy, cross-entropy and KL divergence in nats along the last axis, for numpy arrays and PyTorch tensors.

Inputs are not validated, because validation would synchronize with the device, and because lens, training and serve
call these functions on softmax outputs. `information` has the same functions with validation. torch is not imported
here, because a caller that has a tensor has already imported it.
"""

import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Array = TypeVar("Array", NDArray[np.float64], "Tensor")
NATS_PER_UNIT = {"nats": 1.0, "bits": math.log(2)}
"""Unit → number of nats in one unit."""


def array_namespace(x: object) -> ModuleType:
    """Return torch for a tensor, else numpy."""
    return sys.modules["torch"] if is_tensor(x) else np


def is_tensor(x: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def log(p: Array) -> Array:
    """log p, with log 0 = −∞."""
    with np.errstate(divide="ignore"):
        return array_namespace(p).log(p)


def log_softmax(x: Array) -> Array:
    """x − log Σ eˣ. The maximum is subtracted first, so that exp does not overflow."""
    if is_tensor(x):
        return array_namespace(x).log_softmax(x, -1)
    shifted = np.asarray(x - np.max(x, -1, keepdims=True))
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _expected_log(p: Array, log_q: Array) -> Array:
    """Σ p·log q with 0·log 0 = 0; −∞ where q = 0 and p > 0."""
    return (p * array_namespace(p).where(p > 0, log_q, 0.0)).sum(-1)


def cross_entropy(p: Array, log_q: Array) -> Array:
    """H(P, Q) = −Σ p·log q. The sum is subtracted from 0.0 instead of negated, so that zero is not −0."""
    return 0.0 - _expected_log(p, log_q)


def entropy(p: Array) -> Array:
    """H(P) = −Σ p·log p. The values p need not sum to 1."""
    return cross_entropy(p, log(p))


def kl_divergence(p: Array, log_p: Array, log_q: Array) -> Array:
    """KL(P ‖ Q) = Σ p·(log p − log q), clipped at 0 against rounding errors."""
    with np.errstate(invalid="ignore"):  # −∞ − −∞ where p = q = 0, which has weight 0
        return _expected_log(p, log_p - log_q).clip(0.0, None)


def kl_divergence_from_logits(p_logits: Array, q_logits: Array) -> Array:
    log_p = log_softmax(p_logits)
    return kl_divergence(array_namespace(log_p).exp(log_p), log_p, log_softmax(q_logits))


def append_missing_mass(p: Array) -> Array:
    """Append an outcome with probability 1 − Σ p, which is the weight of an attention sink."""
    rest = 1 - p.sum(-1)[..., None]
    return array_namespace(p).concatenate((p, rest.clip(0.0, None)), -1)
