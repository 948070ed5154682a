"""Build the objective function of a recipe: from a batch to an Objective."""

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
"""Model form that each objective requires."""


def build_objective_fn(recipe: Recipe, tokenizer: Tokenizer, model: Transformer, device: torch.device) -> ObjectiveFn:
    """Build the function from a batch and its first position to the recipe's Objective, on `device`."""
    config = recipe.objective
    if isinstance(config, CausalLMConfig):
        use_document_ids = recipe.data.document_mask
        return lambda batch, first: causal_lm(batch.tokens, batch.document_ids if use_document_ids else None).to(device)
    if isinstance(config, Seq2SeqConfig):
        return lambda batch, first: seq2seq(*batch).to(device)
    if isinstance(config, PrefixLMConfig):
        return lambda batch, first: prefix_lm(
            batch.tokens, None, batch.prefix_lengths, mask=batch.mask, bidirectional=config.bidirectional_prefix
        ).to(device)
    mask_id = tokenizer.mask_token_id
    if mask_id is None:
        raise InputError(
            "objective.kind = 'masked-lm' needs a mask token, and the tokenizer has none; use a tokenizer with one"
        )
    special_ids = special_token_ids(tokenizer)

    def build_masked_lm(batch: Any, first: int) -> Objective:
        tokens = batch.tokens[:, :-1]  # the last token is the first of the next sequence
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

    return build_masked_lm


def special_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the BOS, EOS, padding and mask tokens that the tokenizer has."""
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id)
    return [token_id for token_id in ids if token_id is not None]
