"""From a recipe's objective to the function that makes an Objective of a batch."""

from typing import Any

import torch

from cutaway.errors import InputError
from cutaway.model import Transformer
from cutaway.tokenizer import Tokenizer
from cutaway.train.objectives.masking import masked_lm
from cutaway.train.objectives.objective import Objective, ObjectiveFn, causal_lm, prefix_lm, seq2seq
from cutaway.train.recipe.schema import CausalLMConfig, MaskedLMConfig, PrefixLMConfig, Recipe, Seq2SeqConfig

OBJECTIVE_FORMS = {
    CausalLMConfig: "decoder",
    MaskedLMConfig: "encoder",
    Seq2SeqConfig: "encoder-decoder",
    PrefixLMConfig: "decoder",
}
"""What each objective trains."""


def build_objective_fn(recipe: Recipe, tokenizer: Tokenizer, model: Transformer, device: torch.device) -> ObjectiveFn:
    """What the recipe's objective makes of a batch."""
    config = recipe.objective
    if isinstance(config, CausalLMConfig):
        packed = recipe.data.document_mask
        return lambda batch, first: causal_lm(batch.tokens, batch.document_ids if packed else None).to(device)
    if isinstance(config, Seq2SeqConfig):
        return lambda batch, first: seq2seq(*batch).to(device)
    if isinstance(config, PrefixLMConfig):
        return lambda batch, first: prefix_lm(
            batch.tokens, None, batch.prefix_lengths, mask=batch.mask, bidirectional=config.bidirectional_prefix
        ).to(device)
    mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise InputError(
            "objective masked-lm hides tokens behind a mask token, and this tokenizer has none; use another"
        )
    special_ids = special_token_ids(tokenizer)

    def masked(batch: Any, first: int) -> Objective:
        tokens = batch.tokens[:, :-1]  # the last is the next sequence's first
        return masked_lm(
            tokens,
            batch.document_ids[:, :-1] if recipe.data.document_mask else None,
            mask_id=mask_id,
            vocab_size=model.config.vocab_size,
            special_ids=special_ids,
            mlm_probability=config.mlm_probability,
            seed=recipe.training.seed,
            positions=range(first, first + len(batch.tokens)),
            span_masking=config.span_masking,
        ).to(device)

    return masked


def special_token_ids(tokenizer: Tokenizer) -> list[int]:
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id)
    return [number for number in named if number is not None]
