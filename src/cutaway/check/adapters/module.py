"""Adapter for other modules, functions and attention kernels, whose arguments are recognized by name."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.checked_model import CheckedModel, LogitsFunction, require
from cutaway.errors import InputError

_ATTENTION_ARG_NAMES = (("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"))
KERNEL_HEADS, KERNEL_HEAD_DIM, _KERNEL_VOCAB_SIZE = 4, 16, 64
"""Sizes of the random inputs of an attention kernel."""
SOURCE_LEN = 9
"""Length of the fixed random source of an encoder-decoder."""


def adapt_module(module: nn.Module, overrides: Mapping[str, object]) -> CheckedModel:
    """Build the `CheckedModel` of an nn.Module.

    If its forward has an argument `targets`, shifted labels are passed, as in nanoGPT; if it has an argument `labels`,
    unshifted labels are passed.
    """
    checked = adapt_function(module, overrides, module.forward)
    checked.name, checked.module = type(module).__name__, module
    return checked


def adapt_function(
    function: Callable[..., Any], overrides: Mapping[str, object], signature: Callable[..., object] | None = None
) -> CheckedModel:
    """Build the `CheckedModel` of a function tokens → logits or q, k, v → output.

    Its other arguments are recognized by the argument names of `signature`, which is the function itself by default.
    """
    checked = CheckedModel(name=getattr(function, "__name__", type(function).__name__))
    if overrides.keys() & {"logits", "logits_with_source"}:
        return checked
    names = argument_names(signature or function)
    if tuple(names[:3]) in _ATTENTION_ARG_NAMES:
        checked.attention = function
        return checked
    mask = _parameters(signature or function).get("attention_mask")
    if mask is not None and mask.default is inspect.Parameter.empty:  # a required argument
        function = _with_default_mask(function)
    start_pos = _parameters(signature or function).get("start_pos")
    if start_pos is not None and start_pos.default is inspect.Parameter.empty:  # Meta's Llama
        function = _with_start_of_zero(function)
    if "targets" in names:  # without targets, nanoGPT returns the logits of the last token only
        checked.logits = lambda tokens: extract_logits(function(tokens, targets=tokens))
        checked.loss = lambda tokens, labels: _next_token_loss(function, tokens[:, :-1], labels[:, 1:])
        checked.logits_with_labels = lambda tokens, labels: extract_logits(function(tokens, targets=labels.roll(-1, 1)))
    else:
        checked.logits = lambda tokens: extract_logits(function(tokens))
    if "labels" in names:
        checked.loss = lambda tokens, labels: extract_loss(function(tokens, labels=labels))
        checked.logits_with_labels = lambda tokens, labels: extract_logits(function(tokens, labels=labels))
    if "attention_mask" in names:
        checked.logits_with_mask = lambda tokens, mask: extract_logits(function(tokens, attention_mask=mask.long()))
    for name in [name for name in ("position_ids", "positions") if name in names]:
        checked.logits_with_positions = lambda tokens, positions, name=name: extract_logits(
            function(tokens, **{name: positions})
        )
    return checked


def _next_token_loss(function: Callable[..., object], tokens: Tensor, targets: Tensor) -> Any:
    """Loss that `function` returns for targets that are already shifted.

    The ignore index is -100, or -1 if the function rejects -100 (nanoGPT).
    """
    tokens, targets = tokens.contiguous(), targets.contiguous()
    try:
        return extract_loss(function(tokens, targets=targets))
    except (IndexError, RuntimeError):
        if not bool((targets == -100).any()) or targets.device.type != "cpu":
            raise
        return extract_loss(function(tokens, targets=targets.masked_fill(targets == -100, -1)))


def argument_names(function: Callable[..., object]) -> list[str]:
    """Names of a function's arguments; empty if Python cannot inspect it."""
    return list(_parameters(function))


def accepts_argument(function: Callable[..., object], name: str) -> bool:
    """Whether a function can be called with the keyword argument `name`: it is named, or the function has **kwargs."""
    parameters = _parameters(function)
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function; empty if Python cannot inspect it."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _with_default_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function` with an attention mask of ones, unless one is passed."""

    def run(tokens: Tensor, **kwargs: Any) -> Any:
        return function(tokens, **({"attention_mask": torch.ones_like(tokens)} | kwargs))

    return run


def _with_start_of_zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function` with start_pos=0, an empty cache, unless another is passed."""

    def run(tokens: Tensor, **kwargs: Any) -> Any:
        return function(tokens, **({"start_pos": 0} | kwargs))

    return run


def extract_logits(output: object) -> Any:
    """The logits in a model's output: the tensor itself, `logits`, `last_hidden_state`, or the first 3-d tensor."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := _get_field(output, name), Tensor):
            return value
    return _find_tensor(output, 3)


def extract_loss(output: object) -> Any:
    """The loss in a model's output: `loss`, or the first 0-d tensor."""
    value = _get_field(output, "loss")
    return value if isinstance(value, Tensor) else _find_tensor(output, 0)


def _get_field(output: object, name: str) -> object:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _find_tensor(output: object, ndim: int) -> Any:
    """Return the first tensor with `ndim` dimensions in the tuple `output`; if there is none, return `output`."""
    items = output if isinstance(output, tuple | list) else ()
    return next((item for item in items if isinstance(item, Tensor) and item.ndim == ndim), output)


def adapt_attention_kernel(checked: CheckedModel) -> None:
    """Set `checked.logits` to a function that runs the attention kernel `checked.attention`.

    Each token id has random q, k and v; the kernel's output is used as the logits.
    """
    attention = require(checked.attention)
    generator = torch.Generator().manual_seed(0)
    shape = (_KERNEL_VOCAB_SIZE, KERNEL_HEADS, KERNEL_HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator).to(checked.device) for _ in range(3))
    checked.vocab_size, checked.has_positions = _KERNEL_VOCAB_SIZE, False

    def logits(tokens: Tensor) -> Tensor:
        heads = (x.to(checked.dtype or torch.float32)[tokens].transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
        return attention(*heads).transpose(1, 2).flatten(2)

    checked.logits = logits


def adapt_source_function(checked: CheckedModel, seed: int) -> None:
    """Set `checked.logits` to a function that runs `checked.logits_with_source` with a fixed random source."""
    logits_with_source = require(checked.logits_with_source)
    size = checked.source_vocab_size or checked.vocab_size
    if size is None:
        raise InputError("vocab_size is unknown, but the source needs random tokens; pass vocab_size=")
    source = torch.randint(size, (1, SOURCE_LEN), generator=torch.Generator().manual_seed(seed + 1))

    def logits(tokens: Tensor) -> Tensor:
        return logits_with_source(source.to(tokens.device).expand(len(tokens), -1), None, tokens)

    checked.logits = logits


def logits_by_kernel(
    logits: LogitsFunction,
    names: Iterable[str],
    use_kernel: Callable[[str], AbstractContextManager[None]],
    unsupported: type[Exception],
) -> dict[str, LogitsFunction]:
    """Map each supported kernel name to a logits function that uses this kernel.

    `use_kernel(name)` is a context manager that selects a kernel; it raises `unsupported` if the model cannot use it.
    """

    def run(name: str, tokens: Tensor) -> Tensor:
        with use_kernel(name):
            return logits(tokens)

    functions: dict[str, LogitsFunction] = {}
    for name in names:
        with suppress(unsupported), use_kernel(name):
            functions[name] = partial(run, name)
    return functions
