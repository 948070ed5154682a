"""The loss as its definition has it, from logits: what an offered loss is compared with."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cutaway.check.context import CheckContext
from cutaway.check.report.finding import SkipCheckError

IGNORE_INDEX = -100
"""A label that is not asked."""


def label_shift(context: CheckContext) -> int:
    """How far behind its label the logits stand: a decoder tells the next token, an encoder the token itself."""
    return 0 if context.model.kind == "encoder" else 1


def token_losses(logits: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """−log p of each label that is asked, and where these stand (row, label's position)."""
    length = labels.shape[1] - shift
    if length < 1:
        raise SkipCheckError("needs longer texts")
    wanted = labels[:, shift:]
    kept = wanted != IGNORE_INDEX
    told = logits[:, :length][kept].float()
    return F.cross_entropy(told, wanted[kept], reduction="none"), kept.nonzero() + torch.tensor(
        [0, shift], device=labels.device
    )


def mean_loss(logits: Tensor, labels: Tensor, shift: int) -> Tensor:
    """The mean of −log p over labels that are asked."""
    return token_losses(logits, labels, shift)[0].mean()


def require_vocab_logits(context: CheckContext, logits: Tensor) -> Tensor:
    """The logits, if they are over the vocabulary: a trunk without a head gives vectors."""
    if logits.shape[-1] < (context.model.vocab_size or 0):
        raise SkipCheckError("needs logits over the vocabulary")
    return logits


def compute_loss(context: CheckContext, tokens: Tensor) -> Tensor:
    """The loss that is offered, or what it should be."""
    target = context.model
    if target.loss is not None:
        loss = target.loss(tokens, tokens)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise SkipCheckError("needs a loss that is one number")
        return loss.reshape(())
    assert target.logits is not None
    return mean_loss(require_vocab_logits(context, target.logits(tokens)), tokens, label_shift(context))
