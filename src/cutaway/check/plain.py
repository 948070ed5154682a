"""What any other module or function offers: found by the names of its arguments, where these leave no doubt."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.target import Target

ATTENTION = (("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"))
HEADS, WIDTH, WORDS = 4, 16, 64
"""Of the text that a bare attention kernel is tried with."""


def of_module(module: nn.Module, given: Mapping[str, Any]) -> Target:
    """A module of someone's own. `targets` are next tokens (nanoGPT's habit), `labels` the tokens themselves."""
    found = of_function(module, given, module.forward)
    found.name, found.module = type(module).__name__, module
    return found


def of_function(function: Callable[..., Any], given: Mapping[str, Any], signature_of: Any = None) -> Target:
    """A function tokens → logits, or q, k, v → out."""
    found = Target(name=getattr(function, "__name__", type(function).__name__))
    if "logits" in given or "attention" in given:
        return found
    names = parameters(signature_of or function)
    if tuple(names[:3]) in ATTENTION:
        found.attention = function
        return found
    if "targets" in names:  # its logits may be those of the last token only, unless there are targets

        def asked(tokens: Tensor) -> Tensor:
            return logits_of(function(tokens, targets=tokens))

        def loss(tokens: Tensor, labels: Tensor) -> Tensor:
            return next_loss(function, tokens[:, :-1].contiguous(), labels[:, 1:].contiguous())

        def labelled(tokens: Tensor, labels: Tensor) -> Tensor:
            return logits_of(function(tokens, targets=labels.roll(-1, 1)))

        found.logits, found.loss, found.labelled = asked, loss, labelled
    else:
        found.logits = lambda tokens: logits_of(function(tokens))
    if "labels" in names:
        found.loss = lambda tokens, labels: loss_of(function(tokens, labels=labels))
        found.labelled = lambda tokens, labels: logits_of(function(tokens, labels=labels))
    if "attention_mask" in names:
        found.padded = lambda tokens, mask: logits_of(function(tokens, attention_mask=mask.long()))
    for name in ("position_ids", "positions"):
        if name in names:
            found.placed = lambda tokens, positions, name=name: logits_of(function(tokens, **{name: positions}))
    return found


def next_loss(function: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Any:
    """The loss of next tokens. What is not asked is -100, and -1 for those who say so (nanoGPT does)."""
    try:
        return loss_of(function(tokens, targets=targets))
    except (IndexError, RuntimeError):
        if not bool((targets == -100).any()) or targets.device.type != "cpu":
            raise
        return loss_of(function(tokens, targets=targets.masked_fill(targets == -100, -1)))


def parameters(function: Any) -> list[str]:
    """The names of a function's arguments; none where Python cannot tell."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def logits_of(out: Any) -> Any:
    """The logits in what a model gives back, in whatever it is wrapped."""
    if isinstance(out, Tensor):
        return out
    for name in ("logits", "last_hidden_state"):
        value = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(out, tuple | list):
        return next((each for each in out if isinstance(each, Tensor) and each.ndim == 3), out)
    return out


def loss_of(out: Any) -> Any:
    """The loss in what a model gives back."""
    value = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(value, Tensor):
        return value
    if isinstance(out, tuple | list):
        return next((each for each in out if isinstance(each, Tensor) and each.ndim == 0), out)
    return out


def by_attention(found: Target) -> None:
    """A bare kernel as a model: each token is a q, a k and a v, and what comes out is called logits."""
    attention = found.attention
    assert attention is not None
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(WORDS, HEADS * WIDTH, generator=draw).to(found.device) for _ in range(3))
    found.vocab, found.ordered = WORDS, False

    def logits(tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        heads = (
            x.to(found.dtype or torch.float32)[tokens].view(rows, length, HEADS, WIDTH).transpose(1, 2)
            for x in (q, k, v)
        )
        return attention(*heads).transpose(1, 2).flatten(2)

    found.logits = logits
