"""How well an encoder tells tokens that are hidden behind masks."""

from collections.abc import Iterable, Iterator

import torch

from cutaway.errors import InputError
from cutaway.generate.noise import uniform
from cutaway.generate.texts import Source, opened
from cutaway.measure.score import MaskScore
from cutaway.measure.surprise import (
    Progress,
    added,
    batches,
    check_ids,
    context_of,
    padded,
    reading,
    size_of,
    surprise,
    texts_of,
    tokenizer_of,
    total,
)
from cutaway.model import EncoderOnly
from cutaway.model.inputs import check_seed
from cutaway.text import Tokenizer

RATE = 0.15
"""The share of tokens that is hidden, as in BERT's training (2018)."""
Piece = tuple[list[int], list[int]]
"""Ids with their special tokens around them, and the places that are hidden."""


def measure_masked(
    checkpoint: Source,
    texts: Iterable[str],
    *,
    rate: float = RATE,
    seed: int = 0,
    context: int | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> MaskScore:
    """How well an encoder tells `rate` of the tokens of each piece of text, all of them hidden behind the mask token.

    Longer texts than the context are cut into pieces, each with its special tokens. Which tokens are hidden is a
    function of the seed, the text's number and the place in it.
    """
    model, found, _ = opened(checkpoint)
    if not isinstance(model, EncoderOnly) or model.head is None:
        raise InputError("this model has no head for masks; load an encoder with one, such as a BertForMaskedLM's")
    tokenizer = tokenizer_of(found)
    mask = tokenizer.mask_id
    if mask is None:
        raise InputError("this tokenizer has no mask token, so nothing can be hidden; name one in mask_token")
    if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 < rate <= 1:
        raise InputError(f"rate is {rate!r:.40}; it is the share of hidden tokens, so give more than 0 and at most 1")
    check_seed(seed)
    context = context_of(model, context)
    batch = batch if batch is None else size_of("batch", batch, 1, None, "")
    every: list[Piece] = []
    documents = 0
    for number, text in enumerate(texts_of(texts)):
        own = list(pieces(tokenizer, text, context, rate, seed, number))
        every += own
        documents += bool(own)
    if not every:
        raise InputError("there is no token to hide; give texts with at least one")
    check_ids(max(max(ids) for ids, _ in every), model.config.vocab_size)
    parts, done = [], 0
    with reading(model):
        for part in batches(every, lambda piece: len(piece[0]), batch, model.device):
            tokens, real = padded([ids for ids, _ in part], model.device)
            rows = torch.tensor([row for row, (_, hidden) in enumerate(part) for _ in hidden], device=tokens.device)
            places = torch.tensor([place for _, hidden in part for place in hidden], device=tokens.device)
            targets = tokens[rows, places]
            tokens[rows, places] = mask
            wanted = model.encode(tokens, real)[rows, places]
            parts.append(surprise(model.head, wanted, targets, model.config.vocab_size))
            done += len(part)
            if progress is not None:
                progress(done, len(every))
    told, count = total(parts), sum(len(hidden) for _, hidden in every)
    return MaskScore(told.nats, count, told.calibration, told.right, documents, context)


def pieces(tokenizer: Tokenizer, text: str, context: int, rate: float, seed: int, number: int) -> Iterator[Piece]:
    """A text in parts that fit, and of each at least one token hidden; special tokens are never."""
    before, after = added(tokenizer)
    room = context - len(before) - len(after)
    if room < 1:
        raise InputError(f"context is {context}, which the special tokens fill; give more")
    ids = tokenizer.encode(text, special=False)
    noise = uniform(torch.full((len(ids),), seed), torch.arange(len(ids)), stream=number).tolist()
    for start in range(0, len(ids), room):
        part = ids[start : start + room]
        plain = [place for place, token in enumerate(part) if token not in tokenizer.special_ids]
        plain.sort(key=lambda place: noise[start + place])
        hidden = sorted(len(before) + place for place in plain[: max(1, round(rate * len(plain)))])
        if hidden:
            yield [*before, *part, *after], hidden
