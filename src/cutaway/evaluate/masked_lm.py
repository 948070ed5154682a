"""How well an encoder tells tokens that are hidden behind masks."""

from collections.abc import Iterable, Iterator

import torch

from cutaway.errors import InputError
from cutaway.evaluate.results import MaskedLMResult
from cutaway.evaluate.token_loss import (
    ProgressFn,
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
from cutaway.generate.sampling.rng import uniform
from cutaway.model import EncoderOnly
from cutaway.model.inputs import check_seed
from cutaway.tokenizer import Tokenizer

DEFAULT_MLM_PROBABILITY = 0.15
"""The share of tokens that is hidden, as in BERT's training (2018)."""
MaskedChunk = tuple[list[int], list[int]]
"""Ids with their special tokens around them, and the places that are hidden."""


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
    """How well an encoder tells the share `mlm_probability` of each piece's tokens, all hidden behind the mask token.

    Longer texts than the context are cut into pieces, each with its special tokens. Which tokens are hidden is a
    function of the seed, the text's number and the place in it.
    """
    model, found, _ = unpack_checkpoint(checkpoint)
    if not isinstance(model, EncoderOnly) or model.head is None:
        raise InputError("this model has no head for masks; load an encoder with one, such as a BertForMaskedLM's")
    tokenizer = require_tokenizer(found)
    mask = tokenizer.mask_token_id
    if mask is None:
        raise InputError("this tokenizer has no mask token, so nothing can be hidden; name one in mask_token")
    if (
        isinstance(mlm_probability, bool)
        or not isinstance(mlm_probability, float | int)
        or not 0 < mlm_probability <= 1
    ):
        raise InputError(
            f"mlm_probability is {mlm_probability!r:.40}; it is the share of hidden tokens, so give more than 0 and at "
            "most 1"
        )
    check_seed(seed)
    context = resolve_context(model, context)
    batch_size = batch_size if batch_size is None else resolve_positive_int("batch_size", batch_size, 1, None, "")
    every: list[MaskedChunk] = []
    documents = 0
    for number, text in enumerate(check_texts(texts)):
        own = list(_mask_chunks(tokenizer, text, context, mlm_probability, seed, number))
        every += own
        documents += bool(own)
    if not every:
        raise InputError("there is no token to hide; give texts with at least one")
    check_token_ids(max(max(ids) for ids, _ in every), model.config.vocab_size)
    parts, done = [], 0
    with evaluation_mode(model):
        for part in batch_by_length(every, lambda piece: len(piece[0]), batch_size, model.device):
            tokens, real = pad_rows([ids for ids, _ in part], model.device)
            rows = torch.tensor([row for row, (_, hidden) in enumerate(part) for _ in hidden], device=tokens.device)
            places = torch.tensor([place for _, hidden in part for place in hidden], device=tokens.device)
            targets = tokens[rows, places]
            tokens[rows, places] = mask
            wanted = model.encode(tokens, real)[rows, places]
            parts.append(sum_token_losses(model.head, wanted, targets, model.config.vocab_size))
            done += len(part)
            if progress is not None:
                progress(done, len(every))
    told, count = combine_loss_sums(parts), sum(len(hidden) for _, hidden in every)
    return MaskedLMResult(told.total_nll, count, told.calibration, told.num_correct, documents, context)


def _mask_chunks(
    tokenizer: Tokenizer, text: str, context: int, mlm_probability: float, seed: int, document_index: int
) -> Iterator[MaskedChunk]:
    """A text in parts that fit, and of each at least one token hidden; special tokens are never."""
    before, after = special_prefix_and_suffix(tokenizer)
    room = context - len(before) - len(after)
    if room < 1:
        raise InputError(f"context is {context}, which the special tokens fill; give more")
    ids = tokenizer.encode(text, add_special_tokens=False)
    noise = uniform(torch.full((len(ids),), seed), torch.arange(len(ids)), stream=document_index).tolist()
    for start in range(0, len(ids), room):
        part = ids[start : start + room]
        plain = [place for place, token in enumerate(part) if token not in tokenizer.all_special_ids]
        plain.sort(key=lambda place: noise[start + place])
        hidden = sorted(len(before) + place for place in plain[: max(1, round(mlm_probability * len(plain)))])
        if hidden:
            yield [*before, *part, *after], hidden
