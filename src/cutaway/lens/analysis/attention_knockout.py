"""Attention knockout: effect of the attention from one position to each token on the prediction at that position.

The attention weights from the position to one token are set to zero in all blocks and heads, and the other weights of
the position are scaled so that their sum stays the same (Geva et al. 2023, arXiv:2304.14767). The position itself and
the information that other positions have already taken from the token are not affected.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike, sites
from cutaway.lens.analysis.component_effects import expand_batch
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, TokenOrId, prepare_inputs
from cutaway.lens.analysis.patched_logits import can_resume_at_token
from cutaway.lens.analysis.patching import track_progress
from cutaway.lens.edit import TensorFn, edit
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.lens.sites import select_sites
from cutaway.model.cache import Cache

KNOCKOUT_METRICS = ("log probability", "probability", "top-1 changes")
_MAX_BATCH_SIZE, _MAX_BATCH_PATTERN = 32, 2**22
"""Maximum number of knockouts per forward pass, each in one batch row, and of their attention weights per head."""


def attention_knockout(
    model: ModelLike,
    tokens: TextOrTokens,
    answer_token: TokenOrId | None = None,
    *,
    position: int = -1,
    source: TextOrTokens | None = None,
    to_source: bool = False,
    progress: bool = True,
) -> LabeledTensor:
    """Effect of the attention from `position` to each token on the probability of the answer: token × metric.

    - `log probability`: change of the log-probability of the answer, in nats.
    - `probability`: probability of the answer without the attention to the token.
    - `top-1 changes`: 1 if the top-1 token is another one without the attention to the token, else 0.

    The default `answer_token` is the top-1 token at `position`. For an encoder-decoder, `to_source` knocks out the
    cross-attention to each token of `source` instead. Tokens that are masked at `position` have no effect.
    """
    inputs = prepare_inputs(model, tokens, source)
    inputs.require_head()
    if to_source and inputs.source is None:
        raise InputError("to_source is set, but the model has no cross-attention; leave to_source out")
    position = inputs.resolve_position(position)
    clean = inputs.logits()[position]
    answer = int(clean.argmax()) if answer_token is None else inputs.resolve_token(answer_token, "answer_token")
    logits = knocked_out_logits(inputs, position, to_source=to_source, progress=progress)
    log_probs = logits.log_softmax(-1)[:, answer]
    values = torch.stack(
        (
            log_probs - clean.log_softmax(-1)[answer],
            log_probs.exp(),
            (logits.argmax(-1) != clean.argmax()).to(log_probs),
        ),
        -1,
    )
    answer_text, *_ = inputs.decode_tokens([answer])
    keys = inputs.source if to_source else inputs.tokens
    assert keys is not None
    labels = inputs.decode_tokens(keys[0].tolist())
    title = f"attention knockout: effect on '{answer_text}' at position {position}"
    note = f"the probability is {float(clean.softmax(-1)[answer]):.3f} without a knockout"
    return LabeledTensor(title, values, ("token", "metric"), (labels, KNOCKOUT_METRICS), note=note)


def knocked_out_logits(
    inputs: AnalysisInputs,
    position: int,
    *,
    to_source: bool,
    progress: bool,
    use_cache: bool = True,
    key_sets: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """(sets, V): logits at the position, without the attention from it to all tokens of each set in `key_sets`.

    By default each token is a set of its own, so that the shape is (tokens, V).
    """
    sublayer, keys = ("cross", inputs.source) if to_source else ("attn", inputs.tokens)
    assert keys is not None
    selected = select_sites(sites(inputs.model), [f"{inputs.site_prefix}blocks.*.{sublayer}.pattern"])
    names = [site.name for site in selected]
    num_keys, cache = keys.shape[1], _fill_cache(inputs, position) if use_cache else None
    sets = [[key] for key in range(num_keys)] if key_sets is None else key_sets
    if cache is not None and not to_source:
        num_keys = position + 1  # later tokens are masked: their knockout has no effect
    visible = [[key for key in keys_of_set if key < num_keys] for keys_of_set in sets]
    measured = [index for index, keys_of_set in enumerate(visible) if keys_of_set]
    query = position if cache is None else 0
    num_queries = inputs.tokens.shape[1] if cache is None else 1
    size = max(1, min(_MAX_BATCH_SIZE, _MAX_BATCH_PATTERN // (num_queries * num_keys)))
    results: dict[int, Tensor] = {}
    for start in track_progress(list(range(0, len(measured), size)), progress, "knocking out attention"):
        batch = measured[start : start + size]
        remove = _remove_weights(query, [visible[index] for index in batch])
        with inputs.eval_mode(), edit(inputs.model, dict.fromkeys(names, remove)):
            if cache is None:
                logits = expand_batch(inputs, len(batch)).logits_at(position)
            else:
                logits = _decode(inputs, position, cache, len(batch))
        results |= dict(zip(batch, logits, strict=True))
    if len(measured) < len(sets):
        clean = inputs.logits_at(position)[0]
        results |= {index: clean for index in range(len(sets)) if index not in results}
    return torch.stack([results[index] for index in range(len(sets))])


def _fill_cache(inputs: AnalysisInputs, position: int) -> Cache | None:
    """Return a KV cache of the tokens before the position; None if the whole text has to be run for each knockout.

    In a causal decoder, a knockout at the position changes the residual stream of this position only.
    """
    model = inputs.cutaway_model
    if model is None or not position or not can_resume_at_token(inputs):
        return None
    cache = model.new_cache(1, position + 1)
    replace(inputs, tokens=inputs.tokens[:, :position]).logits_at(-1, cache)
    return cache


def _decode(inputs: AnalysisInputs, position: int, cache: Cache, batch_size: int) -> Tensor:
    """(B, V): logits at the position in each batch row, with the keys and values of the tokens before it."""
    cache = deepcopy(cache)
    cache.select_rows(torch.zeros(batch_size, dtype=torch.long, device=cache.seq_lens.device))
    tokens = inputs.tokens[:, position : position + 1].expand(batch_size, 1)
    return replace(inputs, tokens=tokens, source=None).logits_at(0, cache)


def _remove_weights(query: int, key_sets: Sequence[Sequence[int]]) -> TensorFn:
    """Return an edit that, in batch row r, moves the weights of the query on the keys `key_sets[r]` to its others."""
    rows = [row for row, keys in enumerate(key_sets) for _ in keys]
    columns = [key for keys in key_sets for key in keys]

    def remove(pattern: Tensor) -> Tensor:  # (B, H, T, S)
        weights = pattern[:, :, query].clone()  # (B, H, S)
        total = weights.sum(-1, keepdim=True)
        device = pattern.device
        weights[torch.tensor(rows, device=device), :, torch.tensor(columns, device=device)] = 0
        pattern[:, :, query] = weights * (total / weights.sum(-1, keepdim=True).clamp(min=1e-9))
        return pattern

    return remove
