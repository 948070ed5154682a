"""How likely a decoder finds a continuation behind a context, for many of both at once."""

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
    """Tokens that are told behind tokens that are only read; both have some."""

    context: list[int]
    continuation: list[int]


class Loglikelihood(NamedTuple):
    nll: float
    """−log p(told | context)."""
    is_greedy: bool
    """Whether each told token is the likeliest."""


class _SharedRow(NamedTuple):
    """What is read in one pass, and who asks for what behind it."""

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
    """An answer to each. At most `max_length` tokens are read: of a longer context its end.

    Continuations that differ in their last token only are read once: answers to pick from are often single tokens.
    """
    check_token_ids(
        max((token for each in requests for token in (*each.context, *each.continuation)), default=0),
        model.config.vocab_size,
    )
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, each in enumerate(requests):
        rows.setdefault(tuple([*each.context, *each.continuation][-max_length - 1 : -1]), []).append(number)
    found: dict[int, Loglikelihood] = {}
    with evaluation_mode(model):
        for part in batch_by_length(
            [_SharedRow(*each) for each in rows.items()], lambda row: len(row.tokens), batch_size, model.device
        ):
            found |= _score_rows(model, requests, part)
            if progress is not None:
                progress(len(found), len(requests))
    return [found[number] for number in range(len(requests))]


def _score_rows(
    model: DecoderOnly, requests: Sequence[LoglikelihoodRequest], rows: list[_SharedRow]
) -> dict[int, Loglikelihood]:
    tokens, real = pad_rows([row.tokens for row in rows], model.device)
    x = model.hidden_states(tokens, real)
    numbers, vectors = [], []
    for place, row in enumerate(rows):
        for number in row.request_indices:
            numbers.append(number)
            vectors.append(x[place, len(row.tokens) - len(requests[number].continuation) : len(row.tokens)])
    targets = torch.tensor([token for number in numbers for token in requests[number].continuation], device=x.device)
    found = compute_token_losses(model.head, torch.cat(vectors), targets, model.config.vocab_size)
    lengths = [len(requests[number].continuation) for number in numbers]
    nats, right = (torch.split(each.cpu(), lengths) for each in (found.nll.double(), found.correct))
    parts = zip(numbers, nats, right, strict=True)
    return {number: Loglikelihood(float(own.sum()), bool(best.all())) for number, own, best in parts}


def rolling_windows(ids: list[int], max_length: int) -> Iterator[LoglikelihoodRequest]:
    """A text that is longer than a model reads: each token but the first is told once, the last with all the context
    that there is room for."""
    done = 1
    while done < len(ids):
        end = min(done + max_length, len(ids))
        yield LoglikelihoodRequest(ids[max(0, end - 1 - max_length) : done], ids[done:end])
        done = end
