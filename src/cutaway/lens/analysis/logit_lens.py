"""Logit lens: predictions from the residual stream after each block."""

from typing import Any, Literal

import numpy as np
import torch

from cutaway.errors import InputError
from cutaway.lens.analysis.inputs import TextOrTokens, TokenOrId, eval_mode, prepare_inputs, upcast_float32
from cutaway.lens.analysis.labeled_tensor import LabeledTensor, show_whitespace
from cutaway.lens.trace import trace

LogitLensUnit = Literal["probability", "logit", "rank"]
"""Quantity reported for a token; the most likely token has rank 1."""


def logit_lens(
    model: Any,
    tokens: TextOrTokens,
    token: TokenOrId | None = None,
    *,
    unit: LogitLensUnit = "probability",
    source: TextOrTokens | None = None,
) -> LabeledTensor:
    """Apply the final norm and the head to the residual stream after each block: layer × token.

    Reports the most likely token and its probability, or the probability, logit or rank of `token`.
    """
    if unit not in ("probability", "logit", "rank"):
        raise InputError(f"unit is {unit!r}; use 'probability', 'logit' or 'rank'")
    if token is None and unit == "rank":
        raise InputError(
            "unit is 'rank', but token is None, and the most likely token always has rank 1; pass the token to rank"
        )
    inputs = prepare_inputs(model, tokens, source)
    head, stack = inputs.require_head(), inputs.stack
    token_id = None if token is None else inputs.resolve_token(token, "token")
    names = [
        f"{inputs.site_prefix}embed",
        *(f"{inputs.site_prefix}blocks.{layer}.resid_post" for layer in range(len(stack.blocks))),
    ]
    rows, ids = [], []
    with eval_mode(inputs.model), trace(inputs.model, *names) as t:
        inputs.run()
    with eval_mode(inputs.model):
        for name in names:
            logits = upcast_float32(head(stack.final_norm(t[name].as_subclass(torch.Tensor)))[0])
            top_ids = logits.argmax(-1)
            ids.append(top_ids.tolist())
            reported = top_ids if token_id is None else torch.full_like(top_ids, token_id)
            logit = logits.gather(-1, reported[:, None])  # (T, 1)
            if unit == "rank":
                rows.append(1 + (logits > logit).sum(-1))
            elif unit == "probability":
                rows.append((logit - logits.logsumexp(-1, keepdim=True)).exp()[:, 0])
            else:
                rows.append(logit[:, 0])
    labels = ("embed", *(str(layer) for layer in range(len(stack.blocks))))
    texts = np.array([inputs.decode_tokens(row) for row in ids], dtype=object)
    title = (
        "logit lens: most likely token after each block"
        if token_id is None
        else f"logit lens: '{show_whitespace(inputs.decode_tokens([token_id])[0])}' after each block"
    )
    return LabeledTensor(
        title, torch.stack(rows), ("layer", "token"), (labels, inputs.token_labels), unit, annotations=texts
    )
