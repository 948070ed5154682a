"""Direct logit attribution: which part of a model wrote a token's logit.

The last stream is a sum, x = embed + Σ out, and the final norm, its statistics frozen at the token that is looked at,
is linear; so the logit is a sum too: embed·g + Σ out·g + biases, with one direction g for all parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.analysis.inputs import (
    AnalysisInputs,
    TextOrTokens,
    TokenOrId,
    eval_mode,
    prepare_inputs,
    upcast_float32,
)
from cutaway.lens.analysis.labeled_tensor import LabeledTensor, show_whitespace
from cutaway.lens.trace import trace
from cutaway.model.norms import LayerNorm, RMSNorm


def pull_back_through_norm(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """(g, β·u): what a part of x is to be multiplied with, and what the norm's bias adds by itself."""
    x = upcast_float32(x)
    none = direction.new_zeros(())
    if isinstance(norm, LayerNorm):
        weighed = apply_norm_gain(norm, direction)
        scale = torch.sqrt(x.var(-1, correction=0, keepdim=True) + norm.eps)
        # (x − mean(x))·w = x·(w − mean(w)): the mean needs no freezing.
        added = none if norm.bias is None else upcast_float32(norm.bias) @ direction
        return weighed / scale, added
    if isinstance(norm, RMSNorm):
        return apply_norm_gain(norm, direction) / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps), none
    assert isinstance(norm, nn.Identity)
    return direction, none


def apply_norm_gain(norm: nn.Module, direction: Tensor) -> Tensor:
    """A direction carried back through all of a norm but its scale, which depends on the token."""
    if isinstance(norm, LayerNorm):
        weighed = direction if norm.weight is None else direction * upcast_float32(norm.weight)
        return weighed - weighed.mean(-1, keepdim=True)
    if isinstance(norm, RMSNorm):
        gain = upcast_float32(norm.weight)
        return direction * (1 + gain if norm.unit_offset else gain)
    return direction


class ActivationMap(Protocol):
    """By the names of sites, as a trace has them."""

    def __getitem__(self, name: str, /) -> Tensor: ...


@dataclass(frozen=True)
class LogitContribution:
    """What one part added to the logit, by the token it came from (one number if it looked at none)."""

    name: str
    contribution: Tensor
    """(tokens,) where attention looked, or a single number."""
    from_source: bool = False
    """Whether it looked at the source's tokens."""


def direct_logit_attribution(
    model: Any,
    tokens: TextOrTokens,
    answer_token: TokenOrId | None = None,
    *,
    incorrect_token: TokenOrId | None = None,
    position: int = -1,
    source: TextOrTokens | None = None,
    by_head: bool = False,
    by_token: bool = False,
) -> LabeledTensor:
    """What each part added to a token's logit (the likeliest's, if none is named), or to its lead over another's.

    The values add up to the logit. `by_head` parts attention into heads, `by_token` by where they looked. A softcap
    stands behind the sum: what is attributed is the logit before it.
    """
    this = prepare_inputs(model, tokens, source)
    check_attributable(this)
    at = this.resolve_position(position)
    blocks = f"{this.site_prefix}blocks.*"
    names = [f"{this.site_prefix}embed", f"{this.site_prefix}final_norm", f"{blocks}.attn.out", f"{blocks}.ffn.out"]
    names += [f"{blocks}.resid_post", f"{blocks}.attn.z"] + ([f"{blocks}.attn.pattern"] if by_token else [])
    mixed = [f"{blocks}.attn.v"] if by_token else []
    if this.site_prefix:
        names += [f"{blocks}.cross.out", f"{blocks}.cross.z"] + ([f"{blocks}.cross.pattern"] if by_token else [])
        mixed += [f"{blocks}.cross.v"] if by_token else []
    with eval_mode(this.model), trace(this.model, *names, positions=at) as here:
        if mixed:
            with trace(this.model, *mixed) as everywhere:
                logits = this.run()
        else:
            everywhere, logits = here, this.run()
        chosen = (
            int(logits[0, at].argmax())
            if answer_token is None
            else this.resolve_token(answer_token, "the token to attribute")
        )
        other = None if incorrect_token is None else this.resolve_token(incorrect_token, "the token to compare with")
        parts = list(logit_contributions(this, here, everywhere, chosen, other, by_head=by_head, by_token=by_token))
    return _build_result(this, parts, at, chosen, other, logits, by_token=by_token)


def check_attributable(inputs: AnalysisInputs) -> None:
    """Only a stream that is a plain sum, and a head that is linear, can be taken apart."""
    inputs.require_additive_residual("attribution")
    if inputs.require_head().transform is not None:
        raise InputError(
            "this model's head has a layer with an activation before the output matrix, so a logit is no sum of "
            "parts; attribution needs a plain head"
        )


def logit_contributions(
    inputs: AnalysisInputs,
    at_position: ActivationMap,
    all_positions: ActivationMap,
    answer_token: int,
    incorrect_token: int | None,
    *,
    by_head: bool,
    by_token: bool,
) -> Iterator[LogitContribution]:
    head, stack, prefix = inputs.require_head(), inputs.stack, inputs.site_prefix
    matrix: Any = head.matrix.weight
    direction = upcast_float32(matrix[answer_token]) * head.scale
    bias = head.scale * upcast_float32(head.bias)[answer_token] if head.bias is not None else None
    if incorrect_token is not None:
        direction = direction - upcast_float32(matrix[incorrect_token]) * head.scale
        bias = (
            None
            if bias is None or head.bias is None
            else bias - head.scale * upcast_float32(head.bias)[incorrect_token]
        )
    last = at_position[f"{prefix}blocks.{len(stack.blocks) - 1}.resid_post"][0, 0]
    g, norm_bias = pull_back_through_norm(stack.final_norm, last, direction)
    yield LogitContribution("embed", upcast_float32(at_position[f"{prefix}embed"][0, 0]) @ g)
    for layer, block in enumerate(stack.blocks):
        site = f"{prefix}blocks.{layer}"
        branches = [("attn", block.attn), ("cross", getattr(block, "cross", None))]
        for kind, branch in branches:
            if branch is None:
                continue
            name, out = f"{layer}.{kind}", upcast_float32(at_position[f"{site}.{kind}.out"][0, 0])
            if not by_head and not by_token:
                yield LogitContribution(name, out @ g)
                continue
            heads, constant = _head_contributions(
                branch, at_position, all_positions, f"{site}.{kind}", g, by_token=by_token
            )
            rows = [(f"{name}.{number}", row) for number, row in enumerate(heads)]
            for label, row in rows if by_head else [(name, heads.sum(0))]:
                yield LogitContribution(label, row, from_source=kind == "cross")
            if constant is not None:
                yield LogitContribution(f"{name}.bias", constant)
        yield LogitContribution(f"{layer}.ffn", upcast_float32(at_position[f"{site}.ffn.out"][0, 0]) @ g)
    if bias is not None or getattr(stack.final_norm, "bias", None) is not None:
        yield LogitContribution("bias", norm_bias if bias is None else norm_bias + bias)


def _head_contributions(
    branch: Any,
    at_position: ActivationMap,
    all_positions: ActivationMap,
    site: str,
    direction: Tensor,
    *,
    by_token: bool,
) -> tuple[Tensor, Tensor | None]:
    """What each head adds, (H,) or (H, S) by where it looked, and what the biases behind them add."""
    f = branch.f
    z = upcast_float32(at_position[f"{site}.z"][0, 0])  # (H, E)
    weight, bias = upcast_float32(f.o.weight), None if f.o.bias is None else upcast_float32(f.o.bias)
    inner, added = pull_back_through_norm(branch.norm_out, F.linear(z.flatten(), weight, bias), direction)
    back = (inner @ weight).view_as(z)  # each head's slice of o, seen from the logit
    constant = added if bias is None else added + bias @ inner
    has_bias = bias is not None or getattr(branch.norm_out, "bias", None) is not None
    if by_token:
        values = upcast_float32(all_positions[f"{site}.v"][0])  # (S, G, E)
        values = values.repeat_interleave(len(z) // values.shape[1], 1)
        heads = torch.einsum("hs,she,he->hs", upcast_float32(at_position[f"{site}.pattern"][0, :, 0]), values, back)
    else:
        heads = (z * back).sum(-1)
    return heads * branch.scale, constant * branch.scale if has_bias else None


def _build_result(
    inputs: AnalysisInputs,
    contributions: list[LogitContribution],
    position: int,
    answer_token: int,
    incorrect_token: int | None,
    logits: Tensor,
    *,
    by_token: bool,
) -> LabeledTensor:
    words = inputs.token_labels
    name, last = show_whitespace(inputs.decode_tokens([answer_token])[0]), show_whitespace(words[position])
    title = f"what wrote the logit of '{name}' after '{last}'"
    if incorrect_token is not None:
        other = show_whitespace(inputs.decode_tokens([incorrect_token])[0])
        title = f"what put '{name}' before '{other}' after '{last}'"
    labels: tuple[tuple[str, ...], ...] = (tuple(part.name for part in contributions),)
    if by_token:
        beside = () if inputs.source is None else inputs.decode_tokens(inputs.source[0].tolist())
        beside = tuple(f"source: {word}" for word in beside)
        rows = [_contribution_by_token(part, position, len(words), len(beside)) for part in contributions]
        amounts, labels = torch.stack(rows), (*labels, (*words, *beside))
    else:
        amounts = torch.stack([part.contribution for part in contributions])
    whole = logits[0, position, answer_token] - (0 if incorrect_token is None else logits[0, position, incorrect_token])
    cap = inputs.require_head().softcap
    capped = "" if cap is None else f", before the cap at ±{cap:g}"
    note = f"the parts add up to {float(amounts.sum()):.6g}{capped}; the model says {float(whole):.6g}"
    axes = ("component", "token") if by_token else ("component",)
    return LabeledTensor(title, amounts, axes, labels, unit="logit" + capped, note=note)


def _contribution_by_token(contribution: LogitContribution, position: int, seq_len: int, source_len: int) -> Tensor:
    """A part's amounts, each at the token it came from: what looked at nothing came from the token itself."""
    row = contribution.contribution.new_zeros(seq_len + source_len)
    if contribution.contribution.ndim == 0:
        row[position] = contribution.contribution
    elif contribution.from_source:
        row[seq_len:] = contribution.contribution
    else:
        row[:seq_len] = contribution.contribution
    return row
