"""Attention heads: entropy of their patterns, and previous-token, duplicate-token, induction and first-token scores."""

from dataclasses import replace

import torch
from torch import Tensor

from cutaway.argument_checks import check_positive_int
from cutaway.errors import InputError
from cutaway.evaluate import functional
from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.inputs import (
    AnalysisInputs,
    TextOrTokens,
    inputs_without_text,
    prepare_inputs,
    upcast_float32,
)
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.model import EncoderDecoder, Transformer

HEAD_TYPES = ("previous_token", "duplicate_token", "induction", "first_token")
_DEFAULT_REPEAT_LEN = 32
"""Default number of random tokens that are repeated once."""


def attention_entropy(model: ModelLike, tokens: TextOrTokens, *, source: TextOrTokens | None = None) -> LabeledTensor:
    """Entropy of each head's attention pattern in bits, averaged over queries: layer × head.

    An entropy of 0 means that each query attends to a single token. The weight of an attention sink counts as one more
    token.
    """
    patterns = _attention_patterns(prepare_inputs(model, tokens, source))
    entropies = {name: pattern_entropy(pattern) for name, pattern in patterns.items()}
    return _build_result(entropies, "attention entropy", "bits")


def pattern_entropy(pattern: Tensor) -> Tensor:
    """Entropy of each head's attention in bits, averaged over batch and queries: (B, H, T, S) → (H,)."""
    return pattern_entropy_by_query(pattern).mean((0, 2))


def pattern_entropy_by_query(pattern: Tensor) -> Tensor:
    """Entropy of each query's attention in bits: (…, T, S) → (…, T)."""
    return functional.entropy(functional.append_missing_mass(pattern)) / functional.NATS_PER_UNIT["bits"]


def _attention_patterns(inputs: AnalysisInputs) -> dict[str, Tensor]:
    """Return a dict from layer label to pattern (B, H, T, S), for all attention layers including cross-attention."""
    t = inputs.trace("attn.pattern", *(["cross.pattern"] if inputs.site_prefix else []))
    labels = {name: name.removesuffix(".pattern").removesuffix(".attn").replace("blocks.", "") for name in t}
    return {label: upcast_float32(t[name]) for name, label in labels.items()}


def _build_result(scores: dict[str, Tensor], title: str, unit: str, note: str = "") -> LabeledTensor:
    """Stack the scores of all layers to layer × head (× head_type). Layers with fewer heads are padded with NaN."""
    rows = list(scores.values())
    max_heads = max(map(len, rows))
    values = rows[0].new_full((len(rows), max_heads, *rows[0].shape[1:]), float("nan"))
    for layer, row in enumerate(rows):
        values[layer, : len(row)] = row
    labels = (tuple(scores), tuple(str(head) for head in range(max_heads)), HEAD_TYPES)
    axes = ("layer", "head", "head_type")
    return LabeledTensor(title, values, axes[: values.ndim], labels[: values.ndim], unit, note)


def head_scores(
    model: ModelLike, *, repeat_len: int | None = None, batch_size: int = 8, seed: int = 0
) -> LabeledTensor:
    """Score of each head for each head type, on random tokens that are repeated once: layer × head × head_type.

    The score is the fraction of attention that goes to one token, from 0 to 1. previous_token: to the token before the
    current one. duplicate_token: to the earlier copy of the current token. induction: to the token after that copy.
    first_token: to the first token of the sequence (attention sink).
    """
    inputs = inputs_without_text(model)
    if isinstance(inputs.structure, EncoderDecoder):
        raise InputError("head_scores needs a model with one stack; pass a decoder or an encoder")
    special_ids = getattr(inputs.tokenizer, "all_special_ids", ())
    tokens = _repeated_random_tokens(inputs.structure, set(special_ids), repeat_len, batch_size, seed)
    half = tokens.shape[1] // 2
    patterns = _attention_patterns(replace(inputs, tokens=tokens.to(inputs.device)))
    scores = {name: torch.stack(pattern_head_scores(pattern, half), -1) for name, pattern in patterns.items()}
    # Uniform attention weights are 1 / number of visible tokens in a decoder (mean over the second half), and
    # 1 / number of all tokens in an encoder.
    num_visible = torch.arange(half + 1, 2 * half + 1)
    is_causal = inputs.structure.stacks.keys() == {"decoder"}
    uniform = float((1.0 / num_visible).mean()) if is_causal else 1 / (2 * half)
    baseline = f"uniform attention has score {100 * uniform:.1f} %"
    note = f"{batch_size} sequences of {half} random tokens, repeated once; {baseline}"
    return _build_result(scores, "head scores", "fraction of attention", note)


def pattern_head_scores(pattern: Tensor, repeat_len: int) -> list[Tensor]:
    """Return the heads' scores (H,) for each head type, averaged over the repeated second half of the tokens."""
    # (B, H, T − offset): attention of query t to key t − offset.
    diagonals = {offset: pattern.diagonal(-offset, -2, -1) for offset in (1, repeat_len, repeat_len - 1)}
    previous = diagonals[1][..., repeat_len - 1 :].mean((0, 2))
    duplicate = diagonals[repeat_len].mean((0, 2))
    induction = diagonals[repeat_len - 1][..., 1:].mean((0, 2))  # from the first token of the second half
    first = pattern[..., repeat_len + 1 :, 0].mean((0, 2))
    return [previous, duplicate, induction, first]


def _repeated_random_tokens(
    model: Transformer, special_ids: set[int], repeat_len: int | None, batch_size: int, seed: int
) -> Tensor:
    """Return (B, 2·repeat_len): distinct random tokens without special tokens, followed by the same tokens again."""
    candidates = torch.tensor([token for token in range(model.config.vocab_size) if token not in special_ids])
    stack = next(iter(model.stacks.values()))
    context = getattr(stack.embed.position, "max_positions", None) or model.config.context or 2 * _DEFAULT_REPEAT_LEN
    repeat_len = min(_DEFAULT_REPEAT_LEN, context // 2, len(candidates)) if repeat_len is None else repeat_len
    if isinstance(repeat_len, bool) or not isinstance(repeat_len, int) or not 3 <= repeat_len <= len(candidates):
        raise InputError(f"repeat_len is {repeat_len!r}; the tokens are distinct, so pass 3 to {len(candidates)}")
    check_positive_int("batch_size", batch_size)
    rng = torch.Generator().manual_seed(seed)
    rows = [candidates[torch.randperm(len(candidates), generator=rng)[:repeat_len]] for _ in range(batch_size)]
    tokens = torch.stack(rows)
    return torch.cat((tokens, tokens), 1)
