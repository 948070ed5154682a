"""How well an encoder-decoder tells targets after their sources, and how often its own answer is the target."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from cutaway.errors import InputError
from cutaway.generate import generate
from cutaway.generate.start import Start
from cutaway.generate.texts import Source, opened
from cutaway.measure.score import PairScore
from cutaway.measure.surprise import (
    Progress,
    Surprise,
    batches,
    check_ids,
    padded,
    reading,
    size_of,
    surprise,
    tokenizer_of,
    total,
)
from cutaway.model import EncoderDecoder
from cutaway.text import Tokenizer
from cutaway.text.marian import MarianTokenizer


class Pair(NamedTuple):
    source: list[int]
    target: list[int]
    """With the token that starts it, and the one that ends it."""
    text: str
    """The target as the tokenizer writes it."""


def measure_pairs(
    checkpoint: Source,
    pairs: Iterable[tuple[str, str]],
    *,
    answers: bool = True,
    batch: int | None = None,
    progress: Progress | None = None,
) -> PairScore:
    """Loss of each target's tokens and its end after the true ones before them, and exact matches of greedy answers.

    An answer is right if its text is the target's, as the tokenizer writes it. Without `answers` none is generated.
    """
    model, found, start = opened(checkpoint)
    if not isinstance(model, EncoderDecoder):
        raise InputError("this model is no encoder-decoder, so it answers no sources; use measure or measure_masked")
    tokenizer = tokenizer_of(found)
    batch = batch if batch is None else size_of("batch", batch, 1, None, "")
    every = [encoded(model, tokenizer, start, number, pair) for number, pair in enumerate(pairs)]
    if not every:
        raise InputError("there are no pairs; give at least one source with its target")
    parts = batches(every, lambda pair: max(len(pair.source), len(pair.target)), batch, model.device)
    told, exact, done = [], 0, 0
    for part in parts:
        with reading(model):
            told.append(tell(model, part))
        exact += right_answers(checkpoint, part, batch) if answers else 0
        done += len(part)
        if progress is not None:
            progress(done, len(every))
    tokens, whole = sum(len(pair.target) - 1 for pair in every), total(told)
    return PairScore(whole.nats, tokens, whole.calibration, exact, len(every))


def encoded(model: EncoderDecoder, tokenizer: Tokenizer, start: Start, number: int, pair: tuple[str, str]) -> Pair:
    """A pair as ids; refused if it is none, or too long."""
    if isinstance(tokenizer, MarianTokenizer):
        raise InputError("this tokenizer cuts the source's language only, so targets cannot be measured with it")
    if start.decoder_start is None:
        raise InputError("the checkpoint does not say what a target begins with; set decoder_start_token_id")
    if isinstance(pair, str) or len(pair) != 2:
        raise InputError(f"pair {number} is {pair!r:.60}; give a source and a target")
    source, target = map(tokenizer.encode, pair)
    text = tokenizer.decode(target)
    end = start.eos[0] if start.eos else None
    if end is not None and target[-1:] != [end]:
        target = [*target, end]
    if len(target) < 2 or target[0] != start.decoder_start:  # an end alone, which may be the same token, starts nothing
        target = [start.decoder_start, *target]
    if not source or len(target) < 2:
        raise InputError(f"pair {number} has an empty side; give a source and a target")
    for name, stack, length in (("source", model.encoder, len(source)), ("target", model.decoder, len(target) - 1)):
        limit = getattr(stack.embed.position, "length", None)
        if limit is not None and length > limit:
            raise InputError(
                f"the {name} of pair {number} has {length} tokens, but the model has positions for {limit}; shorten it"
            )
    check_ids(max(source), model.config.source_vocab_size or model.config.vocab_size)  # type: ignore[union-attr]
    check_ids(max(target), model.config.vocab_size)
    return Pair(source, target, text)


def tell(model: EncoderDecoder, part: list[Pair]) -> Surprise:
    source, source_real = padded([pair.source for pair in part], model.device)
    target, real = padded([pair.target[:-1] for pair in part], model.device)
    x = model.hidden(source, target, source_real, real)
    wanted = torch.cat([x[row, : len(pair.target) - 1] for row, pair in enumerate(part)])
    targets = torch.tensor([token for pair in part for token in pair.target[1:]], device=x.device)
    return surprise(model.head, wanted, targets, model.config.vocab_size)


def right_answers(checkpoint: Source, part: list[Pair], batch: int | None) -> int:
    """One token more than the longest target has is enough to see that an answer is another."""
    most = max(len(pair.target) for pair in part)
    found = generate(
        checkpoint, [pair.source for pair in part], beams=1, max_new_tokens=most, temperature=0.0, rows=batch
    )
    return sum((answer.text or "").strip() == pair.text.strip() for answer, pair in zip(found, part, strict=True))
