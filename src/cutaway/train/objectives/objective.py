"""From a batch to what the model reads and what it must say; which vector tells which token is settled here alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model import EncoderOnly, Transformer
from cutaway.model.masks import number_tokens
from cutaway.train.loss.chunked_cross_entropy import (
    LossSums,
    LossTargets,
    chunked_cross_entropy_selected,
    select_targets,
    to_device_async,
)
from cutaway.train.loss.cross_entropy import VocabShard


@dataclass(frozen=True)
class Objective:
    """What to pass to the model, and for each vector that comes back its target and how much that counts."""

    inputs: tuple[Tensor | None, ...]
    targets: Int[Tensor, "B T"]
    weights: Float[Tensor, "B T"]
    model_kwargs: dict[str, Tensor] = field(default_factory=dict)
    loss_targets: LossTargets | None = None
    """Targets that count, once they are where the model is."""

    def hidden_states(self, model: Transformer) -> Float[Tensor, "B T d"]:
        """The vectors that the model's head reads."""
        run: Any = model.encode if isinstance(model, EncoderOnly) else model.hidden_states
        return run(*self.inputs, **self.model_kwargs)

    def loss(
        self,
        model: Transformer,
        *,
        label_smoothing: float = 0.0,
        z_loss_coef: float = 0.0,
        chunk_size: int = 1024,
        vocab_shard: VocabShard | None = None,
        buffers: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """What the model gets wrong, summed over targets."""
        head = model.head
        if not isinstance(head, torch.nn.Module):
            raise InputError("this model has no head, so it cannot say a token; give it one: head.kind = 'lm'")
        x = self.hidden_states(model).flatten(0, 1)
        ask = self.loss_targets or select_targets(self.targets.flatten(), self.weights.flatten()).to(x.device)
        return chunked_cross_entropy_selected(
            head,
            x,
            ask,
            label_smoothing=label_smoothing,
            z_loss_coef=z_loss_coef,
            chunk_size=chunk_size,
            vocab_shard=vocab_shard,
            buffers=buffers,
        )

    def to(self, device: torch.device | str) -> "Objective":
        """The same on another device. Weights stay: they are counted here, and asking a device is waiting for it."""
        reads = tuple(None if each is None else to_device_async(each, device) for each in self.inputs)
        beside = {name: to_device_async(each, device) for name, each in self.model_kwargs.items()}
        ask = select_targets(self.targets.flatten(), self.weights.flatten()).to(device)
        return Objective(reads, to_device_async(self.targets, device), self.weights, beside, ask)


ObjectiveFn = Callable[[Any, int], Objective]
"""What a batch, whose first sequence has this position, asks of a model."""


def causal_lm(tokens: Int[Tensor, "B T1"], document_ids: Int[Tensor, "B T1"] | None = None) -> Objective:
    """The vector at t tells token t + 1, unless that begins another document."""
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
    """As causal_lm, but the first `prefix_lengths[b]` tokens of each document in row b are no targets.

    They see each other, unless not `bidirectional`. Padding, where `mask` is False, stands on the right, where nothing
    that counts sees it.
    """
    task = causal_lm(tokens, document_ids)
    if prefix_lengths.shape != tokens.shape[:1]:
        raise InputError(
            f"prefix_lengths has shape {tuple(prefix_lengths.shape)}; give one length for each of {len(tokens)} rows"
        )
    position = number_tokens(len(tokens), tokens.shape[-1], tokens.device, document_ids=document_ids).position
    told = position[:, 1:] >= prefix_lengths.unsqueeze(-1)
    if mask is not None:
        told = told & mask[:, 1:]
    beside = task.model_kwargs | ({"prefix_lengths": prefix_lengths} if bidirectional else {})
    return Objective(task.inputs, task.targets, task.weights * told, beside)


def seq2seq(
    source: Int[Tensor, "B S"],
    source_mask: Bool[Tensor, "B S"] | None,
    target: Int[Tensor, "B T1"],
    target_mask: Bool[Tensor, "B T1"] | None,
) -> Objective:
    """The decoder is given the true target so far; its first real token, which starts it, is no target itself."""
    _check_token_pairs("target", target)
    weights, reading = torch.ones_like(target[:, 1:], dtype=torch.float32), None
    if target_mask is not None:
        weights = weights * (target_mask[:, 1:] & target_mask[:, :-1])  # padding may stand on either side
        reading = drop_full_mask(target_mask[:, :-1])
    source_mask = None if source_mask is None else drop_full_mask(source_mask)
    return Objective((source, target[:, :-1], source_mask, reading), target[:, 1:], weights)


def document_kwargs(document_ids: Int[Tensor, "B T"]) -> dict[str, Tensor]:
    """Nothing where every row is one document: attention is then plain, and faster."""
    return {"document_ids": document_ids} if bool((document_ids != document_ids[:, :1]).any()) else {}


def drop_full_mask(mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"] | None:
    """A mask that hides nothing is none, and attention is faster without."""
    return None if bool(mask.all()) else mask


def _check_token_pairs(name: str, tokens: Tensor) -> None:
    if tokens.ndim != 2 or tokens.shape[-1] < 2:
        raise InputError(
            f"{name} has shape {tuple(tokens.shape)}; give rows of 2 tokens or more, one to read, one to say"
        )
