"""Reading a text at once and token by token: the same numbers, which is why training can be parallel."""

from typing import Any

import torch

from cutaway.errors import InputError
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Text, resting, subject, wide
from cutaway.model import EncoderDecoder, EncoderOnly


def step_by_step(model: Any, tokens: Text, *, source: Text | None = None) -> Reading:
    """The largest difference between a token's logits in one pass and in a step of its own with a cache."""
    this = subject(model, tokens, source)
    if isinstance(this.model, EncoderOnly):
        raise InputError("an encoder reads a text at once or not at all: each token sees what comes later")
    cache = this.model.new_cache(1, this.tokens.shape[1])
    apart = []
    with resting(this.model):
        whole = wide(this.run())[0]
        for at in range(this.tokens.shape[1]):
            token, first = this.tokens[:, at : at + 1], this.source if at == 0 else None
            given = (first, token) if isinstance(this.model, EncoderDecoder) else (token,)
            apart.append((wide(this.model(*given, cache=cache))[0, -1] - whole[at]).abs().max())
    note = f"the largest logit is {float(whole.abs().max()):.3g}"
    return Reading(
        "at once against token by token", torch.stack(apart), ("token",), (this.words,), "largest difference", note
    )
