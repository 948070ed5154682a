"""What any other module or function offers: found by the names of its arguments, where these leave no doubt."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import CheckedModel

ATTENTION_ARG_NAMES = (("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"))
KERNEL_HEADS, KERNEL_HEAD_DIM, KERNEL_VOCAB_SIZE = 4, 16, 64
"""Of the text that a bare attention kernel is tried with."""


def adapt_module(module: nn.Module, overrides: Mapping[str, Any]) -> CheckedModel:
    """A module of someone's own. `targets` are next tokens (nanoGPT's habit), `labels` the tokens themselves."""
    found = adapt_function(module, overrides, module.forward)
    found.name, found.module = type(module).__name__, module
    return found


def adapt_function(
    function: Callable[..., Any], overrides: Mapping[str, Any], signature_source: Any = None
) -> CheckedModel:
    """A function tokens → logits, or q, k, v → out."""
    found = CheckedModel(name=getattr(function, "__name__", type(function).__name__))
    if "logits" in overrides or "attention" in overrides:
        return found
    names = argument_names(signature_source or function)
    if tuple(names[:3]) in ATTENTION_ARG_NAMES:
        found.attention = function
        return found
    if "targets" in names:  # its logits may be those of the last token only, unless there are targets

        def asked(tokens: Tensor) -> Tensor:
            return extract_logits(function(tokens, targets=tokens))

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            return _next_token_loss(function, tokens[:, :-1].contiguous(), labels[:, 1:].contiguous())

        def labelled(tokens: Tensor, labels: Tensor) -> Tensor:
            return extract_logits(function(tokens, targets=labels.roll(-1, 1)))

        found.logits, found.loss, found.logits_with_labels = asked, loss, labelled
    else:
        found.logits = lambda tokens: extract_logits(function(tokens))
    if "labels" in names:
        found.loss = lambda tokens, labels: extract_loss(function(tokens, labels=labels))
        found.logits_with_labels = lambda tokens, labels: extract_logits(function(tokens, labels=labels))
    if "attention_mask" in names:
        found.logits_with_mask = lambda tokens, mask: extract_logits(function(tokens, attention_mask=mask.long()))
    for name in ("position_ids", "positions"):
        if name in names:
            found.logits_with_positions = lambda tokens, positions, name=name: extract_logits(
                function(tokens, **{name: positions})
            )
    return found


def _next_token_loss(function: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Any:
    """The loss of next tokens. What is not asked is -100, and -1 for those who say so (nanoGPT does)."""
    try:
        return extract_loss(function(tokens, targets=targets))
    except (IndexError, RuntimeError):
        if not bool((targets == -100).any()) or targets.device.type != "cpu":
            raise
        return extract_loss(function(tokens, targets=targets.masked_fill(targets == -100, -1)))


def argument_names(function: Any) -> list[str]:
    """The names of a function's arguments; none where Python cannot tell."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def extract_logits(output: Any) -> Any:
    """The logits in what a model gives back, in whatever it is wrapped."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, tuple | list):
        return next((each for each in output if isinstance(each, Tensor) and each.ndim == 3), output)
    return output


def extract_loss(output: Any) -> Any:
    """The loss in what a model gives back."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(value, Tensor):
        return value
    if isinstance(output, tuple | list):
        return next((each for each in output if isinstance(each, Tensor) and each.ndim == 0), output)
    return output


def adapt_attention_kernel(checked: CheckedModel) -> None:
    """A bare kernel as a model: each token is a q, a k and a v, and what comes out is called logits."""
    attention = checked.attention
    assert attention is not None
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(KERNEL_VOCAB_SIZE, KERNEL_HEADS * KERNEL_HEAD_DIM, generator=draw).to(checked.device)
        for _ in range(3)
    )
    checked.vocab_size, checked.has_positions = KERNEL_VOCAB_SIZE, False

    def logits(tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        heads = (
            x.to(checked.dtype or torch.float32)[tokens]
            .view(rows, length, KERNEL_HEADS, KERNEL_HEAD_DIM)
            .transpose(1, 2)
            for x in (q, k, v)
        )
        return attention(*heads).transpose(1, 2).flatten(2)

    checked.logits = logits
