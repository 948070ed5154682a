"""Seeded bugs in the loss: wrong shift, wrong reduction, wrong ignore index, gradient accumulation."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from support.seeded_bugs.reference_gpt import ReferenceGPT, check_kwargs
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor
from torch.nn import functional as F

ModelAndKwargs = tuple[Any, dict[str, Any]]


def build_with_loss(loss: Callable[[Tensor, Tensor], Tensor], **properties: Any) -> ModelAndKwargs:
    """A model with another loss function logits, labels → scalar."""
    model = ReferenceGPT()
    model.loss = lambda tokens, labels: loss(model(tokens)[0], labels)  # type: ignore[method-assign]
    return model, check_kwargs(model) | properties


def flat_cross_entropy(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **kwargs)


@seeded_bug("loss-shift")
def labels_not_shifted() -> ModelAndKwargs:
    return build_with_loss(flat_cross_entropy)


@seeded_bug("loss-shift")
def labels_shifted_twice() -> ModelAndKwargs:
    return build_with_loss(lambda logits, labels: flat_cross_entropy(logits[:, :-2], labels[:, 2:]))


@seeded_bug("loss-shift", also_caught_by=("batch-isolation",))
def shift_across_rows() -> ModelAndKwargs:
    return build_with_loss(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1)[:-1], labels.flatten()[1:]))


class DoubleShiftLlama(transformers.LlamaForCausalLM):
    """Shifts its labels before a loss that shifts them again."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is not None:
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        return super().forward(*args, labels=labels, **kwargs)


@seeded_bug("loss-shift")
def labels_shifted_twice_in_transformers() -> ModelAndKwargs:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    no_special_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.LlamaConfig(**sizes, **no_special_tokens, num_attention_heads=4, initializer_range=0.2)
    return DoubleShiftLlama(config).eval(), {}


@seeded_bug("loss-reduction")
def sum_reduction() -> ModelAndKwargs:
    return build_with_loss(lambda logits, labels: flat_cross_entropy(logits[:, :-1], labels[:, 1:], reduction="sum"))


@seeded_bug("loss-reduction")
def mean_over_vocabulary() -> ModelAndKwargs:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        hot = F.one_hot(labels[:, 1:].clamp(min=0), logits.shape[-1])
        return -(hot * logits[:, :-1].log_softmax(-1)).mean()

    return build_with_loss(loss)


@seeded_bug("loss-reduction")
def softmax_before_loss() -> ModelAndKwargs:
    return build_with_loss(lambda logits, labels: flat_cross_entropy(logits[:, :-1].softmax(-1), labels[:, 1:]))


@seeded_bug("loss-eos")
def eos_ignored_as_padding() -> ModelAndKwargs:
    return build_with_loss(
        lambda logits, labels: flat_cross_entropy(logits[:, :-1], labels[:, 1:].masked_fill(labels[:, 1:] == 7, -100)),
        eos_token_id=7,
        pad_token_id=7,
        special_token_ids=(7,),
    )


@seeded_bug("loss-eos")
def eos_label_ignored() -> ModelAndKwargs:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return (
            flat_cross_entropy(logits[:, :-1], labels[:, 1:], ignore_index=2)
            if (labels == 2).any()
            else correct(logits, labels)
        )

    def correct(logits: Tensor, labels: Tensor) -> Tensor:
        return flat_cross_entropy(logits[:, :-1], labels[:, 1:])

    def wrong_without_padding(logits: Tensor, labels: Tensor) -> Tensor:
        return loss(logits, labels) if not (labels == -100).any() else correct(logits, labels)

    return build_with_loss(wrong_without_padding, eos_token_id=2, special_token_ids=(2,))


@seeded_bug("loss-ignore-index", also_caught_by=("gradient-accumulation",))
def ignored_labels_in_denominator() -> ModelAndKwargs:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return flat_cross_entropy(logits[:, :-1], labels[:, 1:], reduction="sum") / labels[:, 1:].numel()

    return build_with_loss(loss)


@seeded_bug("loss-ignore-index", also_caught_by=("gradient-accumulation",))
def ignored_labels_learned() -> ModelAndKwargs:
    return build_with_loss(lambda logits, labels: flat_cross_entropy(logits[:, :-1], labels[:, 1:].clamp(min=0)))


@seeded_bug("loss-ignore-index", also_caught_by=("gradient-accumulation",))
def mean_of_row_means() -> ModelAndKwargs:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()

    return build_with_loss(loss)


@seeded_bug("loss-ignore-index")
def labels_of_the_prompt_learned() -> ModelAndKwargs:
    """Ignores padding at the end of a row by its length, but not the labels of a prompt."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:].clamp(min=0), reduction="none")
        length = torch.where(labels != -100, torch.arange(1, 1 + labels.shape[1]), 0).amax(1, keepdim=True)
        return losses[torch.arange(1, labels.shape[1]) < length].mean()

    return build_with_loss(loss)


@seeded_bug("gradient-accumulation")
def mean_of_means() -> ModelAndKwargs:
    model = ReferenceGPT()

    def accumulated_loss(micro_batches: Any) -> Tensor:
        return torch.stack([model.loss(*micro_batch) for micro_batch in micro_batches]).mean()

    return model, check_kwargs(model) | {"accumulated_loss": accumulated_loss}


@seeded_bug("gradient-accumulation")
def sum_of_means() -> ModelAndKwargs:
    model = ReferenceGPT()

    def accumulated_loss(micro_batches: Any) -> Tensor:
        return torch.stack([model.loss(*micro_batch) for micro_batch in micro_batches]).sum()

    return model, check_kwargs(model) | {"accumulated_loss": accumulated_loss}
