"""Causal language model evaluation: loss, perplexity and bits per byte of a decoder on texts, with a sliding window.

The input of a window has at most `context` tokens, and for each of them the next token is scored. The next window
starts `stride` tokens later and scores only tokens that have not been scored yet:

    tokens    t₀ t₁ t₂ t₃ t₄ t₅ t₆ t₇        context 4, stride 2
    input     t₀ t₁ t₂ t₃                     scores t₁ t₂ t₃ t₄
                    t₂ t₃ t₄ t₅               scores       t₅ t₆
                          t₄ t₅ t₆            scores          t₇
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cutaway.errors import InputError
from cutaway.evaluate.results import CausalLMResult, EvalResult
from cutaway.evaluate.token_loss import (
    ProgressFn,
    check_texts,
    check_token_ids,
    pad_rows,
    require_tokenizer,
    resolve_context,
    resolve_length,
    score_batches,
    special_prefix_and_suffix,
    sum_token_losses,
)
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.model import DecoderOnly
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.split_patterns import bytes_to_unicode

TokenIds = NDArray[np.uint32]


class Window(NamedTuple):
    """A window of a document: its input is tokens start to end − 1, and it scores tokens first_target to end."""

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
    """Evaluate a decoder on texts.

    Each token is scored exactly once, except the BOS or, if there is no BOS, the first token. A token is scored with at
    least `context − stride` tokens before it, if the text has that many. A text that fits into the context is one
    window.

    Args:
        context: maximum number of input tokens of a window; the default is the model's context, but at most 4,096.
        stride: number of tokens between the starts of two windows; the default is half of `context`.
        batch_size: number of windows per forward pass; the default depends on their length and on the device.
        progress: called with (number of windows done, number of all windows).
    """
    model, tokenizer, _ = unpack_checkpoint(checkpoint)
    if not isinstance(model, DecoderOnly):
        raise InputError("this model is not a decoder; use evaluate_masked_lm or evaluate_seq2seq")
    tokenizer = require_tokenizer(tokenizer)
    context = resolve_context(model, context)
    stride = resolve_length("stride", stride, max(1, context // 2), context, "which would skip tokens between windows")
    documents, first_target, num_bytes = _encode_documents(tokenizer, texts)
    if not documents:
        raise InputError("there is no token to score, because a text's first token has no context; pass longer texts")
    check_token_ids(max(int(ids.max()) for ids in documents), model.config.vocab_size)
    windows: list[Window] = []
    for index, ids in enumerate(documents):
        windows += sliding_windows(index, len(ids), first_target, context, stride)
    score = partial(_score_windows, model, documents)
    total = score_batches(model, windows, lambda window: window.end - window.start, score, batch_size, progress)
    return CausalLMResult(
        **vars(total), num_bytes=num_bytes, num_documents=len(documents), context=context, stride=stride
    )


def _encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> tuple[list[TokenIds], int, int]:
    """Return the token ids of each text with a token to score, the index of the first scored token in each text, and
    the number of UTF-8 bytes of all scored tokens."""
    prefix, _ = special_prefix_and_suffix(tokenizer)
    first_target = max(1, len(prefix))
    documents, num_bytes = [], 0
    for text in check_texts(texts):
        ids = tokenizer.encode(text)
        if len(ids) > first_target:
            documents.append(np.array(ids, np.uint32))
            # Without a BOS token, the first token is not scored, so its bytes do not count.
            num_bytes += len(text.encode()) - (0 if prefix else first_token_bytes(tokenizer, ids[0], text))
    return documents, first_target, num_bytes


def first_token_bytes(tokenizer: Tokenizer, token: int, text: str) -> int:
    """Return the number of UTF-8 bytes of a text's first token.

    A byte-level token may be part of a character, which does not decode to text. Each symbol of its name is then one
    byte.
    """
    decoded = tokenizer.decode([token], skip_special_tokens=False)
    name = tokenizer.id_to_token(token) or ""
    if not text.startswith(decoded) and set(name) <= set(bytes_to_unicode().values()):
        return len(name)
    return len(decoded.encode())


def sliding_windows(document: int, num_tokens: int, first_target: int, context: int, stride: int) -> Iterator[Window]:
    """Yield the windows over a document of `num_tokens` tokens. The token at `first_target` is the first scored one."""
    start = 0
    while first_target < num_tokens:
        end = min(start + context, num_tokens - 1)
        if end >= first_target:
            yield Window(document, start, end, first_target)
            first_target = end + 1
        start += stride


def _score_windows(model: DecoderOnly, documents: list[TokenIds], windows: list[Window]) -> EvalResult:
    """Return the summed loss and the calibration of the tokens that these windows score."""
    tokens, padding_mask = pad_rows([documents[w.document][w.start : w.end] for w in windows], model.device)
    x = model.hidden_states(tokens, padding_mask)  # (B, T, d)
    # The token at position i is predicted from the hidden state at i − 1.
    scored = [x[row, w.first_target - 1 - w.start : w.end - w.start] for row, w in enumerate(windows)]
    ids = np.concatenate([documents[w.document][w.first_target : w.end + 1] for w in windows]).astype(np.int64)
    targets = torch.from_numpy(ids).to(x.device)
    return sum_token_losses(model.lm_head, torch.cat(scored), targets, model.config.vocab_size)
