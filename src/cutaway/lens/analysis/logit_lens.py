"""The logit lens: what a model would say if it stopped after each block."""

from typing import Any, Literal

import numpy as np
import torch

from cutaway.errors import InputError
from cutaway.lens.analysis.inputs import TextOrTokens, TokenOrId, eval_mode, prepare_inputs, upcast_float32
from cutaway.lens.analysis.labeled_tensor import LabeledTensor, show_whitespace
from cutaway.lens.trace import trace

LogitLensUnit = Literal["probability", "logit", "rank"]
"""What is told of a token; the rank of the likeliest is 1."""


def logit_lens(
    model: Any,
    tokens: TextOrTokens,
    token: TokenOrId | None = None,
    *,
    unit: LogitLensUnit = "probability",
    source: TextOrTokens | None = None,
) -> LabeledTensor:
    """The stream after each block, read by the final norm and the head as if it were the last.

    Shows the likeliest token and its probability; with a token named, what becomes of that one.
    """
    if unit not in ("probability", "logit", "rank"):
        raise InputError(f"unit is {unit!r}; use 'probability', 'logit' or 'rank'")
    if token is None and unit == "rank":
        raise InputError("the likeliest token's rank is always 1; name the token whose rank is asked for")
    this = prepare_inputs(model, tokens, source)
    head, stack = this.require_head(), this.stack
    chosen = None if token is None else this.resolve_token(token, "the token to follow")
    names = [
        f"{this.site_prefix}embed",
        *(f"{this.site_prefix}blocks.{at}.resid_post" for at in range(len(stack.blocks))),
    ]
    rows, ids = [], []
    with eval_mode(this.model), trace(this.model, *names) as t:
        this.run()
    with eval_mode(this.model):
        for name in names:
            logits = upcast_float32(head(stack.final_norm(t[name].as_subclass(torch.Tensor)))[0])
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
    texts = np.array([this.decode_tokens(row) for row in ids], dtype=object)
    title = (
        "the likeliest token after each block"
        if chosen is None
        else f"'{show_whitespace(this.decode_tokens([chosen])[0])}' after each block"
    )
    return LabeledTensor(
        title, torch.stack(rows), ("layer", "token"), (labels, this.token_labels), unit, annotations=texts
    )
