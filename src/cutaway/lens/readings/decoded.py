"""The logit lens: what a model would say if it stopped after each block."""

from typing import Any, Literal

import numpy as np
import torch

from cutaway.errors import InputError
from cutaway.lens.readings.reading import Reading, shown
from cutaway.lens.readings.subject import Text, Token, resting, subject, wide
from cutaway.lens.trace import trace

Unit = Literal["probability", "logit", "rank"]
"""What is told of a token; the rank of the likeliest is 1."""


def logit_lens(
    model: Any, tokens: Text, of: Token | None = None, *, unit: Unit = "probability", source: Text | None = None
) -> Reading:
    """The stream after each block, read by the final norm and the head as if it were the last.

    Shows the likeliest token and its probability; with a token named, what becomes of that one.
    """
    if unit not in ("probability", "logit", "rank"):
        raise InputError(f"unit is {unit!r}; use 'probability', 'logit' or 'rank'")
    if of is None and unit == "rank":
        raise InputError("the likeliest token's rank is always 1; name the token whose rank is asked for")
    this = subject(model, tokens, source)
    head, stack = this.need_head(), this.stack
    chosen = None if of is None else this.token(of, "the token to follow")
    names = [f"{this.prefix}embed", *(f"{this.prefix}blocks.{at}.resid_post" for at in range(len(stack.blocks)))]
    rows, ids = [], []
    with resting(this.model), trace(this.model, *names) as t:
        this.run()
    with resting(this.model):
        for name in names:
            logits = wide(head(stack.final_norm(t[name].as_subclass(torch.Tensor)))[0])
            best = logits.argmax(-1)
            ids.append(best.tolist())
            asked = best if chosen is None else torch.full_like(best, chosen)
            mine = logits.gather(-1, asked[:, None])
            if unit == "rank":
                rows.append(1 + (logits > mine).sum(-1))
            else:
                rows.append(
                    (mine - logits.logsumexp(-1, keepdim=True)).exp()[:, 0] if unit == "probability" else mine[:, 0]
                )
    labels = ("embed", *(str(layer) for layer in range(len(stack.blocks))))
    texts = np.array([this.texts(row) for row in ids], dtype=object)
    title = (
        "the likeliest token after each block"
        if chosen is None
        else f"'{shown(this.texts([chosen])[0])}' after each block"
    )
    return Reading(title, torch.stack(rows), ("layer", "token"), (labels, this.words), unit, texts=texts)
