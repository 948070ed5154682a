"""A model with what is asked of it: a batch in, what it gets wrong out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cutaway.model import Transformer
from cutaway.model.inputs import VALUES_CHECKED
from cutaway.train.loss.chunked_cross_entropy import LossSums
from cutaway.train.loss.cross_entropy import VocabShard
from cutaway.train.loss.load_balancing import load_balancing_loss, record_routing
from cutaway.train.objectives.objective import Objective
from cutaway.train.optim.mixed_precision import disable_onednn_without_bf16
from cutaway.train.recipe.schema import Recipe

LOSS_CHUNK_SIZE = 1024
"""Targets whose logits are held at once."""


class TrainingModule(nn.Module):
    """The one thing that is wrapped where several ranks train a model: all that has a gradient happens inside."""

    def __init__(self, model: Transformer, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing: float = getattr(recipe.objective, "label_smoothing", 0.0)
        self.z_loss_coef, self.precision = recipe.objective.z_loss_coef, recipe.training.precision
        if self.precision != "fp32":
            disable_onednn_without_bf16(model.device)
        self.vocab_shard: VocabShard | None = None
        """Whose logits are here, where ranks share the output matrix."""
        self.aux_loss_coef = recipe.objective.aux_loss_coef
        self.loss_buffers: dict[str, Any] = {}
        """Memory that one step's loss leaves to the next's."""

    def forward(self, objective: Objective) -> LossSums:
        unknown = VALUES_CHECKED.set(True)  # ids are the tokenizer's
        try:
            with self.autocast():
                return (
                    self._compute_loss_with_aux(objective)
                    if self.aux_loss_coef and torch.is_grad_enabled()
                    else self._compute_loss(objective)
                )
        finally:
            VALUES_CHECKED.reset(unknown)

    def _compute_loss(self, objective: Objective) -> LossSums:
        return objective.loss(
            self.model,
            label_smoothing=self.label_smoothing,
            z_loss_coef=self.z_loss_coef,
            chunk_size=LOSS_CHUNK_SIZE,
            vocab_shard=self.vocab_shard,
            buffers=self.loss_buffers,
        )

    def _compute_loss_with_aux(self, objective: Objective) -> LossSums:
        """With what uneven use of experts costs, as often as there are targets: the step divides by them."""
        with record_routing(self.model) as seen:
            loss = self._compute_loss(objective)
        return loss._replace(loss=loss.loss + self.aux_loss_coef * loss.weight * load_balancing_loss(seen))

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """What products are computed in, and for bf16 what the stream is kept in between: half the traffic, and of
        gradients' error about a twentieth more than with a stream in fp32. In fp16 a stream may grow too large."""
        if self.precision == "fp32":
            yield
            return
        stacks = self.model.stacks.values() if self.precision == "bf16" else ()
        narrow = [stack.embed.register_forward_hook(lambda module, given, x: x.to(torch.bfloat16)) for stack in stacks]
        try:
            with torch.autocast(self.model.device.type, torch.bfloat16 if self.precision == "bf16" else torch.float16):
                yield
        finally:
            for hook in narrow:
                hook.remove()
