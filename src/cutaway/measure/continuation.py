"""How likely a decoder finds a continuation behind a context, for many of both at once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from cutaway.measure.surprise import Progress, batches, by_token, check_ids, padded, reading
from cutaway.model import DecoderOnly


class Asked(NamedTuple):
    """Tokens that are told behind tokens that are only read; both have some."""

    context: list[int]
    told: list[int]


class Found(NamedTuple):
    nats: float
    """−log p(told | context)."""
    greedy: bool
    """Whether each told token is the likeliest."""


class Row(NamedTuple):
    """What is read in one pass, and who asks for what behind it."""

    tokens: tuple[int, ...]
    asking: list[int]


def tell(
    model: DecoderOnly,
    asked: Sequence[Asked],
    *,
    limit: int,
    batch: int | None = None,
    progress: Progress | None = None,
) -> list[Found]:
    """An answer to each. At most `limit` tokens are read: of a longer context its end.

    Continuations that differ in their last token only are read once: answers to pick from are often single tokens.
    """
    check_ids(
        max((token for each in asked for token in (*each.context, *each.told)), default=0), model.config.vocab_size
    )
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, each in enumerate(asked):
        rows.setdefault(tuple([*each.context, *each.told][-limit - 1 : -1]), []).append(number)
    found: dict[int, Found] = {}
    with reading(model):
        for part in batches([Row(*each) for each in rows.items()], lambda row: len(row.tokens), batch, model.device):
            found |= _tell_some(model, asked, part)
            if progress is not None:
                progress(len(found), len(asked))
    return [found[number] for number in range(len(asked))]


def _tell_some(model: DecoderOnly, asked: Sequence[Asked], part: list[Row]) -> dict[int, Found]:
    tokens, real = padded([row.tokens for row in part], model.device)
    x = model.hidden(tokens, real)
    numbers, vectors = [], []
    for place, row in enumerate(part):
        for number in row.asking:
            numbers.append(number)
            vectors.append(x[place, len(row.tokens) - len(asked[number].told) : len(row.tokens)])
    targets = torch.tensor([token for number in numbers for token in asked[number].told], device=x.device)
    found = by_token(model.head, torch.cat(vectors), targets, model.config.vocab_size)
    lengths = [len(asked[number].told) for number in numbers]
    nats, right = (torch.split(each.cpu(), lengths) for each in (found.nats.double(), found.right))
    parts = zip(numbers, nats, right, strict=True)
    return {number: Found(float(own.sum()), bool(best.all())) for number, own, best in parts}


def windows(ids: list[int], limit: int) -> Iterator[Asked]:
    """A text that is longer than a model reads: each token but the first is told once, the last with all the context
    that there is room for."""
    done = 1
    while done < len(ids):
        end = min(done + limit, len(ids))
        yield Asked(ids[max(0, end - 1 - limit) : done], ids[done:end])
        done = end
