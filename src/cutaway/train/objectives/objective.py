"""Training objectives (causal LM, prefix LM, sequence to sequence): model inputs, targets and weights of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model import EncoderOnly, Transformer
from cutaway.model.masks import number_tokens
from cutaway.train.loss.chunked_cross_entropy import (
    LossSums,
    LossTargets,
    chunked_cross_entropy,
    select_targets,
    to_device_async,
)
from cutaway.train.loss.cross_entropy import CrossEntropyOptions


@dataclass(frozen=True)
class Objective:
    """Model inputs of a batch, and the target token and the loss weight of each output position."""

    inputs: tuple[Tensor | None, ...]
    targets: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    model_kwargs: dict[str, Tensor] = field(default_factory=dict)
    loss_targets: LossTargets | None = None
    """Targets whose weight is not 0, on the device of the model. `to` sets this field."""

    def hidden_states(self, model: Transformer) -> Float[Tensor, "B T d"]:
        """Run the model up to the head, and return the hidden states that the head reads."""
        run: Any = model.encode if isinstance(model, EncoderOnly) else model.hidden_states
        return run(*self.inputs, **self.model_kwargs)

    def loss(self, model: Transformer, options: CrossEntropyOptions = CrossEntropyOptions()) -> LossSums:
        """Run the model, and return the loss summed over targets."""
        head = model.head
        if not isinstance(head, torch.nn.Module):
            raise InputError("the model has no output head, so it computes no logits; set model.head.kind = 'lm'")
        x = self.hidden_states(model).flatten(0, 1)
        selected = self.loss_targets or self.select_targets().to(x.device)
        return chunked_cross_entropy(head, x, selected, options)

    def select_targets(self) -> LossTargets:
        """Targets of the loss: those whose weight is not 0."""
        return select_targets(self.targets.flatten(), self.weights.flatten())

    @property
    def num_targets(self) -> float:
        """Number of target tokens, for the throughput."""
        return float(self.weights.sum())

    def batch_sums(self, module: Callable[["Objective"], LossSums]) -> dict[str, Tensor]:
        """Sums over this micro-batch of values that the loss needs from the whole batch, by name.

        They are summed over micro-batches and ranks and passed to `with_batch_sums` before the first loss of a step, so
        that the loss does not depend on the number of micro-batches. `module` computes the loss of an objective.
        """
        return {}

    def with_batch_sums(self, sums: Mapping[str, Tensor]) -> Self:
        """Copy of the objective that knows the sums over the whole batch."""
        return self

    def to(self, device: torch.device | str) -> Self:
        """Copy the objective to a device asynchronously. Only `weights` stay on the CPU, to sum them without a sync."""
        inputs = tuple(None if tensor is None else to_device_async(tensor, device) for tensor in self.inputs)
        model_kwargs = {name: to_device_async(tensor, device) for name, tensor in self.model_kwargs.items()}
        targets, selected = to_device_async(self.targets, device), self.select_targets().to(device)
        return replace(self, inputs=inputs, targets=targets, model_kwargs=model_kwargs, loss_targets=selected)


ObjectiveFn = Callable[[Any, int], Objective]
"""Function that builds the Objective of a batch. The integer is the data position of the first sequence."""


def causal_lm(tokens: Int[Tensor, "B T1"], document_ids: Int[Tensor, "B T1"] | None = None) -> Objective:
    """Next-token prediction: position t predicts token t + 1, unless token t + 1 belongs to another document."""
    _check_token_pairs("tokens", tokens)
    weights = torch.ones_like(tokens[:, 1:], dtype=torch.float32)
    if document_ids is None:
        return Objective((tokens[:, :-1],), tokens[:, 1:], weights)
    weights = weights * (document_ids[:, 1:] == document_ids[:, :-1])
    return Objective((tokens[:, :-1],), tokens[:, 1:], weights, document_kwargs(document_ids[:, :-1]))


def prefix_lm(
    tokens: Int[Tensor, "B T1"],
    document_ids: Int[Tensor, "B T1"] | None,
    prefix_lengths: Int[Tensor, " B"],
    *,
    mask: Bool[Tensor, "B T1"] | None = None,
    bidirectional: bool = True,
) -> Objective:
    """`causal_lm` in which the first `prefix_lengths[b]` tokens of each document in row b are not targets.

    With `bidirectional`, prefix tokens attend to each other in both directions. Padding (`mask` False) must be on the
    right, where causal attention masks it for all tokens that have targets.
    """
    objective = causal_lm(tokens, document_ids)
    if prefix_lengths.shape != tokens.shape[:1]:
        raise InputError(
            f"prefix_lengths has shape {tuple(prefix_lengths.shape)}; pass one length for each of {len(tokens)} rows"
        )
    position = number_tokens(len(tokens), tokens.shape[-1], tokens.device, document_ids=document_ids).position
    is_target = position[:, 1:] >= prefix_lengths.unsqueeze(-1)
    if mask is not None:
        is_target = is_target & mask[:, 1:]
    model_kwargs = objective.model_kwargs | ({"prefix_lengths": prefix_lengths} if bidirectional else {})
    return Objective(objective.inputs, objective.targets, objective.weights * is_target, model_kwargs)


def sft(
    tokens: Int[Tensor, "B T1"],
    is_target: Bool[Tensor, "B T1"],
    document_ids: Int[Tensor, "B T1"] | None = None,
    *,
    document_mask: bool = True,
) -> Objective:
    """`causal_lm` in which only the tokens of `is_target` are predicted, e.g. those of the assistant.

    Padding must be on the right, without targets: causal attention masks it for all tokens that have targets.
    """
    objective = causal_lm(tokens, document_ids)
    model_kwargs = objective.model_kwargs if document_mask else {}
    return Objective(objective.inputs, objective.targets, objective.weights * is_target[:, 1:], model_kwargs)


def seq2seq(
    source: Int[Tensor, "B S"],
    source_mask: Bool[Tensor, "B S"] | None,
    target: Int[Tensor, "B T1"],
    target_mask: Bool[Tensor, "B T1"] | None,
) -> Objective:
    """Sequence to sequence with teacher forcing. The first token of `target`, the start token, is not predicted."""
    _check_token_pairs("target", target)
    weights, decoder_mask = torch.ones_like(target[:, 1:], dtype=torch.float32), None
    if target_mask is not None:
        weights = weights * (target_mask[:, 1:] & target_mask[:, :-1])  # padding may be on either side
        decoder_mask = drop_full_mask(target_mask[:, :-1])
    source_mask = None if source_mask is None else drop_full_mask(source_mask)
    return Objective((source, target[:, :-1], source_mask, decoder_mask), target[:, 1:], weights)


def document_kwargs(document_ids: Int[Tensor, "B T"]) -> dict[str, Tensor]:
    """Keyword argument `document_ids` of the model. It is left out if every row is one document, which is faster."""
    return {"document_ids": document_ids} if bool((document_ids != document_ids[:, :1]).any()) else {}


def drop_full_mask(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
    """Return the mask, or None if it masks nothing, because attention without a mask is faster."""
    return None if bool(mask.all()) else mask


def _check_token_pairs(name: str, tokens: Tensor) -> None:
    if tokens.ndim != 2 or tokens.shape[-1] < 2:
        raise InputError(f"{name} has shape {tuple(tokens.shape)}; pass (batch, tokens) with 2 tokens or more")
