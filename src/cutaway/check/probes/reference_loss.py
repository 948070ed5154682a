"""Reference cross-entropy loss from logits, which the model's own loss is compared with."""

import torch
from torch import Tensor
from torch.nn import functional as F

from cutaway.check.context import CheckContext
from cutaway.check.report.finding import SkipCheckError

IGNORE_INDEX = -100
"""Label that the loss ignores."""


def label_shift(ctx: CheckContext) -> int:
    """Shift between logits and labels: 1 for next-token prediction, 0 for an encoder."""
    return 0 if ctx.model.kind == "encoder" else 1


def token_losses(logits: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """−log p of each label that is not ignored, and the (row, position) of these labels."""
    length = labels.shape[1] - shift
    if length < 1:
        raise SkipCheckError("needs longer sequences")
    targets = labels[:, shift:]
    counted = targets != IGNORE_INDEX
    losses = F.cross_entropy(logits[:, :length][counted].float(), targets[counted], reduction="none")
    return losses, counted.nonzero() + torch.tensor([0, shift], device=labels.device)


def mean_loss(logits: Tensor, labels: Tensor, shift: int) -> Tensor:
    """Mean of −log p over the labels that are not ignored."""
    return token_losses(logits, labels, shift)[0].mean()


def require_vocab_logits(ctx: CheckContext, logits: Tensor) -> Tensor:
    """Return the logits; raise SkipCheckError if they are narrower than the vocabulary, as without an output head."""
    if logits.shape[-1] < (ctx.model.vocab_size or 0):
        raise SkipCheckError("needs logits over the vocabulary")
    return logits


def compute_loss(ctx: CheckContext, tokens: Tensor) -> Tensor:
    """The model's own loss, or the reference loss if the model has no loss function."""
    model = ctx.model
    if model.loss is not None:
        loss = model.loss(tokens, tokens)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise SkipCheckError("needs a scalar loss")
        return loss.reshape(())
    return mean_loss(require_vocab_logits(ctx, ctx.logits(tokens)), tokens, label_shift(ctx))
