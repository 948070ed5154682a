"""What a user has as a `CheckedModel`: functions and properties are found where they can be, or taken as given."""

from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.adapters.cutaway import adapt_cutaway_model
from cutaway.check.adapters.module import adapt_attention_kernel, adapt_function, adapt_module
from cutaway.check.adapters.transformers import adapt_transformers_model, is_transformers_model
from cutaway.check.adapters.user_functions import UserFunctionError, validate_override
from cutaway.check.checked_model import CheckedModel
from cutaway.check.module_state import can_upcast, upcast_to_fp32
from cutaway.errors import InputError, format_raised
from cutaway.model import Transformer

MAX_PROBED_SEQ_LEN = 72
"""No check asks with more tokens, unless it knows that they can be read."""
FIELD_NAMES = {each.name for each in fields(CheckedModel)}


def build_checked_model(model: Any, overrides: dict[str, Any], *, seed: int) -> CheckedModel:
    """The target, with what was given in place of what was found."""
    unknown = overrides.keys() - FIELD_NAMES
    if unknown:
        raise InputError(
            f"'{sorted(unknown)[0]}' is nothing a target can offer; it may have {', '.join(sorted(FIELD_NAMES))}"
        )
    found = replace(model) if isinstance(model, CheckedModel) else _adapt_any(model, overrides, seed)
    for name, value in overrides.items():
        setattr(found, name, validate_override(name, value))
    _infer_properties(found)
    return found


def _adapt_any(source: Any, overrides: dict[str, Any], seed: int) -> CheckedModel:
    model = source
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), Transformer):
        model = model.model  # a checkpoint
    if isinstance(getattr(model, "_orig_mod", model), Transformer):
        return adapt_cutaway_model(model, seed)
    if isinstance(model, nn.Module) and is_transformers_model(model):
        return adapt_transformers_model(model, seed)
    if isinstance(model, nn.Module):
        return adapt_module(model, overrides)
    if source is None and ("logits" in overrides or "attention" in overrides):
        return CheckedModel()
    if callable(source):
        return adapt_function(source, overrides)
    raise InputError(
        f"a {type(source).__name__} cannot be checked; give a model of ct.build(…) or ct.load(…), one of transformers, "
        "another nn.Module, or a function from tokens to logits"
    )


@torch.no_grad()
def _infer_properties(checked: CheckedModel) -> None:
    """Find out what follows from what is there, and that the target answers at all."""
    if checked.logits is None and checked.attention is not None:
        adapt_attention_kernel(checked)
    if checked.logits is None:
        raise InputError("there is nothing to ask: give a function tokens (B, T) → logits (B, T, V) as logits=")
    if checked.module is not None:
        checked.module.eval()
        parameter = next(checked.module.parameters(), None)
        if parameter is not None:
            checked.device = parameter.device
            checked.dtype = checked.dtype or parameter.dtype
    low = 0 if checked.vocab_size is None else min(checked.vocab_size - 1, 1)
    probe = torch.full((1, 2), low, dtype=torch.long, device=checked.device)
    try:
        out = checked.logits(probe)
    except UserFunctionError as error:
        raise InputError(str(error)) from error
    except Exception as error:
        raise InputError(
            f"{checked.name} was called with two tokens and {format_raised(error)}; give a function "
            "tokens (B, T) → logits (B, T, V) as logits="
        ) from error
    if not isinstance(out, Tensor) or out.ndim != 3 or out.shape[:2] != probe.shape:
        what = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise InputError(
            f"{checked.name} gave {what} for tokens of shape (1, 2); it must give logits of shape (1, 2, V): "
            "give a function that does as logits="
        )
    checked.vocab_size = checked.vocab_size or out.shape[-1]
    for name in ("pad_token_id", "eos_token_id"):  # some configurations name tokens that a small table does not have
        if not 0 <= (getattr(checked, name) or 0) < checked.vocab_size:
            setattr(checked, name, None)
    if checked.max_seq_len is None and not _declares_max_seq_len(checked.module):
        with upcast_to_fp32(checked.module) if can_upcast(checked) else nullcontext():  # a CPU may be slow in less
            checked.max_seq_len = _probe_max_seq_len(checked, low)
    checked.dtype = checked.dtype or out.dtype


def _declares_max_seq_len(module: nn.Module | None) -> bool:
    """Whether a model's configuration says how much it reads: nothing is then nothing to ask for."""
    return module is not None and is_transformers_model(module)


def _probe_max_seq_len(checked: CheckedModel, token: int) -> int | None:
    """How many tokens it reads, where that is fewer than the longest text of a check; None where all can be read."""
    if checked.device.type != "cpu":  # an index beyond a table ends every later use of a GPU: ask the tables instead
        tables = (
            [part.num_embeddings for part in checked.module.modules() if isinstance(part, nn.Embedding)]
            if checked.module
            else []
        )
        return min((size for size in tables if size > 1), default=None)
    assert checked.logits is not None

    def reads(length: int) -> bool:
        try:
            checked.logits(torch.full((1, length), token))  # type: ignore[misc]
        except Exception:  # whatever it raises, such a text cannot be asked about
            return False
        return True

    if reads(MAX_PROBED_SEQ_LEN):
        return None
    low, high = 2, MAX_PROBED_SEQ_LEN  # it reads two, and not the most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reads(middle) else (low, middle)
    return low
