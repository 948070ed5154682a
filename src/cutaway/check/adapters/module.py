"""Adapter for other modules, functions and attention kernels, by the names of their arguments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import CheckedModel

ATTENTION_ARG_NAMES = (("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"))
KERNEL_HEADS, KERNEL_HEAD_DIM, KERNEL_VOCAB_SIZE = 4, 16, 64
"""Sizes of the random inputs of an attention kernel."""


def adapt_module(module: nn.Module, overrides: Mapping[str, Any]) -> CheckedModel:
    """Adapt an nn.Module. `targets` are shifted labels (as in nanoGPT), `labels` are unshifted."""
    checked = adapt_function(module, overrides, module.forward)
    checked.name, checked.module = type(module).__name__, module
    return checked


def adapt_function(
    function: Callable[..., Any], overrides: Mapping[str, Any], signature_source: Any = None
) -> CheckedModel:
    """Adapt a function tokens → logits or q, k, v → output; other arguments are recognized by name."""
    checked = CheckedModel(name=getattr(function, "__name__", type(function).__name__))
    if "logits" in overrides or "attention" in overrides:
        return checked
    names = argument_names(signature_source or function)
    if tuple(names[:3]) in ATTENTION_ARG_NAMES:
        checked.attention = function
        return checked
    if "targets" in names:  # without targets, nanoGPT returns the logits of the last token only

        def logits(tokens: Tensor) -> Tensor:
            return extract_logits(function(tokens, targets=tokens))

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            return _next_token_loss(function, tokens[:, :-1].contiguous(), labels[:, 1:].contiguous())

        def logits_with_labels(tokens: Tensor, labels: Tensor) -> Tensor:
            return extract_logits(function(tokens, targets=labels.roll(-1, 1)))

        checked.logits, checked.loss, checked.logits_with_labels = logits, loss, logits_with_labels
    else:
        checked.logits = lambda tokens: extract_logits(function(tokens))
    if "labels" in names:
        checked.loss = lambda tokens, labels: extract_loss(function(tokens, labels=labels))
        checked.logits_with_labels = lambda tokens, labels: extract_logits(function(tokens, labels=labels))
    if "attention_mask" in names:
        checked.logits_with_mask = lambda tokens, mask: extract_logits(function(tokens, attention_mask=mask.long()))
    for name in ("position_ids", "positions"):
        if name in names:
            checked.logits_with_positions = lambda tokens, positions, name=name: extract_logits(
                function(tokens, **{name: positions})
            )
    return checked


def _next_token_loss(function: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Any:
    """Loss with shifted targets. The ignore index is -100, or -1 if the function rejects -100 (nanoGPT)."""
    try:
        return extract_loss(function(tokens, targets=targets))
    except (IndexError, RuntimeError):
        if not bool((targets == -100).any()) or targets.device.type != "cpu":
            raise
        return extract_loss(function(tokens, targets=targets.masked_fill(targets == -100, -1)))


def argument_names(function: Any) -> list[str]:
    """Names of a function's arguments; empty if Python cannot inspect it."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def extract_logits(output: Any) -> Any:
    """Extract the logits from a model's output (tensor, mapping, object with attributes, tuple)."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, tuple | list):
        return next((item for item in output if isinstance(item, Tensor) and item.ndim == 3), output)
    return output


def extract_loss(output: Any) -> Any:
    """Extract the loss from a model's output."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(value, Tensor):
        return value
    if isinstance(output, tuple | list):
        return next((item for item in output if isinstance(item, Tensor) and item.ndim == 0), output)
    return output


def adapt_attention_kernel(checked: CheckedModel) -> None:
    """Wrap an attention kernel as a model: each token id has random q, k and v vectors; the output is the logits."""
    attention = checked.attention
    assert attention is not None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(KERNEL_VOCAB_SIZE, KERNEL_HEADS * KERNEL_HEAD_DIM, generator=generator).to(checked.device)
        for _ in range(3)
    )
    checked.vocab_size, checked.has_positions = KERNEL_VOCAB_SIZE, False

    def logits(tokens: Tensor) -> Tensor:
        batch_size, seq_len = tokens.shape
        heads = (
            x.to(checked.dtype or torch.float32)[tokens]
            .view(batch_size, seq_len, KERNEL_HEADS, KERNEL_HEAD_DIM)
            .transpose(1, 2)
            for x in (q, k, v)
        )
        return attention(*heads).transpose(1, 2).flatten(2)

    checked.logits = logits
