"""Direct logit attribution: contribution of each component to a token's logit.

The residual stream after the last block is a sum, x = embed + Σ out. The final norm is linear once its statistics are
frozen at their values for the attributed position. So the logit is a sum too: embed·g + Σ out·g + biases, with the same
direction g for all components.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike
from cutaway.lens.analysis.inputs import AnalysisInputs, TextOrTokens, TokenOrId, prepare_inputs, upcast_float32
from cutaway.lens.labeled_tensor import LabeledTensor, show_whitespace
from cutaway.lens.sites import attention_module
from cutaway.lens.trace import trace
from cutaway.model.adapters.lora import effective_weight
from cutaway.model.block import Block, Branch
from cutaway.model.head import LMHead
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.norms import LayerNorm, RMSNorm


def _pull_back_through_norm(norm: nn.Module, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g, β·direction) such that norm(x)·direction = x·g + β·direction, with the norm's scale frozen at x."""
    x = upcast_float32(x)
    zero = direction.new_zeros(())
    if isinstance(norm, LayerNorm):
        gained = apply_norm_gain(norm, direction)
        scale = torch.sqrt(x.var(-1, correction=0, keepdim=True) + norm.eps)
        bias = zero if norm.bias is None else upcast_float32(norm.bias) @ direction
        return gained / scale, bias
    if isinstance(norm, RMSNorm):
        return apply_norm_gain(norm, direction) / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps), zero
    check_known_norm(norm)
    return direction, zero


def check_known_norm(norm: nn.Module) -> None:
    """Raise if the norm is not one of cutaway's, so that it is not known how to linearize it."""
    if not isinstance(norm, LayerNorm | RMSNorm | nn.Identity):
        problem = f"the final norm is a {type(norm).__name__}, which computes neither LayerNorm nor RMSNorm"
        raise InputError(f"{problem}, so the logit is not a sum of contributions; use ablation or patching")


def apply_norm_gain(norm: nn.Module, direction: Tensor) -> Tensor:
    """Return g such that norm(x)·direction is proportional to x·g, plus a constant. The factor is the norm's scale."""
    if isinstance(norm, LayerNorm):
        gained = direction if norm.weight is None else direction * upcast_float32(norm.weight)
        # (x − mean(x))·w = x·(w − mean(w)): centering is linear and needs no frozen statistics.
        return gained - gained.mean(-1, keepdim=True)
    if isinstance(norm, RMSNorm):
        gain = upcast_float32(norm.weight)
        return direction * (1 + gain if norm.unit_offset else gain)
    check_known_norm(norm)
    return direction


def unembedding(head: LMHead) -> Tensor:
    """Return the output matrix of a head, (V, d). It is the token embedding if the two are tied."""
    weight = head.matrix.weight
    assert isinstance(weight, Tensor)
    return weight


class ActivationMap(Protocol):
    """Mapping from site name to activation, such as a `Trace`."""

    def __getitem__(self, name: str, /) -> Tensor: ...


@dataclass(frozen=True)
class LogitContribution:
    """Contribution of one component (embed, sublayer, attention head or bias) to the attributed logit."""

    name: str
    contribution: Tensor
    """(S,) with one value per attended token, or a scalar if the contribution is not split by token."""
    from_source: bool = False
    """Whether the attended tokens are in the source (cross-attention)."""


def direct_logit_attribution(
    model: ModelLike,
    tokens: TextOrTokens,
    answer_token: TokenOrId | None = None,
    *,
    incorrect_token: TokenOrId | None = None,
    position: int = -1,
    source: TextOrTokens | None = None,
    by_head: bool = False,
    by_token: bool = False,
    by_expert: bool = False,
) -> LabeledTensor:
    """Contribution of each component to the logit of `answer_token`, or to the logit difference to `incorrect_token`.

    The default `answer_token` is the most likely token. The contributions sum to the logit. `by_head` splits the
    contribution of attention by head, `by_token` by attended token. `by_expert` splits that of a mixture of experts by
    the experts that the router selects at `position`, and the shared expert. If the head has a softcap, the attributed
    logit is the value before the softcap.
    """
    inputs = prepare_inputs(model, tokens, source)
    check_attributable(inputs)
    position = inputs.resolve_position(position)
    blocks = f"{inputs.site_prefix}blocks.*"
    attentions = [f"{blocks}.attn", f"{blocks}.cross"] if inputs.site_prefix else [f"{blocks}.attn"]
    names = [f"{inputs.site_prefix}embed", f"{blocks}.resid_post", f"{blocks}.ffn.out"]
    per_head = ["z"] if by_head or by_token else []
    per_token = ["pattern"] if by_token else []
    if by_expert:
        inputs.require_cutaway_model("the contribution of each expert")
        names.append(f"{blocks}.ffn.in")
    names += [f"{name}.{value}" for name in attentions for value in ("out", *per_head, *per_token)]
    with inputs.eval_mode(), trace(inputs.model, *names, positions=position) as at_position:
        values = trace(inputs.model, *(f"{name}.v" for name in attentions)) if by_token else nullcontext(at_position)
        with values as all_positions:
            logits = inputs.run()
        answer = int(logits[0, position].argmax())
        answer = answer if answer_token is None else inputs.resolve_token(answer_token, "answer_token")
        incorrect = None if incorrect_token is None else inputs.resolve_token(incorrect_token, "incorrect_token")
        contributions = logit_contributions(
            inputs,
            at_position,
            all_positions,
            answer,
            incorrect,
            by_head=by_head,
            by_token=by_token,
            by_expert=by_expert,
        )
        return _build_result(inputs, list(contributions), position, answer, incorrect, logits, by_token=by_token)


def check_attributable(inputs: AnalysisInputs) -> None:
    """Raise InputError if the residual stream is not a plain sum, or if the language modeling head is not linear."""
    inputs.require_additive_residual("direct logit attribution")
    inputs.require_linear_head("direct logit attribution")


def logit_contributions(
    inputs: AnalysisInputs,
    at_position: ActivationMap,
    all_positions: ActivationMap,
    answer_token: int,
    incorrect_token: int | None,
    *,
    by_head: bool,
    by_token: bool,
    by_expert: bool = False,
) -> Iterator[LogitContribution]:
    """Yield the contributions of embed, of each sublayer (or head) and of the biases to the logit, in model order.

    `at_position` has the activations at the attributed position, `all_positions` has v at all positions.
    """
    head, stack, prefix = inputs.require_head(), inputs.stack, inputs.site_prefix
    direction, bias = _logit_direction(head, answer_token)
    if incorrect_token is not None:
        incorrect_direction, incorrect_bias = _logit_direction(head, incorrect_token)
        direction, bias = direction - incorrect_direction, bias - incorrect_bias
    last = at_position[f"{prefix}blocks.{len(stack.blocks) - 1}.resid_post"][0, 0]
    g, norm_bias = _pull_back_through_norm(stack.final_norm, last, direction)
    yield LogitContribution("embed", upcast_float32(at_position[f"{prefix}embed"][0, 0]) @ g)
    for layer, block in enumerate(inputs.blocks):
        site = f"{prefix}blocks.{layer}"
        for kind, branch in (("attn", block.attn), ("cross", block.cross if isinstance(block, Block) else None)):
            if branch is None:
                continue
            name, out = f"{layer}.{kind}", upcast_float32(at_position[f"{site}.{kind}.out"][0, 0])
            if not by_head and not by_token:
                yield LogitContribution(name, out @ g)
                continue
            values = all_positions[f"{site}.{kind}.v"] if by_token else None
            heads, constant = _head_contributions(inputs, branch, at_position, values, f"{site}.{kind}", g)
            rows = {f"{name}.{number}": row for number, row in enumerate(heads)} if by_head else {name: heads.sum(0)}
            for label, row in rows.items():
                yield LogitContribution(label, row, from_source=kind == "cross")
            if constant is not None:
                yield LogitContribution(f"{name}.bias", constant)
        if by_expert and isinstance(block.ffn.f, MixtureOfExperts):
            yield from _expert_contributions(block.ffn, at_position[f"{site}.ffn.in"][0, 0], f"{layer}.ffn", g)
        else:
            yield LogitContribution(f"{layer}.ffn", upcast_float32(at_position[f"{site}.ffn.out"][0, 0]) @ g)
    if head.bias is not None or getattr(stack.final_norm, "bias", None) is not None:
        yield LogitContribution("bias", norm_bias + bias)


def _expert_contributions(branch: Branch, x: Tensor, name: str, direction: Tensor) -> Iterator[LogitContribution]:
    """Yield the contributions of the experts that are selected for a token, and of the shared expert and the biases.

    `x` is the input of the mixture of experts, (d,).
    """
    moe = branch.f
    assert isinstance(moe, MixtureOfExperts)
    x = x.as_subclass(Tensor)[None]
    weights, selected = (row[0] for row in moe.router(x))  # (k,)
    order = selected.argsort()
    offsets = torch.searchsorted(selected[order], torch.arange(moe.num_experts, device=x.device), right=True)
    outputs = upcast_float32(moe.experts(x.expand(len(selected), -1), offsets))  # (k, d), sorted by expert
    parts = {f"{name}.{int(selected[k])}": weights[k] * y for k, y in zip(order.tolist(), outputs, strict=True)}
    if moe.shared is not None:
        gate = 1.0 if moe.shared_gate is None else torch.sigmoid(moe.shared_gate(x)[0])
        parts[f"{name}.shared"] = upcast_float32(moe.shared(x)[0] * gate)
    g, norm_bias = _pull_back_through_norm(branch.norm_out, torch.stack(list(parts.values())).sum(0), direction)
    for label, part in parts.items():
        yield LogitContribution(label, (part @ g) * branch.scale)
    if getattr(branch.norm_out, "bias", None) is not None:
        yield LogitContribution(f"{name}.bias", norm_bias * branch.scale)


def _logit_direction(head: LMHead, token: int) -> tuple[Tensor, Tensor]:
    """Return the vector w and the bias b such that a token's logit is w·x + b, for the input x of the head."""
    weight = unembedding(head)
    bias = weight.new_zeros(()) if head.bias is None else head.bias[token]
    return upcast_float32(weight[token]) * head.scale, upcast_float32(bias) * head.scale


def _head_contributions(
    inputs: AnalysisInputs,
    branch: Branch,
    at_position: ActivationMap,
    values: Tensor | None,
    site: str,
    direction: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the contributions of the heads and of the biases (None without biases) of an attention sublayer.

    The heads' contributions are (H,), or (H, S) with one column per attended token if `values` is not None.
    """
    f = attention_module(branch)
    z = upcast_float32(at_position[f"{site}.z"][0, 0])  # (H, E)
    weight, bias = (
        inputs.read_weight(effective_weight(f.o), f"{site}.out"),
        None if f.o.bias is None else upcast_float32(f.o.bias),
    )
    g, norm_bias = _pull_back_through_norm(branch.norm_out, F.linear(z.flatten(), weight, bias), direction)
    z_direction = (g @ weight).view_as(z)  # (H, E): the direction pulled back through o, per head
    constant = norm_bias if bias is None else norm_bias + bias @ g
    has_bias = bias is not None or getattr(branch.norm_out, "bias", None) is not None
    heads = (z * z_direction).sum(-1)
    if values is not None:
        v = upcast_float32(values[0]).repeat_interleave(len(z) // values.shape[2], 1)  # (S, H, E)
        pattern = upcast_float32(at_position[f"{site}.pattern"][0, :, 0])  # (H, S)
        heads = torch.einsum("hs,she,he->hs", pattern, v, z_direction)
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
    token_labels = inputs.token_labels
    tokens = [answer_token] if incorrect_token is None else [answer_token, incorrect_token]
    answer = " − ".join(f"'{show_whitespace(text)}'" for text in inputs.decode_tokens(tokens))
    title = f"direct logit attribution of {answer} after '{show_whitespace(token_labels[position])}'"
    labels: tuple[tuple[str, ...], ...] = (tuple(part.name for part in contributions),)
    values_by_component = [part.contribution for part in contributions]
    if by_token:
        source_ids = [] if inputs.source is None else inputs.source[0].tolist()
        source_labels = [f"source: {label}" for label in inputs.decode_tokens(source_ids)]
        lengths = len(token_labels), len(source_labels)
        values_by_component = [_contribution_by_token(part, position, *lengths) for part in contributions]
        labels = (*labels, (*token_labels, *source_labels))
    values = torch.stack(values_by_component)
    logit = logits[0, position, answer_token] - (0 if incorrect_token is None else logits[0, position, incorrect_token])
    softcap = inputs.require_head().softcap
    before_cap = "" if softcap is None else f", before the softcap at ±{softcap:g}"
    note = f"the contributions sum to {float(values.sum()):.6g}{before_cap}; the model's logit is {float(logit):.6g}"
    axes = ("component", "token") if by_token else ("component",)
    return LabeledTensor(title, values, axes, labels, unit="logit" + before_cap, note=note)


def _contribution_by_token(contribution: LogitContribution, position: int, seq_len: int, source_len: int) -> Tensor:
    """Return a component's contribution by token, (T + S,). A scalar is attributed to the token at `position`."""
    value = contribution.contribution
    row = value.new_zeros(seq_len + source_len)
    if value.ndim == 0:
        row[position] = value
    elif contribution.from_source:
        row[seq_len:] = value
    else:
        row[:seq_len] = value
    return row
