"""`build_checked_model`: select the adapter for a model, apply overrides, infer missing properties."""

import difflib
from bisect import bisect_left
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from cutaway.check.adapters.cached_forward import add_cached_forward
from cutaway.check.adapters.cutaway import adapt_cutaway_model
from cutaway.check.adapters.length_multiple import pad_to_multiple
from cutaway.check.adapters.module import adapt_attention_kernel, adapt_function, adapt_module, adapt_source_function
from cutaway.check.adapters.transformers import adapt_transformers_model, is_transformers_model
from cutaway.check.adapters.user_functions import UserFunctionError, describe_value, validate_override
from cutaway.check.checked_model import CheckedModel, require
from cutaway.check.module_state import can_upcast, require_weights, upcast_to_fp32
from cutaway.errors import InputError, format_raised
from cutaway.model import Transformer

MAX_PROBED_SEQ_LEN = 72
"""Longest sequence that is tried to infer `max_seq_len`."""
_TRIED_LENGTHS = (64, 128, 256)
"""Sequence lengths that are tried if a forward pass on two tokens fails."""
_FIELD_NAMES = {entry.name for entry in fields(CheckedModel)}


def build_checked_model(model: object, overrides: dict[str, object], *, seed: int) -> CheckedModel:
    """Build a `CheckedModel` from a model or function. `overrides` replace fields that the adapter has set."""
    unknown = overrides.keys() - _FIELD_NAMES
    if unknown:
        name = sorted(unknown)[0]
        similar = difflib.get_close_matches(name, _FIELD_NAMES, 1)
        hint = f"did you mean {similar[0]}=? " if similar else ""
        raise InputError(f"ct.check has no argument '{name}'; {hint}pass one of {', '.join(sorted(_FIELD_NAMES))}")
    for source in (model, getattr(model, "model", None), getattr(model, "module", None), overrides.get("module")):
        if isinstance(source, nn.Module):
            require_weights(source)
    checked = replace(model) if isinstance(model, CheckedModel) else _adapt_any(model, overrides, seed)
    for name, value in overrides.items():
        setattr(checked, name, validate_override(name, value))
    if checked.logits is None and checked.attention is not None:
        adapt_attention_kernel(checked)
    if "logits_with_source" in overrides and "logits" not in overrides:
        adapt_source_function(checked, seed)
        if "kind" not in overrides and not isinstance(model, CheckedModel):
            checked.kind = "encoder-decoder"
    if checked.multiple is not None:
        pad_to_multiple(checked, checked.multiple)
    _infer_properties(checked)
    source = checked.module if checked.module is not None else model
    if checked.logits_with_cache is None and callable(source) and checked.kind != "encoder":
        with _fp32_if_possible(checked):
            add_cached_forward(checked, source)
    return checked


def _adapt_any(source: object, overrides: dict[str, object], seed: int) -> CheckedModel:
    """Select the adapter by the type of `source`, and return the `CheckedModel` that it builds."""
    model = source if isinstance(source, nn.Module) else getattr(source, "model", source)  # a checkpoint has a model
    if isinstance(model, nn.Module) and isinstance(getattr(model, "_orig_mod", model), Transformer):
        return adapt_cutaway_model(model, seed)
    if isinstance(source, nn.Module):
        is_transformers = is_transformers_model(source)
        return adapt_transformers_model(source, seed) if is_transformers else adapt_module(source, overrides)
    if source is None and overrides.keys() & {"logits", "attention", "logits_with_source"}:
        return CheckedModel()
    if callable(source):
        return adapt_function(source, overrides)
    raise InputError(
        f"a {type(source).__name__} cannot be checked; pass a model from ct.build(…) or ct.load(…), a transformers "
        "model, another nn.Module, or a function tokens → logits"
    )


def _infer_properties(checked: CheckedModel) -> None:
    """Run a forward pass on two tokens, validate its output, and infer device, dtype, vocab_size and max_seq_len."""
    if checked.logits is None:
        raise InputError("there is no function to check; pass a function tokens (B, T) → logits (B, T, V) as logits=")
    if checked.module is not None:
        checked.module.eval()
        param = next(checked.module.parameters(), None)
        if param is not None:
            checked.device = param.device
            checked.dtype = checked.dtype or param.dtype
    token = 0 if checked.vocab_size is None else min(checked.vocab_size - 1, 1)
    probe = torch.full((1, checked.supported_length(2)), token, dtype=torch.long, device=checked.device)
    try:
        out = checked.logits(probe)
    except UserFunctionError as error:
        raise InputError(str(error)) from error
    except Exception as error:
        message = f"{checked.name} was called with {probe.shape[1]} tokens and {format_raised(error)}"
        if (length := _find_working_length(checked, token)) is not None:
            raise InputError(
                f"{message}; it works with {length} tokens, so if lengths must be a multiple of a number, pass this "
                f"number as multiple=, such as multiple={length}"
            ) from error
        raise InputError(f"{message}; pass a function tokens (B, T) → logits (B, T, V) as logits=") from error
    if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != probe.shape:
        length = probe.shape[1]
        raise InputError(
            f"{checked.name} returned {describe_value(out)} for tokens of shape (1, {length}); logits have shape "
            f"(1, {length}, V), so pass a function that returns them as logits="
        )
    checked.vocab_size = checked.vocab_size or out.shape[-1]
    for name in ("pad_token_id", "eos_token_id"):  # some configurations have token ids outside the vocabulary
        if not 0 <= (getattr(checked, name) or 0) < checked.vocab_size:
            setattr(checked, name, None)
    is_transformers = checked.module is not None and is_transformers_model(checked.module)
    if checked.max_seq_len is None and not is_transformers:  # None means no limit in a transformers model
        with _fp32_if_possible(checked):
            checked.max_seq_len = _probe_max_seq_len(checked, token)
    checked.dtype = checked.dtype or out.dtype


def _fp32_if_possible(checked: CheckedModel) -> AbstractContextManager[None]:
    """Context manager: the weights in fp32, if there is a module and enough memory. A CPU can be slow in bf16."""
    return upcast_to_fp32(checked.module) if can_upcast(checked) else nullcontext()


def _find_working_length(checked: CheckedModel, token: int) -> int | None:
    """The first of `_TRIED_LENGTHS` for which a forward pass works and returns logits; None if none does.

    None if `multiple` is set, because the length is then not the reason of an error.
    """
    for length in _TRIED_LENGTHS if checked.multiple is None else ():
        try:
            out = require(checked.logits)(torch.full((1, length), token, device=checked.device))
        except Exception:  # any exception means that this length does not work either
            continue
        if isinstance(out, Tensor) and out.ndim == 3 and out.shape[1] == length:
            return length
    return None


def _probe_max_seq_len(checked: CheckedModel, token: int) -> int | None:
    """Find the maximum sequence length by binary search; None if it is at least MAX_PROBED_SEQ_LEN.

    On a GPU, return the number of rows of the smallest embedding instead.
    """
    if checked.device.type != "cpu":  # an index error on a GPU breaks the CUDA context: use the embedding sizes instead
        submodules = checked.module.modules() if checked.module is not None else ()
        sizes = [submodule.num_embeddings for submodule in submodules if isinstance(submodule, nn.Embedding)]
        return min((size for size in sizes if size > 1), default=None)
    logits = require(checked.logits)

    def works(seq_len: int) -> bool:
        try:
            logits(torch.full((1, seq_len), token))
        except Exception:  # any exception means that this length is not supported
            return False
        return True

    step = checked.multiple or 1
    longest = MAX_PROBED_SEQ_LEN + -MAX_PROBED_SEQ_LEN % step
    if works(longest):
        return None
    # The shortest length works and the longest does not. The maximum precedes the first length that does not work.
    lengths = range(max(step, 2), longest, step)
    return lengths[max(bisect_left(lengths, True, key=lambda seq_len: not works(seq_len)), 1) - 1]
