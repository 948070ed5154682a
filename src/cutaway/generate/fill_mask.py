"""Fill-mask: predictions of a masked language model for each mask token in a text."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cutaway.argument_checks import check_positive_int
from cutaway.errors import InputError, WeightError
from cutaway.eval_mode import eval_mode
from cutaway.model import EncoderOnly, Transformer
from cutaway.tokenizer import Tokenizer

BATCH_SIZE = 32
"""Number of texts per batch. Texts are sorted by length to reduce padding."""


class FillMaskPrediction(NamedTuple):
    """One prediction for one mask: the token, its id and probability, and the text with the mask replaced."""

    token: str
    id: int
    probability: float
    text: str


def fill_mask(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], *, top_k: int = 5
) -> list[list[list[FillMaskPrediction]]]:
    """Predict the `top_k` most likely tokens for each mask of each text, while the other masks stay masked.

    Returns predictions[text index][mask index], most likely first."""
    if not isinstance(model, EncoderOnly) or not model.has_lm_head:
        raise InputError("this model has no masked-LM head; load an encoder with one, such as BertForMaskedLM")
    if isinstance(texts, str):
        raise InputError("texts is a string; pass a list of texts")
    check_positive_int("top_k", top_k)
    vocab_size = model.config.vocab_size
    if top_k > vocab_size:
        raise InputError(f"top_k is {top_k}, but the vocabulary has {vocab_size} tokens; pass a smaller top_k")
    mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise InputError("this tokenizer has no mask token; set mask_token in its special tokens")
    rows = tokenizer.encode_batch(texts)
    for i, row in enumerate(rows):
        if mask_id not in row:
            mask = tokenizer.special_tokens_map["mask_token"]
            raise InputError(f"text {i} has no mask token; write {mask} at the position to predict")
    predictions: list[list[list[FillMaskPrediction]]] = [[] for _ in rows]
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(rows), BATCH_SIZE):
        batch = by_length[start : start + BATCH_SIZE]
        probability, ids = _predict_masks(model, [rows[i] for i in batch], mask_id, top_k)
        masks = [(i, position) for i in batch for position, token in enumerate(rows[i]) if token == mask_id]
        for (i, position), probs, token_ids in zip(masks, probability.tolist(), ids.tolist(), strict=True):
            pairs = zip(token_ids, probs, strict=True)
            predictions[i].append(
                [_build_prediction(tokenizer, rows[i], position, token, prob) for token, prob in pairs]
            )
    return predictions


def _predict_masks(model: EncoderOnly, sequences: list[list[int]], mask_id: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Return probabilities and ids of the most likely tokens at each mask, both (masks, top_k).

    The masks are ordered by sequence, then by position."""
    max_len = max(map(len, sequences))
    tokens = torch.tensor([row + [mask_id] * (max_len - len(row)) for row in sequences], device=model.device)
    lengths = torch.tensor([len(row) for row in sequences], device=model.device)
    mask = torch.arange(max_len, device=model.device) < lengths.unsqueeze(-1)
    with torch.no_grad(), eval_mode(model):
        x = model.encode(tokens, None if bool(mask.all()) else mask)
        logits = model.lm_head(x[mask & (tokens == mask_id)])  # logits at the masks only: (masks, vocab_size)
    best = logits.float().softmax(-1).topk(top_k)
    if bool(best.values.isnan().any()):
        raise WeightError("the logits contain NaN; the weights are corrupt, or overflow their dtype: try float32")
    return best.values, best.indices


def _build_prediction(
    tokenizer: Tokenizer, sequence: list[int], position: int, token: int, probability: float
) -> FillMaskPrediction:
    """Build a prediction. Its text has no special tokens except the other masks and the predicted token."""
    ids = [
        token if i == position else other
        for i, other in enumerate(sequence)
        if i == position or other == tokenizer.mask_token_id or other not in tokenizer.decode_skip_ids
    ]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return FillMaskPrediction(tokenizer.decode([token], skip_special_tokens=False), token, probability, text)
