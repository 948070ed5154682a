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
from cutaway.evaluate.results import CausalLMResult
from cutaway.evaluate.token_loss import (
    ProgressFn,
    TokenLossSum,
    batch_by_length,
    check_texts,
    check_token_ids,
    combine_loss_sums,
    evaluation_mode,
    pad_rows,
    require_tokenizer,
    resolve_context,
    resolve_positive_int,
    special_prefix_and_suffix,
    sum_token_losses,
)
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.model import DecoderOnly
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.split_patterns import bytes_to_unicode

TokenIds = NDArray[np.uint32]


class Window(NamedTuple):
    """Reads tokens from `start` up to `end` of a document, tells those from `first_target` up to and with `end`."""

    document: int
    start: int
    end: int
    first_target: int


def evaluate_causal_lm(
    checkpoint: CheckpointLike,
    texts: Iterable[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> CausalLMResult:
    """How well a decoder tells texts: each token behind a text's first, or behind its BOS, is told exactly once.

    It is told after at least `context − stride` tokens, where there are so many before it. A text that fits into the
    context is read in one pass. Unless told, `context` is the model's own (at most 4,096), and `stride` half of it.
    `batch_size`: windows that are read together. `progress(windows done, windows in all)` is called on the way.
    """
    model, found, _ = unpack_checkpoint(checkpoint)
    if not isinstance(model, DecoderOnly):
        raise InputError(
            "this model is no decoder; use evaluate_masked_lm for an encoder, evaluate_seq2seq for both in one"
        )
    tokenizer = require_tokenizer(found)
    context = resolve_context(model, context)
    stride = resolve_positive_int(
        "stride", stride, max(1, context // 2), context, "and a window may not step over tokens"
    )
    batch_size = batch_size if batch_size is None else resolve_positive_int("batch_size", batch_size, 1, None, "")
    documents, first, told = _encode_documents(tokenizer, texts)
    if not documents:
        raise InputError("there is no token to tell: nothing stands before a text's first; give longer texts")
    check_token_ids(max(int(ids.max()) for ids in documents), model.config.vocab_size)
    every = [
        window
        for number, ids in enumerate(documents)
        for window in sliding_windows(number, len(ids), first, context, stride)
    ]
    parts, done = [], 0
    with evaluation_mode(model):
        for part in batch_by_length(every, lambda window: window.end - window.start, batch_size, model.device):
            parts.append(_score_windows(model, documents, part))
            done += len(part)
            if progress is not None:
                progress(done, len(every))
    tokens, whole = sum(len(ids) - first for ids in documents), combine_loss_sums(parts)
    return CausalLMResult(whole.total_nll, tokens, whole.calibration, told, len(documents), context, stride)


def _encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[list[TokenIds], int, int]:
    """The ids of all texts that have something to tell, the place of the first that is told, and the told bytes."""
    before, _ = special_prefix_and_suffix(tokenizer)
    first = max(1, len(before))
    documents, told = [], 0
    for text in check_texts(texts):
        ids = tokenizer.encode(text)
        if len(ids) > first:
            documents.append(np.array(ids, np.uint32))
            told += len(text.encode()) - (0 if before else first_token_bytes(tokenizer, ids[0], text))
    return documents, first, told


def first_token_bytes(tokenizer: Tokenizer, token: int, text: str) -> int:
    """How many bytes a text's first token is. One that is part of a letter has no text of its own."""
    shown = tokenizer.decode([token], skip_special_tokens=False)
    name = tokenizer.id_to_token(token) or ""
    if not text.startswith(shown) and set(name) <= set(bytes_to_unicode().values()):
        return len(name)
    return len(shown.encode())


def sliding_windows(document: int, num_tokens: int, first_target: int, context: int, stride: int) -> Iterator[Window]:
    """Windows over a document of so many tokens, of which the one at `first_target` is the first to be told."""
    begin = 0
    while first_target < num_tokens:
        end = min(begin + context, num_tokens - 1)
        if end >= first_target:
            yield Window(document, begin, end, first_target)
            first_target = end + 1
        begin += stride


def _score_windows(model: DecoderOnly, documents: list[TokenIds], windows: list[Window]) -> TokenLossSum:
    """At what these windows tell."""
    tokens, real = pad_rows([documents[w.document][w.start : w.end] for w in windows], model.device)
    x = model.hidden_states(tokens, real)
    wanted = [x[row, w.first_target - 1 - w.start : w.end - w.start] for row, w in enumerate(windows)]
    targets = np.concatenate([documents[w.document][w.first_target : w.end + 1] for w in windows]).astype(np.int64)
    told = torch.from_numpy(targets).to(x.device)
    return sum_token_losses(model.head, torch.cat(wanted), told, model.config.vocab_size)
