"""TrainingModule: a model with its loss and mixed precision, as one nn.Module that DDP and FSDP can wrap."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cutaway.argument_checks import VALUES_CHECKED
from cutaway.config import Config, TaskHead
from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.model import Transformer, build
from cutaway.model.adapters.quantized_linear import quantize_linears
from cutaway.train.checkpoint.pretrained_checkpoint import BASE_DTYPES
from cutaway.train.loss.chunked_cross_entropy import LossSums
from cutaway.train.loss.cross_entropy import CrossEntropyOptions
from cutaway.train.loss.load_balancing import load_balancing_loss, record_routing
from cutaway.train.objectives.objective import Objective
from cutaway.train.optim.float8 import convert_to_float8
from cutaway.train.optim.mixed_precision import compute_dtype, disable_onednn_without_bf16
from cutaway.train.recipe.schema import (
    CausalLMConfig,
    Float8Config,
    ObjectiveConfig,
    Precision,
    PretrainedModelConfig,
    TrainingConfig,
)

LOSS_CHUNK_SIZE = 1024
"""Number of targets per chunk of logits."""


def build_training_model(config: Config, training: TrainingConfig, device: torch.device) -> Transformer:
    """Build a model with the seed, the activation checkpointing and the float8 layers of the recipe.

    `device` may be the meta device.
    """
    model = build(config, device=device, seed=training.seed)
    model.use_activation_checkpointing(training.activation_checkpointing, training.activation_checkpointing_layers)
    pooler = getattr(model, "pooler", None)
    if pooler is not None:
        pooler.requires_grad_(False)  # no objective uses the pooler, and DDP would wait for its gradient
    if training.precision == "float8":
        convert_to_float8(model, training.float8 or Float8Config())
    return model


def build_adapter_model(
    base_checkpoint: Checkpoint, source: PretrainedModelConfig, training: TrainingConfig, device: torch.device
) -> Transformer:
    """Add a new adapter to the model of a base checkpoint, which is quantized first if the recipe says so.

    The head of a task is trained fully, as PEFT's modules_to_save.

    The model is changed in place and moved to the device. With quantization, the layers are moved one at a time.
    """
    model = base_checkpoint.model
    if source.adapter is None:
        raise InputError("the recipe has no model.adapter; set it, e.g. model.adapter = { rank = 16 }")
    if source.quantization != "none":
        dtype = BASE_DTYPES[training.precision]
        quantize_linears(model, source.quantization, device=device, dtype=dtype)
        model = model.to(dtype=dtype)  # embedding, norms and head
    model = model.to(device)
    model.use_activation_checkpointing(training.activation_checkpointing, training.activation_checkpointing_layers)
    model.add_adapter(source.adapter, seed=training.seed)
    if isinstance(model.config.head, TaskHead):  # its weights are new, so a low-rank change is not enough
        assert model.head is not None
        # As the adapter, it is in fp32: updates of 16-bit weights would be rounded off.
        model.head.to(torch.promote_types(model.dtype, torch.float32)).requires_grad_(True)
        model.head.register_forward_pre_hook(_cast_hidden_states)
    return model


def _cast_hidden_states(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hidden states of a 16-bit body in the dtype of the head, for evaluations without autocast."""
    x, *others = args
    weight = next(head.parameters(), x)
    return (x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype), *others)


class TrainingModule(nn.Module):
    """Model and loss in one module. DDP and FSDP wrap this module, so that they synchronize all gradients."""

    def __init__(
        self, model: Transformer, objective: ObjectiveConfig = CausalLMConfig(), precision: Precision = "fp32"
    ) -> None:
        super().__init__()
        self.model, self.precision = model, precision
        self.aux_loss_coef: float = objective.aux_loss_coef
        label_smoothing: float = getattr(objective, "label_smoothing", 0.0)
        # The buffers of the loss are reused from step to step.
        self.loss_options = CrossEntropyOptions(label_smoothing, objective.z_loss_coef, LOSS_CHUNK_SIZE, buffers={})
        if precision != "fp32":
            disable_onednn_without_bf16(model.device)

    def forward(self, objective: Objective) -> LossSums:
        token = VALUES_CHECKED.set(True)  # skip input validation: the ids come from the tokenizer
        try:
            with self.autocast():
                if not (self.aux_loss_coef and torch.is_grad_enabled()):
                    return objective.loss(self.model, self.loss_options)
                with record_routing(self.model) as records:
                    loss = objective.loss(self.model, self.loss_options)
                # The training step divides by the weight of the targets, so multiply by it here.
                aux_loss = self.aux_loss_coef * loss.weight * load_balancing_loss(records)
                return loss._replace(loss=loss.loss + aux_loss)
        finally:
            VALUES_CHECKED.reset(token)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context in which matrix products are autocast to the training precision.

        For bf16 the residual stream is bf16 too. This halves its memory traffic, and the gradient error is about 5 %
        larger than with an fp32 residual stream. For fp16 the residual stream stays fp32, because it could overflow.
        """
        if self.precision == "fp32":
            yield
            return
        dtype = compute_dtype(self.precision)
        stacks = self.model.stacks.values() if dtype == torch.bfloat16 else ()
        hooks = [stack.embed.register_forward_hook(lambda module, args, x: x.to(torch.bfloat16)) for stack in stacks]
        try:
            with torch.autocast(self.model.device.type, dtype):
                yield
        finally:
            for hook in hooks:
                hook.remove()
