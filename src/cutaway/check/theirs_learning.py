"""How a model of transformers learns: its loss, in one piece and in several, and its recomputation."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cutaway.check.target import Target

Pieces = Sequence[tuple[Tensor, Tensor]]


def offer(found: Target, model: Any, takes: list[str], plain: dict[str, Any]) -> None:
    """Add to a target what concerns learning; an encoder-decoder adds its own loss."""
    if getattr(model, "supports_gradient_checkpointing", False) and not getattr(
        model, "is_gradient_checkpointing", False
    ):
        found.recomputed = lambda on: switch(model, on)
    if "labels" not in takes or found.kind == "encoder-decoder":
        return
    if found.kind == "decoder" or type(model).__name__.endswith("ForMaskedLM"):
        found.loss = lambda tokens, labels: model(input_ids=tokens, labels=labels, **plain).loss
    if found.kind == "decoder" and takes_count(model):
        found.accumulated = lambda pieces: accumulated(model, pieces, plain)


def switch(model: Any, on: bool) -> None:
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()


def takes_count(model: Any) -> bool:
    """Whether its Trainer would tell it how many labels all pieces have."""
    said = getattr(model, "accepts_loss_kwargs", None)
    kinds = [each.kind for each in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds if said is None else bool(said)


def accumulated(model: Any, pieces: Pieces, plain: dict[str, Any]) -> Tensor:
    """As its Trainer has it: each piece is divided by the labels of all."""
    count = sum((labels[:, 1:] != -100).sum() for _, labels in pieces)
    losses = [
        model(input_ids=tokens, labels=labels, num_items_in_batch=count, **plain).loss for tokens, labels in pieces
    ]
    return sum(losses[1:], losses[0])
