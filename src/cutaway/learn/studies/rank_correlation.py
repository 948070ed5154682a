"""Spearman's rank correlation."""

import torch
from torch import Tensor


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two tensors of the same shape, without a correction for ties."""
    ranks = torch.stack([values.flatten().argsort().argsort().float() for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
