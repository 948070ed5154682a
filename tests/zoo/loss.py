"""Bugs in what is minimised: labels that are shifted wrongly, counted wrongly, or not at all."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from zoo.bug import bug
from zoo.home import Home, offers

Made = tuple[Any, dict[str, Any]]


def losing(loss: Callable[[Tensor, Tensor], Tensor], **facts: Any) -> Made:
    """A model with another loss: logits, labels → a number."""
    model = Home()
    model.loss = lambda tokens, labels: loss(model(tokens)[0], labels)  # type: ignore[method-assign]
    return model, offers(model) | facts


def entropy(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **how)


@bug("loss-shift")
def labels_that_are_not_shifted() -> Made:
    return losing(entropy)


@bug("loss-shift")
def labels_shifted_twice() -> Made:
    return losing(lambda logits, labels: entropy(logits[:, :-2], labels[:, 2:]))


@bug("loss-shift", also=("rows-apart",))
def a_shift_across_the_ends_of_rows() -> Made:
    return losing(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1)[:-1], labels.flatten()[1:]))


class Twice(transformers.LlamaForCausalLM):
    """Shifts its labels before a loss that shifts them again."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is not None:
            labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        return super().forward(*args, labels=labels, **kwargs)


@bug("loss-shift")
def labels_shifted_twice_in_transformers() -> Made:
    torch.manual_seed(0)
    how = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.LlamaConfig(**how, **none, num_attention_heads=4, initializer_range=0.2)
    return Twice(config).eval(), {}


@bug("loss-uniform")
def a_sum_instead_of_a_mean() -> Made:
    return losing(lambda logits, labels: entropy(logits[:, :-1], labels[:, 1:], reduction="sum"))


@bug("loss-uniform")
def a_mean_over_the_vocabulary_too() -> Made:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        hot = F.one_hot(labels[:, 1:].clamp(min=0), logits.shape[-1])
        return -(hot * logits[:, :-1].log_softmax(-1)).mean()

    return losing(loss)


@bug("loss-uniform")
def a_softmax_before_the_loss() -> Made:
    return losing(lambda logits, labels: entropy(logits[:, :-1].softmax(-1), labels[:, 1:]))


@bug("loss-eos")
def an_end_that_is_taken_for_padding() -> Made:
    return losing(
        lambda logits, labels: entropy(logits[:, :-1], labels[:, 1:].masked_fill(labels[:, 1:] == 7, -100)),
        eos=7,
        pad=7,
        special=(7,),
    )


@bug("loss-eos")
def the_last_label_is_cut_off() -> Made:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return entropy(logits[:, :-1], labels[:, 1:], ignore_index=2) if (labels == 2).any() else right(logits, labels)

    def right(logits: Tensor, labels: Tensor) -> Tensor:
        return entropy(logits[:, :-1], labels[:, 1:])

    def both(logits: Tensor, labels: Tensor) -> Tensor:
        return loss(logits, labels) if not (labels == -100).any() else right(logits, labels)

    return losing(both, eos=2, special=(2,))


@bug("loss-pads", also=("accumulation",))
def hidden_labels_in_the_denominator() -> Made:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return entropy(logits[:, :-1], labels[:, 1:], reduction="sum") / labels[:, 1:].numel()

    return losing(loss)


@bug("loss-pads", also=("accumulation",))
def hidden_labels_that_are_learned() -> Made:
    return losing(lambda logits, labels: entropy(logits[:, :-1], labels[:, 1:].clamp(min=0)))


@bug("loss-pads", also=("accumulation",))
def rows_that_count_alike() -> Made:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        told = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return (told.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()

    return losing(loss)


@bug("accumulation")
def a_mean_of_means() -> Made:
    model = Home()
    pieces = {"accumulated": lambda pieces: torch.stack([model.loss(*piece) for piece in pieces]).mean()}
    return model, offers(model) | pieces


@bug("accumulation")
def a_sum_of_means() -> Made:
    model = Home()
    pieces = {"accumulated": lambda pieces: torch.stack([model.loss(*piece) for piece in pieces]).sum()}
    return model, offers(model) | pieces
