"""Difference between one forward pass and token-by-token decoding with a KV cache.

Both compute the same logits up to rounding, which is why training can process all positions in parallel.
"""

import torch

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.inputs import TextOrTokens, prepare_inputs, upcast_float32
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.model import EncoderDecoder, EncoderOnly


def cached_decoding_error(
    model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None
) -> LabeledTensor:
    """Largest logit difference, per token, between one forward pass and decoding with a KV cache."""
    inputs = prepare_inputs(model, tokens, source)
    if isinstance(inputs.model, EncoderOnly):
        raise InputError("an encoder cannot decode token by token; pass a decoder or an encoder-decoder")
    cache = inputs.model.new_cache(1, inputs.tokens.shape[1])
    errors, logits = [], inputs.logits()  # (T, V)
    with inputs.eval_mode():
        for position in range(inputs.tokens.shape[1]):
            token = inputs.tokens[:, position : position + 1]
            source = inputs.source if position == 0 else None  # later steps use the cross-attention cache
            args = (source, token) if isinstance(inputs.model, EncoderDecoder) else (token,)
            step_logits = upcast_float32(inputs.model(*args, cache=cache))[0, -1]
            errors.append((step_logits - logits[position]).abs().max())
    title = "decoding with a KV cache against one forward pass"
    note = f"the largest logit is {float(logits.abs().max()):.3g}"
    return LabeledTensor(title, torch.stack(errors), ("token",), (inputs.token_labels,), "largest difference", note)
