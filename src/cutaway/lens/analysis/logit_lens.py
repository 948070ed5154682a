"""Logit lens: predictions from the residual stream after each block."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.inputs import TextOrTokens, TokenOrId, prepare_inputs, upcast_float32
from cutaway.lens.labeled_tensor import LabeledTensor, show_whitespace

LogitLensUnit = Literal["probability", "logit", "rank"]
"""Quantity reported for a token. The most likely token has rank 1."""


def logit_lens(
    model: ModelLike,
    tokens: TextOrTokens,
    token: TokenOrId | None = None,
    *,
    unit: LogitLensUnit = "probability",
    source: TextOrTokens | None = None,
) -> LabeledTensor:
    """Apply the final norm and the head to the residual stream after the embedding and each block: layer × token.

    Reports the most likely token and its probability, or the probability, logit or rank of `token`.
    """
    if unit not in ("probability", "logit", "rank"):
        raise InputError(f"unit is {unit!r}; use 'probability', 'logit' or 'rank'")
    if token is None and unit == "rank":
        raise InputError("unit is 'rank', but the most likely token always has rank 1; pass the token to rank")
    inputs = prepare_inputs(model, tokens, source)
    head, stack = inputs.require_known_head(), inputs.stack
    token_id = None if token is None else inputs.resolve_token(token, "token")
    rows, ids = [], []
    t = inputs.trace(*inputs.resid_sites.values())
    with torch.no_grad():
        for name in inputs.resid_sites.values():
            logits = upcast_float32(head(stack.final_norm(t[name].as_subclass(Tensor)))[0])
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
    texts = np.array([inputs.decode_tokens(row) for row in ids], dtype=object)
    reported_text = "most likely token"
    if token_id is not None:
        reported_text = f"'{show_whitespace(inputs.decode_tokens([token_id])[0])}'"
    title, labels = f"logit lens: {reported_text} after each block", (tuple(inputs.resid_sites), inputs.token_labels)
    return LabeledTensor(title, torch.stack(rows), ("layer", "token"), labels, unit, annotations=texts)
