"""Models whose sequence lengths must be a multiple of a number (`multiple=`): other lengths are padded on the right.

In a causal model, padding on the right changes no earlier logits. In an encoder, the padding is masked. Functions that
cannot be padded raise `SkipCheckError`, so that the checks that need other lengths are skipped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cutaway.check.checked_model import CheckedModel, LogitsFunction, TokensFunction
from cutaway.check.report.finding import SkipCheckError

_IGNORE_INDEX = -100
"""Label that the loss ignores."""
_MASK_FUNCTIONS = ("logits_with_mask", "logits_with_mask_only", "load_balancing_loss")
_UNPADDED_FUNCTIONS = (
    "logits_with_cache", "logits_with_filled_cache", "logits_with_rolling_cache", "generate", "generate_padded",
    "generate_speculative", "beam_search",
)  # fmt: skip
"""Functions of tokens and other arguments that are called with any length, and may reject it."""


def pad_to_multiple(checked: CheckedModel, multiple: int) -> None:
    """Wrap the functions of `checked` so that they take sequences of any length."""
    pad_token_id = checked.pad_token_id or 0
    is_encoder, logits_with_mask = checked.kind == "encoder", checked.logits_with_mask

    def pad(tokens: Tensor) -> Tensor:
        return F.pad(tokens, (0, -tokens.shape[1] % multiple), value=pad_token_id)

    def pad_like(tokens: Tensor, other: Tensor, fill: Tensor | None = None) -> Tensor:
        """Append a column `fill` (zeros if it is None) to `other` (B or 1, T) for each padding token of `tokens`."""
        column = torch.zeros_like(other[:, :1]) if fill is None else fill
        return torch.cat((other, column.expand(-1, -tokens.shape[1] % multiple)), 1)

    def run(function: LogitsFunction, tokens: Tensor) -> Tensor:
        if not is_encoder or tokens.shape[1] % multiple == 0:
            return function(pad(tokens))[:, : tokens.shape[1]]
        if logits_with_mask is None or function is not checked_logits:
            raise _unsupported_length(tokens, multiple)
        return logits_with_mask(pad(tokens), pad_like(tokens, torch.ones_like(tokens).bool()))[:, : tokens.shape[1]]

    def run_with_mask(function: TokensFunction, tokens: Tensor, mask: Tensor) -> Tensor:
        out = function(pad(tokens), pad_like(tokens, mask))
        return out[:, : tokens.shape[1]] if out.ndim > 1 else out

    def run_with(function: TokensFunction, fill: Callable[[Tensor], Tensor], tokens: Tensor, other: Tensor) -> Tensor:
        if is_encoder and tokens.shape[1] % multiple:
            raise _unsupported_length(tokens, multiple)
        return function(pad(tokens), pad_like(tokens, other, fill(other)))[:, : tokens.shape[1]]

    def run_with_source(function: Callable[..., Tensor], source: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        if source.shape[1] % multiple:
            mask = pad_like(source, torch.ones_like(source).bool() if mask is None else mask)
        return function(pad(source), mask, pad(tokens))[:, : tokens.shape[1]]

    checked_logits = checked.logits
    for name in ("logits", "reference_logits"):
        _wrap(checked, name, run)
    checked.logits_by_kernel = {name: partial(run, function) for name, function in checked.logits_by_kernel.items()}
    for name in _MASK_FUNCTIONS:
        _wrap(checked, name, run_with_mask)
    _wrap(checked, "logits_with_source", run_with_source)
    # Positions repeat the last one, which is valid; padding is a document of its own.
    _wrap(checked, "logits_with_positions", run_with, lambda positions: positions[:, -1:])
    _wrap(checked, "logits_with_documents", run_with, lambda documents: documents[:, -1:] + 1)
    _wrap(checked, "logits_with_labels", run_with, lambda labels: torch.full_like(labels[:, :1], _IGNORE_INDEX))
    if checked.loss is not None:
        checked.loss = _pad_loss(checked.loss, multiple, pad_token_id, is_encoder=is_encoder)
    for name in _UNPADDED_FUNCTIONS:
        _wrap(checked, name, partial(_run_unpadded, multiple))


def _wrap(checked: CheckedModel, name: str, run: Callable[..., Any], *args: object) -> None:
    """Replace a function of `checked`, if it is set, by `run(function, *args, …)`."""
    function = getattr(checked, name)
    if function is not None:
        setattr(checked, name, partial(run, function, *args))


def _run_unpadded(multiple: int, function: Callable[..., Any], tokens: Tensor, *args: Any) -> Any:
    """Call a function that cannot be padded; an exception for a length that is not a multiple skips the check."""
    try:
        return function(tokens, *args)
    except Exception as error:  # any exception means that this length is not supported
        if tokens.shape[1] % multiple == 0:
            raise
        raise _unsupported_length(tokens, multiple) from error


def _pad_loss(loss: TokensFunction, multiple: int, pad_token_id: int, *, is_encoder: bool) -> TokensFunction:
    """Pad the tokens and, with labels of -100, the labels.

    A loss that shifts its tokens itself runs the model on one token fewer, so one token more is tried second.
    """

    def padded_loss(tokens: Tensor, labels: Tensor) -> Tensor:
        errors: list[Exception] = []
        for num_shifted in (0, 1):
            num_pads = -(tokens.shape[1] - num_shifted) % multiple
            if num_pads and is_encoder:
                continue
            inputs = F.pad(tokens, (0, num_pads), value=pad_token_id)
            try:
                return loss(inputs, F.pad(labels, (0, num_pads), value=_IGNORE_INDEX))
            except Exception as error:  # any exception means that this length is not supported
                errors.append(error)
        raise errors[0] if errors else _unsupported_length(tokens, multiple)

    return padded_loss


def _unsupported_length(tokens: Tensor, multiple: int) -> SkipCheckError:
    return SkipCheckError(
        f"needs a sequence of {tokens.shape[1]} tokens, but lengths are a multiple of {multiple}, and this forward "
        "pass cannot be padded"
    )
