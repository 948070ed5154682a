"""The loss as its definition has it, from logits: what an offered loss is compared with."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cutaway.check.exam import CannotError, Exam

HIDDEN = -100
"""A label that is not asked."""


def shift_of(exam: Exam) -> int:
    """How far behind its label the logits stand: a decoder tells the next token, an encoder the token itself."""
    return 0 if exam.target.kind == "encoder" else 1


def each(logits: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """−log p of each label that is asked, and where these stand (row, label's position)."""
    length = labels.shape[1] - shift
    if length < 1:
        raise CannotError("needs longer texts")
    wanted = labels[:, shift:]
    kept = wanted != HIDDEN
    told = logits[:, :length][kept].float()
    return F.cross_entropy(told, wanted[kept], reduction="none"), kept.nonzero() + torch.tensor(
        [0, shift], device=labels.device
    )


def mean(logits: Tensor, labels: Tensor, shift: int) -> Tensor:
    """The mean of −log p over labels that are asked."""
    return each(logits, labels, shift)[0].mean()


def over_words(exam: Exam, logits: Tensor) -> Tensor:
    """The logits, if they are over the vocabulary: a trunk without a head gives vectors."""
    if logits.shape[-1] < (exam.target.vocab or 0):
        raise CannotError("needs logits over the vocabulary")
    return logits


def own_loss(exam: Exam, tokens: Tensor) -> Tensor:
    """The loss that is offered, or what it should be."""
    target = exam.target
    if target.loss is not None:
        loss = target.loss(tokens, tokens)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise CannotError("needs a loss that is one number")
        return loss.reshape(())
    assert target.logits is not None
    return mean(over_words(exam, target.logits(tokens)), tokens, shift_of(exam))
