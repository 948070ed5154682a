"""Batched log-likelihoods of continuations given contexts, for a decoder."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from cutaway.evaluate.token_loss import (
    ProgressFn,
    batch_by_length,
    check_token_ids,
    compute_token_losses,
    evaluation_mode,
    pad_rows,
)
from cutaway.model import DecoderOnly


class LoglikelihoodRequest(NamedTuple):
    """Context tokens and the continuation tokens to score after them. Neither list is empty."""

    context: list[int]
    continuation: list[int]


class Loglikelihood(NamedTuple):
    nll: float
    """−log p(continuation | context)."""
    is_greedy: bool
    """Whether each token of the continuation is the most likely token at its position."""


class _SharedRow(NamedTuple):
    """Input tokens of one batch row, and the indices of the requests that are scored from this row."""

    tokens: tuple[int, ...]
    request_indices: list[int]


def compute_loglikelihoods(
    model: DecoderOnly,
    requests: Sequence[LoglikelihoodRequest],
    *,
    max_length: int,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> list[Loglikelihood]:
    """Return −log p(continuation | context) of each request, in order, and whether greedy decoding generates it.

    The input has at most `max_length` tokens; a longer context is truncated on the left. Requests with equal input
    tokens, that is, whose continuations differ only in the last token, share a batch row. This is common in
    multiple-choice tasks, whose choices are often single tokens.
    """
    max_id = max((token for request in requests for tokens in request for token in tokens), default=0)
    check_token_ids(max_id, model.config.vocab_size)
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        # The last token is only a target, not an input.
        rows.setdefault(tuple([*request.context, *request.continuation][-max_length - 1 : -1]), []).append(index)
    results: dict[int, Loglikelihood] = {}
    with evaluation_mode(model):
        for batch in batch_by_length(
            [_SharedRow(*row) for row in rows.items()], lambda row: len(row.tokens), batch_size, model.device
        ):
            results |= _score_rows(model, requests, batch)
            if progress is not None:
                progress(len(results), len(requests))
    return [results[index] for index in range(len(requests))]


def _score_rows(
    model: DecoderOnly, requests: Sequence[LoglikelihoodRequest], rows: list[_SharedRow]
) -> dict[int, Loglikelihood]:
    tokens, padding_mask = pad_rows([row.tokens for row in rows], model.device)
    x = model.hidden_states(tokens, padding_mask)  # (B, T, d)
    indices, vectors = [], []
    for batch_index, row in enumerate(rows):
        for index in row.request_indices:
            indices.append(index)
            vectors.append(x[batch_index, len(row.tokens) - len(requests[index].continuation) : len(row.tokens)])
    targets = torch.tensor([token for index in indices for token in requests[index].continuation], device=x.device)
    losses = compute_token_losses(model.lm_head, torch.cat(vectors), targets, model.config.vocab_size)
    lengths = [len(requests[index].continuation) for index in indices]
    nll, correct = (torch.split(values.cpu(), lengths) for values in (losses.nll.double(), losses.correct))
    results = [Loglikelihood(float(part.sum()), bool(hits.all())) for part, hits in zip(nll, correct, strict=True)]
    return dict(zip(indices, results, strict=True))


def rolling_windows(ids: list[int], max_length: int) -> Iterator[LoglikelihoodRequest]:
    """Split a text into requests that together score every token but the first, with as much context as fits."""
    start = 1
    while start < len(ids):
        end = min(start + max_length, len(ids))
        yield LoglikelihoodRequest(ids[max(0, end - 1 - max_length) : start], ids[start:end])
        start = end
