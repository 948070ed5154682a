"""What an encoder would put in the place of each mask in a text."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cutaway.errors import InputError, WeightError
from cutaway.generate.engine.model_runner import eval_mode
from cutaway.model import EncoderOnly, Transformer
from cutaway.model.inputs import check_positive_int
from cutaway.tokenizer import Tokenizer

BATCH_SIZE = 32
"""Texts that are read side by side, those of like length together."""


class FillMaskPrediction(NamedTuple):
    """One proposal for one mask: the token as text, its id and probability, and the text with it in place."""

    token: str
    id: int
    probability: float
    text: str


def fill_mask(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], *, top_k: int = 5
) -> list[list[list[FillMaskPrediction]]]:
    """For each text and each mask in it, the `top_k` likeliest tokens, the likeliest first. Other masks stay masks."""
    if not isinstance(model, EncoderOnly) or model.head is None:
        raise InputError("this model has no head for masks; load an encoder with one, such as a BertForMaskedLM's")
    if isinstance(texts, str):
        raise InputError("fill_mask takes several texts; put a single one into a list")
    check_positive_int("top_k", top_k)
    if top_k > model.config.vocab_size:
        raise InputError(f"top_k is {top_k}, but the vocabulary has {model.config.vocab_size} tokens; ask for fewer")
    mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise InputError("this tokenizer has no mask token, so no place can be marked; name one in mask_token")
    rows = tokenizer.encode_batch(texts)
    for number, row in enumerate(rows):
        if mask_id not in row:
            mask = tokenizer.special_tokens_map["mask_token"]
            raise InputError(f"text {number} has no mask; write {mask} where a word is to be found")
    filled: list[list[list[FillMaskPrediction]]] = [[] for _ in rows]
    by_length = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    for first in range(0, len(rows), BATCH_SIZE):
        numbers = by_length[first : first + BATCH_SIZE]
        probability, ids = _predict_masks(model, [rows[number] for number in numbers], mask_id, top_k)
        places = [(number, at) for number in numbers for at, token in enumerate(rows[number]) if token == mask_id]
        for (number, at), shares, chosen in zip(places, probability.tolist(), ids.tolist(), strict=True):
            pairs = zip(chosen, shares, strict=True)
            filled[number].append(
                [_build_prediction(tokenizer, rows[number], at, token, share) for token, share in pairs]
            )
    return filled


def _predict_masks(model: EncoderOnly, sequences: list[list[int]], mask_id: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Probabilities and ids of the likeliest tokens at each mask, row by row."""
    assert model.head is not None
    width = max(map(len, sequences))
    tokens = torch.tensor([row + [mask_id] * (width - len(row)) for row in sequences], device=model.device)
    real = torch.tensor([[place < len(row) for place in range(width)] for row in sequences], device=model.device)
    with torch.no_grad(), eval_mode(model):
        x = model.encode(tokens, None if bool(real.all()) else real)
        logits = model.head(x[real & (tokens == mask_id)])  # the head is large: only where it is asked
    best = logits.float().softmax(-1).topk(top_k)
    if bool(best.values.isnan().any()):
        raise WeightError("the logits are not numbers; the weights are damaged, or too large for their dtype")
    return best.values, best.indices


def _build_prediction(
    tokenizer: Tokenizer, sequence: list[int], position: int, token: int, probability: float
) -> FillMaskPrediction:
    """Special tokens are left out of the text, but not the other masks, nor this one if it was chosen."""
    kept = [
        token if place == position else other
        for place, other in enumerate(sequence)
        if place == position or other == tokenizer.mask_token_id or other not in tokenizer.decode_skip_ids
    ]
    text = tokenizer.decode(kept, skip_special_tokens=False)
    return FillMaskPrediction(tokenizer.decode([token], skip_special_tokens=False), token, probability, text)
