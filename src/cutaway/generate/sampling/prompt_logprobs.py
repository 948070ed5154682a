"""Log-probabilities of the tokens of a prompt, computed from the hidden states of its prefill."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

MAX_LOGITS_PER_CHUNK = 1 << 25
"""Maximum number of logits in memory at a time: 128 MiB in float32."""


class PromptLogprob(NamedTuple):
    """Log-probability of one token of a prompt, given the tokens before it."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top_logprobs: dict[int, float]
    """Log-probabilities of the most likely tokens."""


def compute_prompt_logprobs(
    head: Callable[[Tensor], Tensor],
    x: Float[Tensor, "N d"],
    targets: Int64[Tensor, " N"],
    num_top: int,
    vocab_size: int,
) -> list[PromptLogprob]:
    """Return the log-probability of each target and of the `num_top` most likely tokens at its position.

    `x` is the input of the LM head at the position before each target. The logits are computed in chunks, so that the
    memory does not grow with the length of the prompt."""
    results: list[PromptLogprob] = []
    chunk_size = max(1, MAX_LOGITS_PER_CHUNK // vocab_size)
    for start in range(0, len(targets), chunk_size):
        chunk = slice(start, start + chunk_size)
        logprobs = head(x[chunk]).float().log_softmax(-1)  # (n, V)
        chosen = logprobs.gather(-1, targets[chunk, None])  # (n, 1)
        ranks = (logprobs > chosen).sum(-1, dtype=torch.int32) + 1
        top = logprobs.topk(min(num_top, logprobs.shape[-1]))
        columns = (chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
        for logprob, rank, tokens, values in zip(*columns, strict=True):
            results.append(PromptLogprob(logprob, rank, dict(zip(tokens, values, strict=True))))
    return results
