"""Log-probabilities of target tokens in chunks of targets, so that the full (N, V) logits are never in memory at once.

Losses on whole sequences (DPO, KTO, ORPO, GRPO) are functions of these log-probabilities, so that the gradient of each
token is known only after all of them. Each chunk of logits is therefore computed again in the backward pass.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cutaway.train.loss.chunked_cross_entropy import LossTargets

CHUNK_SIZE = 1024
"""Number of targets per chunk of logits."""


class SequenceLogProbs(NamedTuple):
    """Log-probabilities of the target tokens of a batch of sequences."""

    tokens: Float[Tensor, "B T"]
    """Log-probability of each target token; 0 at positions without a target."""
    num_targets: Int[Tensor, " B"]

    @property
    def sums(self) -> Float[Tensor, " B"]:
        """Log-probability of the targets of each sequence together."""
        return self.tokens.sum(-1)

    @property
    def means(self) -> Float[Tensor, " B"]:
        """Mean log-probability of the targets of each sequence; 0 for a sequence without targets."""
        return self.sums / self.num_targets.clamp(min=1)


def sequence_log_probs(
    head: nn.Module, x: Float[Tensor, "B T d"], selected: LossTargets, *, chunk_size: int = CHUNK_SIZE
) -> SequenceLogProbs:
    """Compute `token_log_probs` for a batch of sequences. `selected` refers to the flattened (B·T) positions."""
    shape = x.shape[:2]
    tokens = token_log_probs(head, x.flatten(0, 1), selected, chunk_size=chunk_size).view(shape)
    is_target = torch.ones(shape, dtype=torch.long, device=x.device).flatten()
    if selected.indices is not None:
        is_target = torch.zeros_like(is_target).index_fill_(0, selected.indices, 1)
    return SequenceLogProbs(tokens, is_target.view(shape).sum(-1))


def token_log_probs(
    head: nn.Module,
    x: Float[Tensor, "N d"],
    selected: LossTargets,
    *,
    chunk_size: int = CHUNK_SIZE,
    temperature: float = 1.0,
) -> Float[Tensor, " N"]:
    """Log-probability of the target token of each row of x in fp32 or wider; 0 for rows without a target.

    The result is differentiable with respect to x and the parameters of the head. The weights of `selected` are not
    used. Logits are divided by `temperature`.
    """
    rows = x if selected.indices is None else x[selected.indices]
    chunks = []
    for start in range(0, max(1, len(rows)), chunk_size):  # one chunk also if there are no targets
        inputs = (head, rows[start : start + chunk_size], selected.targets[start : start + chunk_size], temperature)
        if torch.is_grad_enabled():
            chunks.append(checkpoint(_chunk_log_probs, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(_chunk_log_probs(*inputs))
    log_probs = torch.cat(chunks)
    if selected.indices is None:
        return log_probs
    return log_probs.new_zeros(len(x)).index_copy(0, selected.indices, log_probs)


def _chunk_log_probs(
    head: nn.Module, x: Float[Tensor, "n d"], targets: Int[Tensor, " n"], temperature: float
) -> Float[Tensor, " n"]:
    logits = head(x)  # (n, V)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if temperature != 1:
        logits = logits.to(dtype) / temperature
    return torch.log_softmax(logits, -1, dtype=dtype).gather(-1, targets[:, None]).squeeze(-1)
