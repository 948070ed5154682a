"""Difference between one forward pass and token-by-token decoding with a KV cache.

Both compute the same logits up to rounding, which is why training can process all positions in parallel.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike
from cutaway.lens.adapters.described_model import find_output
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, prepare_inputs, upcast_float32
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.model import EncoderDecoder, EncoderOnly


def cached_decoding_error(
    model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None
) -> LabeledTensor:
    """Largest logit difference, per token, between one forward pass and decoding with a KV cache."""
    inputs = prepare_inputs(model, tokens, source)
    if isinstance(inputs.structure, EncoderOnly):
        raise InputError("an encoder cannot decode token by token; pass a decoder or an encoder-decoder")
    logits = inputs.logits()  # (T, V)
    with inputs.eval_mode():
        decode = _decode if inputs.cutaway_model is not None else _decode_transformers
        errors = [(step - row).abs().max() for step, row in zip(decode(inputs), logits, strict=True)]
    title = "decoding with a KV cache against one forward pass"
    note = f"the largest logit is {float(logits.abs().max()):.3g}"
    return LabeledTensor(title, torch.stack(errors), ("token",), (inputs.token_labels,), "largest difference", note)


def _decode(inputs: AnalysisInputs) -> Iterator[Tensor]:
    """Yield the logits (V,) at each position, from decoding one token at a time."""
    model = inputs.cutaway_model
    assert model is not None
    cache = model.new_cache(1, inputs.tokens.shape[1])
    for position in range(inputs.tokens.shape[1]):
        token = inputs.tokens[:, position : position + 1]
        source = inputs.source if position == 0 else None  # later steps use the cross-attention cache
        args = (source, token) if isinstance(model, EncoderDecoder) else (token,)
        yield upcast_float32(model(*args, cache=cache))[0, -1]


def _decode_transformers(inputs: AnalysisInputs) -> Iterator[Tensor]:
    """The same with the KV cache of a transformers model."""
    if not hasattr(inputs.module, "config"):
        name = type(inputs.module).__name__
        raise InputError(f"the KV cache of a {name} is not known; pass a cutaway or transformers model")
    cache, encoded = None, None
    for position in range(inputs.tokens.shape[1]):
        token = inputs.tokens[:, position : position + 1]
        call: dict[str, object] = {"input_ids": token} if inputs.source is None else {"decoder_input_ids": token}
        if inputs.source is not None:
            call |= {"input_ids": inputs.source} if encoded is None else {"encoder_outputs": encoded}
        output = inputs.module(**call, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        if inputs.source is not None and encoded is None:
            encoded = (output.encoder_last_hidden_state,)
        yield upcast_float32(find_output(output))[0, -1]
