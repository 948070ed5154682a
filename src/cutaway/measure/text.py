"""Loss, perplexity and bits per byte of a decoder on texts, read in windows that slide over them.

A window reads at most `context` tokens and tells the one behind each of them; the next begins `stride` tokens on and
tells only what has not been told:

    tokens    t₀ t₁ t₂ t₃ t₄ t₅ t₆ t₇        context 4, stride 2
    reads     t₀ t₁ t₂ t₃                     tells t₁ t₂ t₃ t₄
                    t₂ t₃ t₄ t₅               tells       t₅ t₆
                          t₄ t₅ t₆            tells          t₇
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cutaway.errors import InputError
from cutaway.generate.texts import Source, opened
from cutaway.measure.score import Score
from cutaway.measure.surprise import (
    Progress,
    Surprise,
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
from cutaway.model import DecoderOnly
from cutaway.text import Tokenizer
from cutaway.text.splits import byte_characters

Ids = NDArray[np.uint32]


class Window(NamedTuple):
    """Reads tokens from `begin` up to `end` of a document, and tells those from `first` up to and with `end`."""

    document: int
    begin: int
    end: int
    first: int


def measure(
    checkpoint: Source,
    texts: Iterable[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Score:
    """How well a decoder tells texts: each token behind a text's first, or behind its BOS, is told exactly once.

    It is told after at least `context − stride` tokens, where there are so many before it. A text that fits into the
    context is read in one pass. Unless told, `context` is the model's own (at most 4,096), and `stride` half of it.
    `batch`: windows that are read together. `progress(windows done, windows in all)` is called on the way.
    """
    model, found, _ = opened(checkpoint)
    if not isinstance(model, DecoderOnly):
        raise InputError("this model is no decoder; use measure_masked for an encoder, measure_pairs for both in one")
    tokenizer = tokenizer_of(found)
    context = context_of(model, context)
    stride = size_of("stride", stride, max(1, context // 2), context, "and a window may not step over tokens")
    batch = batch if batch is None else size_of("batch", batch, 1, None, "")
    documents, first, told = read(tokenizer, texts)
    if not documents:
        raise InputError("there is no token to tell: nothing stands before a text's first; give longer texts")
    check_ids(max(int(ids.max()) for ids in documents), model.config.vocab_size)
    every = [
        window for number, ids in enumerate(documents) for window in windows(number, len(ids), first, context, stride)
    ]
    parts, done = [], 0
    with reading(model):
        for part in batches(every, lambda window: window.end - window.begin, batch, model.device):
            parts.append(tell(model, documents, part))
            done += len(part)
            if progress is not None:
                progress(done, len(every))
    tokens, whole = sum(len(ids) - first for ids in documents), total(parts)
    return Score(whole.nats, tokens, whole.calibration, told, len(documents), context, stride)


def read(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[list[Ids], int, int]:
    """The ids of all texts that have something to tell, the place of the first that is told, and the told bytes."""
    before, _ = added(tokenizer)
    first = max(1, len(before))
    documents, told = [], 0
    for text in texts_of(texts):
        ids = tokenizer.encode(text)
        if len(ids) > first:
            documents.append(np.array(ids, np.uint32))
            told += len(text.encode()) - (0 if before else stands_for(tokenizer, ids[0], text))
    return documents, first, told


def stands_for(tokenizer: Tokenizer, token: int, text: str) -> int:
    """How many bytes a text's first token is. One that is part of a letter has no text of its own."""
    shown = tokenizer.decode([token], skip_special=False)
    name = tokenizer.token(token) or ""
    if not text.startswith(shown) and set(name) <= set(byte_characters().values()):
        return len(name)
    return len(shown.encode())


def windows(document: int, length: int, first: int, context: int, stride: int) -> Iterator[Window]:
    """Windows over a document of so many tokens, of which the one at `first` is the first to be told."""
    begin = 0
    while first < length:
        end = min(begin + context, length - 1)
        if end >= first:
            yield Window(document, begin, end, first)
            first = end + 1
        begin += stride


def tell(model: DecoderOnly, documents: list[Ids], part: list[Window]) -> Surprise:
    """At what these windows tell."""
    tokens, real = padded([documents[w.document][w.begin : w.end] for w in part], model.device)
    x = model.hidden(tokens, real)
    wanted = [x[row, w.first - 1 - w.begin : w.end - w.begin] for row, w in enumerate(part)]
    targets = np.concatenate([documents[w.document][w.first : w.end + 1] for w in part]).astype(np.int64)
    told = torch.from_numpy(targets).to(x.device)
    return surprise(model.head, torch.cat(wanted), told, model.config.vocab_size)
