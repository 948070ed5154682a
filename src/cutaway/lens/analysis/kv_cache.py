"""Reading a text at once and token by token: the same numbers, which is why training can be parallel."""

from typing import Any

import torch

from cutaway.errors import InputError
from cutaway.lens.analysis.inputs import TextOrTokens, eval_mode, prepare_inputs, upcast_float32
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.model import EncoderDecoder, EncoderOnly


def cached_decoding_error(model: Any, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """The largest difference between a token's logits in one pass and in a step of its own with a cache."""
    this = prepare_inputs(model, tokens, source)
    if isinstance(this.model, EncoderOnly):
        raise InputError("an encoder reads a text at once or not at all: each token sees what comes later")
    cache = this.model.new_cache(1, this.tokens.shape[1])
    apart = []
    with eval_mode(this.model):
        whole = upcast_float32(this.run())[0]
        for at in range(this.tokens.shape[1]):
            token, first = this.tokens[:, at : at + 1], this.source if at == 0 else None
            given = (first, token) if isinstance(this.model, EncoderDecoder) else (token,)
            apart.append((upcast_float32(this.model(*given, cache=cache))[0, -1] - whole[at]).abs().max())
    note = f"the largest logit is {float(whole.abs().max()):.3g}"
    return LabeledTensor(
        "at once against token by token",
        torch.stack(apart),
        ("token",),
        (this.token_labels,),
        "largest difference",
        note,
    )
