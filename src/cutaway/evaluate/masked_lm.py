"""Masked language model evaluation: loss and accuracy of an encoder on masked tokens."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from cutaway.argument_checks import check_seed
from cutaway.errors import InputError
from cutaway.evaluate.results import EvalResult, MaskedLMResult
from cutaway.evaluate.token_loss import (
    ProgressFn,
    check_texts,
    check_token_ids,
    pad_rows,
    require_tokenizer,
    resolve_context,
    score_batches,
    special_prefix_and_suffix,
    sum_token_losses,
)
from cutaway.generate.generation_config import CheckpointLike, unpack_checkpoint
from cutaway.generate.sampling.rng import uniform
from cutaway.model import EncoderOnly
from cutaway.tokenizer import Tokenizer

DEFAULT_MLM_PROBABILITY = 0.15
"""Fraction of tokens that are masked, as in BERT (2018)."""
_MaskedChunk = tuple[list[int], list[int]]
"""Token ids of a chunk with special tokens, and the positions to mask."""


def evaluate_masked_lm(
    checkpoint: CheckpointLike,
    texts: Iterable[str],
    *,
    mlm_probability: float = DEFAULT_MLM_PROBABILITY,
    seed: int = 0,
    context: int | None = None,
    batch_size: int | None = None,
    progress: ProgressFn | None = None,
) -> MaskedLMResult:
    """Evaluate an encoder on masked tokens.

    Texts longer than the context are split into chunks, each with special tokens. In each chunk, the fraction
    `mlm_probability` of the tokens is replaced by the mask token. Which tokens are masked depends on the seed, the
    index of the text and the position in the text.
    """
    model, tokenizer, _ = unpack_checkpoint(checkpoint)
    if not isinstance(model, EncoderOnly) or not model.has_lm_head:
        raise InputError("this model has no masked language modeling head; load an encoder with one (BertForMaskedLM)")
    tokenizer = require_tokenizer(tokenizer)
    mask_token_id = tokenizer.mask_token_id
    if mask_token_id is None:
        raise InputError("this tokenizer has no mask token, so no token can be masked; set mask_token in its config")
    is_number = isinstance(mlm_probability, float | int) and not isinstance(mlm_probability, bool)
    if not is_number or not 0 < mlm_probability <= 1:
        raise InputError(f"mlm_probability is {mlm_probability!r:.40}; pass the fraction of masked tokens, in (0, 1]")
    check_seed(seed)
    context = resolve_context(model, context)
    chunks: list[_MaskedChunk] = []
    num_documents = 0
    for index, text in enumerate(check_texts(texts)):
        text_chunks = list(_mask_chunks(tokenizer, text, context, mlm_probability, seed, index))
        chunks += text_chunks
        num_documents += bool(text_chunks)
    if not chunks:
        raise InputError("there is no token to mask; pass texts with at least one token")
    check_token_ids(max(max(ids) for ids, _ in chunks), model.config.vocab_size)
    score = partial(_score_chunks, model, mask_token_id)
    total = score_batches(model, chunks, lambda chunk: len(chunk[0]), score, batch_size, progress)
    num_correct = sum(total.calibration.bin_correct)
    return MaskedLMResult(**vars(total), num_correct=num_correct, num_documents=num_documents, context=context)


def _score_chunks(model: EncoderOnly, mask_token_id: int, chunks: list[_MaskedChunk]) -> EvalResult:
    """Return the summed loss and the calibration of the masked tokens of these chunks."""
    tokens, padding_mask = pad_rows([ids for ids, _ in chunks], model.device)
    rows = torch.tensor([row for row, (_, masked) in enumerate(chunks) for _ in masked], device=tokens.device)
    positions = torch.tensor([position for _, masked in chunks for position in masked], device=tokens.device)
    targets = tokens[rows, positions]
    tokens[rows, positions] = mask_token_id
    x = model.encode(tokens, padding_mask)[rows, positions]  # (N, d)
    return sum_token_losses(model.lm_head, x, targets, model.config.vocab_size)


def _mask_chunks(
    tokenizer: Tokenizer, text: str, context: int, mlm_probability: float, seed: int, document_index: int
) -> Iterator[_MaskedChunk]:
    """Split a text into chunks that fit the context. At least one token per chunk is masked, but no special tokens."""
    prefix, suffix = special_prefix_and_suffix(tokenizer)
    chunk_len = context - len(prefix) - len(suffix)
    if chunk_len < 1:
        raise InputError(f"context is {context}, which the special tokens fill completely; pass a larger context")
    ids = tokenizer.encode(text, add_special_tokens=False)
    noise = uniform(torch.full((len(ids),), seed), torch.arange(len(ids)), stream=document_index).tolist()
    for start in range(0, len(ids), chunk_len):
        chunk = ids[start : start + chunk_len]
        candidates = [position for position, token in enumerate(chunk) if token not in tokenizer.all_special_ids]
        candidates.sort(key=lambda position: noise[start + position])
        num_masked = max(1, round(mlm_probability * len(candidates)))
        masked = sorted(len(prefix) + position for position in candidates[:num_masked])
        if masked:
            yield [*prefix, *chunk, *suffix], masked
